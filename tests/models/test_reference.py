"""Logits against the `transformers` implementation, loaded from the very same directory."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from models.family import logits
from models.gpt2 import GPT2Config, init_params
from models.hf import load_model, save_model
from models.tokenizer import Tokenizer
from tests.kit.paths import SHIPPED

TEXT = 'def read_config(path):\n    """Größe: 3 µm → 漢字 🙂"""\n\treturn open(path)\n'


def assert_same_logits(directory: Path, tokens: np.ndarray) -> None:
    """Check that both implementations agree on `tokens` within 1e-4, in float32."""
    from transformers import FlaxGPT2LMHeadModel

    reference = FlaxGPT2LMHeadModel.from_pretrained(directory)
    weights = reference.to_fp32(reference.params)
    wanted = np.asarray(reference(tokens[None], params=weights).logits[0])
    config, params = load_model(directory)
    scores = jax.jit(lambda p, t: logits(p, config, t))(params, tokens)
    assert wanted.dtype == scores.dtype == np.float32
    # Ours have mean zero over the vocabulary, which changes no distribution.
    np.testing.assert_allclose(scores, wanted - wanted.mean(-1, keepdims=True), atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_random_weights(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=50, n_positions=24, n_embd=32, n_layer=3, n_head=4)
    key = jax.random.key(0)
    params = jax.tree.map(
        lambda w: w + 0.2 * jax.random.normal(key, w.shape), init_params(config, key)
    )
    save_model(tmp_path, config, params, dtype=np.float32)
    assert_same_logits(tmp_path, np.random.default_rng(0).integers(50, size=24))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param("private", marks=pytest.mark.slow), "public"])
def test_shipped_weights(name: str) -> None:
    tokens = np.array(Tokenizer.load(SHIPPED / name).encode(TEXT))
    assert_same_logits(SHIPPED / name, tokens)


@pytest.mark.filterwarnings("ignore")
def test_shipped_tokenizer() -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(SHIPPED / "private")
    tokenizer = Tokenizer.load(SHIPPED / "private")
    ids = tokenizer.encode(TEXT)
    assert reference.encode(TEXT) == ids
    assert reference.decode(ids) == tokenizer.decode(ids) == TEXT
    assert {reference.eos_token_id} == tokenizer.eos_ids
    assert len(reference) == tokenizer.vocab_size
