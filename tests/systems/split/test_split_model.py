"""Front, middle and back one after the other are the whole model (spec: oracle 9 of NOIR)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.family import ModelConfig, family_of, logits
from models.gpt2 import GPT2Config
from models.llama import LlamaConfig
from models.split import Split, back_texts, front_texts, middle_texts
from spu_llm.core.errors import InputError

GPT2 = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=4, n_head=2)
LLAMA = LlamaConfig(
    vocab_size=32,
    max_position_embeddings=16,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.slow
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("split", [Split(1, 1), Split(0, 3), Split(2, 0)])
def test_logits_and_gradients_are_the_whole_models(config: ModelConfig, split: Split) -> None:
    family = family_of(config)
    params = family.init(config, jax.random.key(1))
    # Larger than at the start of training, so that every block counts.
    params = jax.tree.map(lambda w: 4 * w if w.ndim > 1 else w, params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 9)))

    def in_parts(params: Any) -> jax.Array:
        ends = split.parts(family.fold(params, config))
        x = front_texts(ends[0], config, tokens)
        return back_texts(ends[2], config, middle_texts(ends[1], config, x))

    def whole(params: Any) -> jax.Array:
        return jax.vmap(lambda text: logits(params, config, text))(tokens)

    np.testing.assert_allclose(in_parts(params), whole(params), atol=2e-5)

    def loss(forward: Callable[[Any], jax.Array]) -> Any:
        return jax.grad(lambda p: jnp.mean(jax.nn.log_softmax(forward(p))[..., 3]))(params)

    actual, wanted = (jax.tree.leaves(loss(f)) for f in (in_parts, whole))
    assert max(float(jnp.abs(w).max()) for w in wanted) > 1e-4
    for a, b in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("split", [Split(2, 2), Split(-1, 1), Split(4, 0)])
def test_a_split_without_a_middle_is_refused(split: Split) -> None:
    with pytest.raises(InputError, match="leaves no middle of a model of 4 blocks"):
        split.check(GPT2)
