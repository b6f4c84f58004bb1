"""A model of two layers between two processes, greedy, against plaintext that knows no protocol:
the tokens, how many each step yields, and what it sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.completions import exact
from models.family import Params, logits
from models.gpt2 import GPT2Config
from models.hf import save_model
from models.tokenizer import Tokenizer
from spu_llm.systems.decoding.request import Request
from tests.kit.models import PRIVATE, endless, save_tokenizer, tiny_params
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S
from tests.kit.processes import Start

TWO = replace(PRIVATE, n_layer=2)
PROMPT, NEW, DRAFTS = "def read", 9, 3
MARGIN = 0.3  # of every decision in logits: far above what shares blur

Greedy = Callable[[list[int]], int]


def weights() -> tuple[Params, Params]:
    """Return the private model's, and a draft model's that often agrees with it."""
    private, noise = endless(tiny_params(TWO, 3)), tiny_params(TWO, 103)
    return private, jax.tree.map(lambda w, e: w + 0.3 * e if w.ndim == 2 else w, private, noise)


def greedy(config: GPT2Config, params: Params, margin: float = 0.0) -> Greedy:
    """Return the likeliest token after a text."""
    forward = jax.jit(lambda tokens: logits(params, config, tokens))

    def after(text: list[int]) -> int:
        padded = text + [0] * (config.n_positions - len(text))
        row = np.asarray(forward(jnp.asarray(padded)))[len(text) - 1]
        last, first = np.sort(row)[-2:]
        assert first - last > margin
        return int(row.argmax())

    return after


def course(prompt: list[int], private: Greedy, public: Greedy) -> tuple[list[int], list[int]]:
    """Return the text, and the drafts that each step accepts: those that greedy decoding would
    write, up to the first other one.
    """
    text, accepted = [*prompt, private(prompt)], []
    while len(text) - len(prompt) < NEW:
        drafts: list[int] = []
        for _ in range(DRAFTS):
            drafts.append(public(text + drafts))
        k = 0
        while k < DRAFTS and private(text + drafts[:k]) == drafts[k]:
            k += 1
        text += [*drafts[:k], private(text + drafts[:k])]
        accepted.append(k)
    return text[len(prompt) :][:NEW], accepted


@pytest.mark.slow
def test_a_drafted_completion_of_two_layers(start: Start, tmp_path: Path) -> None:
    pair = Pair(tmp_path / "private", tmp_path / "public")
    private, public = weights()
    for directory, params in zip(pair, (private, public), strict=True):
        directory.mkdir()
        save_model(directory, TWO, params)
        save_tokenizer(directory)
    prompt = Tokenizer.load(pair.public).encode(PROMPT)
    tokens, accepted = course(prompt, greedy(TWO, private, MARGIN), greedy(TWO, public))
    assert 0 < sum(accepted) < DRAFTS * len(accepted)  # both happen

    file = tmp_path / "result.json"
    demo = start(
        *pair.demo,
        "--prompt",
        PROMPT,
        "--temperature",
        "0",
        "--drafts",
        "model",
        "--draft-length",
        str(DRAFTS),
        "--max-new-tokens",
        str(NEW),
        "--json",
        str(file),
    )
    assert demo.wait(RUN_S) == 0, demo.stderr
    result = json.loads(file.read_text())
    assert result["token_ids"] == tokens
    # Tokens per step are those of the plaintext rule.
    assert (result["steps"], result["accepted"]) == (len(accepted), sum(accepted))
    # Messages are those of the dry runs: so many for each block, and the rest once.
    prefill, step = exact.steps_of(TWO, Request(len(prompt), NEW, DRAFTS, temperature=0.0))
    assert [s["messages"] for s in result["per_step"]] == [step["messages"]] * len(accepted)
    assert result["per_step"][0]["bytes"] == (
        step["client_to_provider"] + step["provider_to_client"]
    )
    online = prefill["messages"] + len(accepted) * step["messages"]
    assert result["messages"]["online"] == online
