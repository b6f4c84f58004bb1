"""The stock path under SPU's options: what is tuned, and that it reaches SPU."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.spu_baseline import layers as spu_layers
from experiments.spu_baseline import options as spu_options
from experiments.spu_baseline import whole as spu_whole
from experiments.spu_baseline.options import OPTIONS, Tuned, puma_gelu, puma_softmax
from models.gpt2 import GPT2Config, init_params
from spu_llm.runtime.spu_runtime import runtime_config


def test_pumas_functions_are_near_the_exact_ones() -> None:
    x = np.linspace(-8, 8, 2001, dtype=np.float32)
    wanted = np.asarray(jax.nn.gelu(x, approximate=True))
    np.testing.assert_allclose(puma_gelu(jnp.asarray(x)), wanted, atol=0.02)
    assert puma_gelu(jnp.float32(-5.0)) == 0 and puma_gelu(jnp.float32(5.0)) == 5
    scores = np.random.default_rng(0).normal(0, 4, (3, 20)).astype(np.float32)
    scores[0, 3] = np.finfo(np.float32).min  # hidden, as Flax writes it
    distribution = np.asarray(puma_softmax(jnp.asarray(scores)))
    np.testing.assert_allclose(distribution, jax.nn.softmax(scores), atol=2e-6)
    assert distribution[0, 3] == 0.0


def test_options_reach_spu() -> None:
    stock = spu_whole.SETTINGS.settings()
    base, *others = OPTIONS
    assert base.config.settings() == stock | {
        "enable_lower_accuracy_rsqrt": False,
        "experimental_disable_mmul_split": False,
    }
    for option in others:
        assert option.config.settings() != base.config.settings() or option.softmax or option.gelu
    tuned = runtime_config(Tuned(lower_accuracy_rsqrt=True, disable_mmul_split=True), profile=False)
    assert tuned.enable_lower_accuracy_rsqrt and tuned.experimental_disable_mmul_split
    assert not runtime_config(Tuned(), profile=False).enable_lower_accuracy_rsqrt


def test_the_layers_take_an_options_functions_and_nothing_stays() -> None:
    config = GPT2Config(16, 8, 8, 1, 2)
    params = jax.tree.map(np.asarray, init_params(config, jax.random.key(0)))
    weights = spu_whole.flax_params(params)

    def primitives() -> dict[str, str]:
        collected = {x.kind: x for x in spu_layers.layers(config, weights, 4, 1)}
        return {
            kind: str(
                jax.make_jaxpr(lambda *xs, fn=collected[kind].fn: fn((), None, *xs))(
                    *(np.zeros(s, np.float32) for s in collected[kind].shapes)
                )
            )
            for kind in ("softmax", "GELU")
        }

    before = primitives()
    with spu_options._functions(OPTIONS[-1]):
        inside = primitives()
    assert "tanh" in before["GELU"] and "tanh" not in inside["GELU"]
    assert "-14.0" in inside["softmax"] and "-14.0" not in before["softmax"]
    assert primitives() == before


@pytest.mark.slow
def test_a_measured_option(tiny_pair: tuple[Path, Path]) -> None:
    result = spu_options.measure(tiny_pair[0], (OPTIONS[0], OPTIONS[2]), lambda name: None)
    base, gelu = result["options"]
    assert base["messages"] > 1000 and base["messages"] == sum(
        kind["messages"] for kind in base["kinds"].values()
    )
    # Nothing but the GELU is another.
    assert gelu["kinds"]["GELU"]["messages"] != base["kinds"]["GELU"]["messages"]
    assert gelu["kinds"]["softmax"]["messages"] == base["kinds"]["softmax"]["messages"]
    assert f"| {gelu['name']} |" in spu_options.table(json.loads(json.dumps(result)))
