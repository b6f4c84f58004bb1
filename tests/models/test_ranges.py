"""What activations can be: bounds that hold, and models that are refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from models import ranges
from models.gpt2 import GPT2Config, fold, init_params
from models.ranges import check_ranges
from spu_llm.errors import InputError

CONFIG = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)


def weights(scale: float, name: str) -> Any:
    """Folded weights of a random model, those of one kind of layer `scale` times as large."""
    params = init_params(CONFIG, jax.random.key(0))
    noise = jax.random.normal(jax.random.key(1), (8, 64))
    for i, block in enumerate(params["blocks"]):
        m = block[name]["weight"].shape[1]
        block[name] = {"weight": scale * noise[:, :m] * (i + 1), "bias": scale * noise[0, :m]}
    return fold(params, CONFIG)


def rows(count: int) -> np.ndarray:
    """Random rows with mean square 1."""
    x = np.random.default_rng(0).normal(size=(count, CONFIG.n_embd))
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True))


def test_no_row_passes_the_bounds_and_some_come_near() -> None:
    block = jax.tree.map(np.asarray, weights(1.0, "fc"))["blocks"][1]["fc"]
    bound = ranges._largest(block, CONFIG.n_embd)
    found = np.max(np.abs(rows(20_000) @ block["weight"] + block["bias"]))
    assert 0.7 * bound < found <= bound

    qkv = jax.tree.map(np.asarray, weights(1.0, "qkv"))["blocks"][1]["qkv"]
    bound = ranges._largest_score(qkv, CONFIG)
    query, key, _ = np.split(rows(3000) @ qkv["weight"] + qkv["bias"], 3, axis=1)
    scores = [query[:, h : h + 4] @ key[:, h : h + 4].T for h in (0, 4)]
    assert 0.3 * bound < np.max(np.abs(scores)) <= bound


def test_a_model_within_its_ranges_is_served() -> None:
    check_ranges(weights(1.0, "fc"), CONFIG)


def test_logits_that_spread_too_far_are_refused() -> None:
    wide = weights(1.0, "fc")
    wide["head"]["weight"] = wide["head"]["weight"] * 1e4
    with pytest.raises(InputError, match="logits can spread over"):
        check_ranges(wide, CONFIG)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    broken = weights(1.0, "fc")
    broken["blocks"][0]["fc"]["weight"] = broken["blocks"][0]["fc"]["weight"].at[0, 0].set(value)
    with pytest.raises(InputError, match="layer 0's feed-forward"):
        check_ranges(broken, CONFIG)


@pytest.mark.parametrize(
    ("name", "what"), [("fc", "layer 1's feed-forward inputs"), ("qkv", "layer 0's attention")]
)
def test_a_model_that_may_leave_them_is_refused_in_one_line(name: str, what: str) -> None:
    scale = 10.0 if name == "fc" else 30.0
    with pytest.raises(InputError, match=what) as caught:
        check_ranges(weights(scale, name), CONFIG)
    assert "\n" not in str(caught.value)
