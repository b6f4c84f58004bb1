"""A vault's and an engine's arithmetic together: what a whole model says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from models.family import ModelConfig, family_of
from spu_llm.systems.confidential.engine import Engine
from spu_llm.systems.confidential.held import Held
from spu_llm.systems.confidential.learned import floats_per_layer, learned
from tests.kit.models import LLAMA, PRIVATE, tiny_params
from tests.kit.vaults import Vaults, is_greedy

CONFIGS = {"gpt2": PRIVATE, "llama": LLAMA}
STEPS = 6
WITHIN = 2e-5  # of logits near 10, in float32


def fill(config: ModelConfig, weights: Any, prompts: Sequence[list[int]], public: range) -> Any:
    held = Held(config, prompts, public)
    return held, held.fill(weights)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("users", [1, 8])
@pytest.mark.parametrize("public", [0, 3])
def test_text_and_logits_are_those_of_the_whole_model(name: str, users: int, public: int) -> None:
    """Users of different vaults, prompts of different lengths, together in every step; also with
    a public beginning that the engine computes on by itself.
    """
    config = CONFIGS[name]
    params = tiny_params(config, 1)
    weights = family_of(config).fold(params, config)
    source = np.random.default_rng(users)
    prompts = [source.integers(1, config.vocab_size, 5 + 3 * i).tolist() for i in range(users)]
    engine, lanes, first = Engine(config, weights, users + 1), [], []
    for prompt in prompts:
        held, after = fill(config, weights, [prompt], range(public))
        lane = engine.join()
        engine.place(lane, len(prompt))
        for layer in range(config.layers if public else 0):
            keys, values = held.migrated(layer)
            engine.give(lane, layer, keys[0], values[0])
        lanes.append((lane, held))
        first.append(after[0])
    vaults = Vaults([(held, 0) for _, held in lanes])
    rows = [np.stack(first)]
    texts = [rows[0].argmax(-1)]
    for _ in range(STEPS - 1):
        rows.append(engine.step([lane for lane, _ in lanes], texts[-1].tolist(), vaults))
        texts.append(rows[-1].argmax(-1))
    for i, prompt in enumerate(prompts):
        expected = is_greedy(config, params, prompt, [int(t[i]) for t in texts])
        actual = np.stack([r[i] for r in rows])
        assert np.abs(actual - actual.mean(-1, keepdims=True) - expected).max() < WITHIN
    floats = floats_per_layer(config) * config.layers * (STEPS - 1) * users
    assert vaults.floats == floats


@pytest.mark.parametrize("name", CONFIGS)
def test_floats_of_a_layer_are_the_corrected_count(name: str) -> None:
    """2 d + 2 H, not the printed 2 d + 1; d is the width of all query heads."""
    assert floats_per_layer(CONFIGS[name]) == 2 * 16 + 2 * {"gpt2": 2, "llama": 4}[name]


def test_a_lane_that_leaves_hands_nothing_to_the_next() -> None:
    config = PRIVATE
    params = tiny_params(config, 1)
    weights = family_of(config).fold(params, config)
    engine = Engine(config, weights, 1)
    held, after = fill(config, weights, [[5, 6, 7]], range(0))
    texts = []
    for _ in range(2):
        lane = engine.join()
        engine.place(lane, 3)
        tokens = [int(after[0].argmax())]
        for _ in range(STEPS - 1):
            row = engine.step([lane], tokens[-1:], Vaults([(held, 0)]))
            tokens.append(int(row[0].argmax()))
        texts.append(tokens)
        engine.leave(lane)
    assert texts[0] == texts[1]
    is_greedy(config, params, [5, 6, 7], texts[0])


def test_what_is_learned_has_sizes() -> None:
    facts = learned(PRIVATE, [7], [[1, 2, 3]])
    assert "2 tokens x 1 layers, 2 heads x (A 8, m 1, gamma 1) of 32 bit" in facts["engine"][2]
    assert "length of every prompt: 7 tokens" in facts["engine"]
