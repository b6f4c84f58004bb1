"""Compact virtual prompts: oracles 4 and 5."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.family import ModelConfig, family_of
from models.partials import merged, partial
from spu_llm.systems.confidential.compact import Compact
from spu_llm.systems.confidential.held import Held
from tests.kit.models import LLAMA, PRIVATE, tiny_params

OWN, FAKES = 2, [3, 4, 8]
TWO = {"gpt2": PRIVATE.with_layers(2), "llama": LLAMA.with_layers(2)}


def prompts_of(config: ModelConfig) -> list[list[int]]:
    """Return four prompts of 12 tokens that differ where fakes are."""
    source = np.random.default_rng(0)
    rows = np.tile(source.integers(1, config.vocab_size, 12), (4, 1))
    rows[:, FAKES] = source.integers(1, config.vocab_size, (4, len(FAKES)))
    return [row.tolist() for row in rows]


def filled(held: Held, config: ModelConfig) -> Any:
    held.fill(family_of(config).fold(tiny_params(config, 1), config))
    return held


def test_masked_attention_is_gathered_attention() -> None:
    """Oracle 4: softmax(Q K'^T + log M) V' over [shared, real, fake] under M = [[1,1,0],[1,0,1]],
    and the merge of two partials, equal attention over the rows that are meant.
    """
    source = np.random.default_rng(0)
    keys, values = source.normal(size=(2, 11, 8))
    queries = source.normal(size=(2, 8))
    shared, spans = slice(0, 5), [slice(5, 8), slice(8, 11)]
    for query, mine, other in zip(queries, spans, spans[::-1], strict=True):
        mask = np.ones(11)
        mask[other] = 0
        with np.errstate(divide="ignore"):
            scores = keys @ query + np.log(mask)
        weights = np.exp(scores - scores.max())
        masked = weights / weights.sum() @ values
        chosen = np.r_[shared, mine]
        gathered = partial(query[None], keys[chosen], values[chosen]).out[0]
        parts = [partial(query[None], keys[at], values[at]) for at in (shared, mine)]
        assert np.abs(masked - gathered).max() <= 4e-16
        assert np.abs(merged(*parts).out[0] - gathered).max() <= 1e-15


@pytest.mark.parametrize("name", TWO)
def test_fakes_share_what_is_around_and_the_own_prompt_is_exact(name: str) -> None:
    """Oracle 5: layer 0 as in the exact cache, later layers not, but for the own prompt; the same
    for all fake prompts.
    """
    config = TWO[name]
    prompts = prompts_of(config)
    everything = range(12)
    exact = filled(Held(config, prompts, everything), config)
    compact = filled(Compact(config, prompts, [], FAKES, OWN), config)
    compact._public = around = np.setdiff1d(np.arange(12), FAKES)
    after = around > min(FAKES)
    for layer in range(2):
        for there, here in zip(exact.migrated(layer), compact.migrated(layer), strict=True):
            there, fakes = there[:, :, around], np.delete(here, OWN, axis=0)
            assert np.array_equal(here[OWN], there[OWN])
            assert (fakes == fakes[:1]).all()
            off = np.abs(fakes - np.delete(there, OWN, axis=0))
            assert off[:, :, ~after].max() < 1e-6
            assert off[:, :, after].max() > 1e-3 if layer else off.max() < 1e-6


@pytest.mark.parametrize("name", TWO)
def test_replies_are_attention_over_fake_and_shared_rows(name: str) -> None:
    """In layer 0, where nothing depends on text before: those of the exact cache. Layers after it:
    of the own prompt alone.
    """
    config = TWO[name]
    prompts = prompts_of(config)
    exact = filled(Held(config, prompts, [0, 1]), config)
    compact = filled(Compact(config, prompts, [0, 1], FAKES, OWN), config)
    query = (
        np.random.default_rng(1)
        .normal(size=(3, config.kv_heads, config.query_groups, config.head_dim))
        .astype(np.float32)
    )
    lanes = [0, OWN, 3]
    for layer in range(2):
        there, here = (held.reply(layer, lanes, query) for held in (exact, compact))
        off = np.abs(there.out - here.out).reshape(3, -1).max(axis=1)
        assert off[1] < 1e-6
        assert (off < 1e-5).all() if layer == 0 else (off[[0, 2]] > 1e-4).all()


def test_memory_is_what_the_paper_counts() -> None:
    """|S - target| + lambda |target|, and |S| for the own prompt, times the width and two."""
    compact = filled(Compact(PRIVATE, prompts_of(PRIVATE), [], FAKES, OWN), PRIVATE)
    assert compact.floats == 2 * PRIVATE.layers * 16 * (9 + 3 * 3 + 12)
