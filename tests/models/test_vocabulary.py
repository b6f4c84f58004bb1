"""A model has the tokens of its tokenizer: rows that no token has can be drawn by nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models.draft import Drafter
from models.family import logits
from models.hf import load_config, load_folded, load_model, save_model
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling, Streams
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.runtime.session import PlaintextSession
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.watermark.model_sampler import ModelSampler
from tests.kit.models import LLAMA, VOCAB, make_pair, save_tokenizer, tiny_params

PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return models with more rows than tokens, not as many in both; each extra row is likelier
    than all tokens.
    """
    return make_pair(tmp_path_factory.mktemp("padded"), 64, 32)


def whole(directory: Path, tmp_path: Path) -> tuple[Any, Any]:
    """Return the same model with all its rows, as it loads without a tokenizer."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    return load_model(tmp_path)


def test_rows_without_a_token_are_left_out(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """What is left is the same distribution, of tokens alone."""
    config, params = load_model(pair[0])
    assert config == load_config(pair[0]) and config.vocab_size == VOCAB
    all_rows, of_all = whole(pair[0], tmp_path)
    assert all_rows.vocab_size == VOCAB + 64
    tokens = np.array(PROMPT)
    scores, wanted = logits(params, config, tokens), logits(of_all, all_rows, tokens)
    assert (np.argmax(wanted, axis=-1) >= VOCAB).all()
    known = jax.nn.log_softmax(wanted[:, :VOCAB], axis=-1)
    np.testing.assert_allclose(jax.nn.log_softmax(scores, axis=-1), known, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_head_of_its_own_are_left_out(tmp_path: Path, tied: bool) -> None:
    larger = replace(LLAMA, vocab_size=VOCAB + 64, tie_word_embeddings=tied)
    params = tiny_params(larger, 1)
    save_model(tmp_path, larger, params, dtype=np.float32)
    save_tokenizer(tmp_path)
    config, loaded = load_model(tmp_path)
    assert config == replace(larger, vocab_size=VOCAB)
    np.testing.assert_array_equal(loaded["embed"], params["embed"][:VOCAB])
    if not tied:
        np.testing.assert_array_equal(loaded["head"], params["head"][:, :VOCAB])


@pytest.mark.parametrize(
    ("drafts", "temperature", "verify"),
    [
        (0, 0.0, "token"),
        (2, 0.0, "token"),
        (2, 1.0, "token"),
        (2, 1.0, "race"),
        (2, 1.0, "post"),
        (2, 1.0, "naive"),
    ],
)
def test_no_completion_draws_a_row_without_a_token(
    pair: tuple[Path, Path], drafts: int, temperature: float, verify: str
) -> None:
    private, public = pair
    config, params = load_model(private)
    completion = Completion.of(config, Request(len(PROMPT), 12, drafts, temperature, verify))
    streams = Streams(Prg.from_seed(1, "drafts"), Prg.from_seed(1, "sampling"))
    drafter = Drafter(*load_model(public), 80) if drafts else None
    client = ClientSide(PROMPT, Tokenizer.load(private), drafter, completion.verifier, streams)
    session = PlaintextSession()
    decoder = completion.decoder(session, share_weights(session, config, params))
    generate(session, completion, decoder, client, Prg.from_seed(1, "joint randomness"))
    assert len(client.tokens) == 12 and max(client.tokens) < VOCAB


def test_no_candidate_of_a_watermark_has_a_row_without_a_token(pair: tuple[Path, Path]) -> None:
    config, weights = load_folded(pair[0])
    sampler = ModelSampler(config, weights, frozenset([0]), Sampling(1.0))
    assert len(sampler.distribution(PROMPT)) == VOCAB
    drawn = sampler.sample(PROMPT, 8, 3)
    assert max(token for one in drawn for token in one.content) < VOCAB  # type: ignore[operator]


def _hole(content: Any) -> None:
    del content["model"]["merges"][-1]
    vocab = content["model"]["vocab"]
    vocab["far"] = 300
    del vocab[max(vocab, key=lambda token: vocab[token] if vocab[token] < 300 else -1)]


def _shared(content: Any) -> None:
    content["model"]["vocab"]["far"] = 17


def _two(content: Any) -> None:
    content["added_tokens"][0]["id"] = 288


def _jump(content: Any) -> None:
    one = content["added_tokens"][0]
    for name, number in (("b", 289), ("a", 288)):
        content["added_tokens"].append(one | {"content": f"<{name}>", "id": number})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_hole, "but none with number 287"),
        (_shared, 'and "far" one number'),
        (_two, 'gives "<|endoftext|>" two numbers'),
        (_jump, "a number that does not follow on"),
        (lambda c: c["model"]["vocab"].update(far=1.5), 'gives "far" the number 1.5'),
        (lambda c: c["model"]["vocab"].update(far=-1), 'gives "far" the number -1'),
        (lambda c: c.update(added_tokens=[3]), "has added_tokens that are none"),
    ],
)
def test_numbers_that_do_not_name_one_token_each(
    tmp_path: Path, change: Callable[[Any], None], expected: str
) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        Tokenizer.load(tmp_path)
    assert expected in str(caught.value) and str(path) in str(caught.value)
