"""A LLaMA behind every command, with a LLaMA as public draft model."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.family import logits
from models.hf import load_model, save_model
from models.tokenizer import Tokenizer
from spu_llm.app import cli
from tests.kit.models import LLAMA, save_tokenizer, tiny_params
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Start

PROMPT, NEW, DRAFTS = "def read(", 4, 2
MARGIN = 0.05  # of every decision in logits: far above what shares blur


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a private model, and a draft model that often agrees with it."""
    root = tmp_path_factory.mktemp("llamas")
    pair = Pair(root / "private", root / "public")
    private = tiny_params(LLAMA, 6)
    private["head"][:, 0] = 0.0  # greedy decoding does not end by chance
    public = jax.tree.map(
        lambda w, e: w + 0.3 * e if w.ndim == 2 else w, private, tiny_params(LLAMA, 106)
    )
    for directory, params in zip(pair, (private, public), strict=True):
        save_model(directory, LLAMA, params)
        save_tokenizer(directory)
    return pair


def greedy(pair: Pair, count: int) -> list[int]:
    """Return the private model's own continuation, in plaintext."""
    config, params = load_model(pair.private)
    tokens = Tokenizer.load(pair.public).encode(PROMPT)
    for _ in range(count):
        row = np.asarray(logits(params, config, jnp.asarray(tokens)))[-1]
        last, first = np.sort(row)[-2:]
        assert first - last > MARGIN
        tokens.append(int(row.argmax()))
    return tokens[-count:]


@pytest.mark.slow
def test_demo_writes_the_plaintext_text(start: Start, llamas: Pair, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    demo = start(
        *llamas.demo,
        "--prompt",
        PROMPT,
        "--temperature",
        "0",
        "--draft-length",
        str(DRAFTS),
        "--max-new-tokens",
        str(NEW),
        "--json",
        str(file),
    )
    assert demo.wait(RUN_S) == 0, demo.stderr
    result = json.loads(file.read_text())
    assert result["token_ids"] == greedy(llamas, NEW)
    assert result["config"]["model.family"] == "llama"
    assert result["config"]["model.num_key_value_heads"] == 2
    assert result["config"]["model.tie_word_embeddings"] is False


@pytest.mark.slow
def test_correlations_is_prepared_and_taken(start: Start, llamas: Pair, tmp_path: Path) -> None:
    server = start(*llamas.serve("--pool", str(tmp_path / "provider")))
    address = ["--server", f"127.0.0.1:{server.until_listening()}", "--insecure"]
    request = ["--prompt", PROMPT, "--max-new-tokens", "2", "--standard", "--temperature", "0"]
    both = [*address, "--draft-model", str(llamas.public), "--pool", str(tmp_path / "client")]
    files = [tmp_path / "prepared", tmp_path / "result"]
    for command, file in zip(("prepare", "generate"), files, strict=True):
        client = start(command, *both, *request, "--json", str(file))
        assert client.wait(RUN_S) == 0, client.stderr
    prepared, result = (json.loads(file.read_text()) for file in files)
    assert prepared["steps"] >= 1
    assert result["token_ids"] == greedy(llamas, 2)
    offline = [sum(r["bytes"]["offline"].values()) for r in (prepared, result)]
    assert offline[1] < offline[0]
    server.send(signal.SIGTERM)
    assert server.wait(END_S) == 128 + signal.SIGTERM


def test_an_estimate_needs_a_shape_alone(llamas: Pair, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llamas.private / "config.json").read_text())
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit) as end:
        cli.main(
            [
                "estimate",
                "--model",
                str(tmp_path),
                "--prompt-tokens",
                "5",
                "--draft-length",
                "2",
                "--json",
                str(file),
            ]
        )
    assert end.value.code == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["model"]["family"] == "llama" and result["step"]["seconds"] > 0
