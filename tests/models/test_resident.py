"""Weights that several processes share: as folded, in order, and unchangeable."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from models.family import ModelConfig, family_of, weight_shapes
from models.resident import digest, mapped, place
from models.split import Split
from spu_llm.core.errors import InputError
from tests.kit.models import LLAMA, PRIVATE, tiny_params


@pytest.fixture(params=[PRIVATE, LLAMA], ids=["gpt2", "llama"])
def placed(request: pytest.FixtureRequest) -> Iterator[tuple[ModelConfig, int]]:
    config = request.param
    descriptor = place(tiny_params(config, 1), config)
    yield config, descriptor
    os.close(descriptor)


def test_a_digest_tells_models_apart_that_differ_in_one_weight() -> None:
    collected = []
    for change in (0.0, 0.0, 2.0**-10):
        params = tiny_params(PRIVATE, 1)
        leaves, tree = jax.tree.flatten(params)
        last = np.array(leaves[-1])
        last.flat[-1] += change
        descriptor = place(jax.tree.unflatten(tree, [*leaves[:-1], last]), PRIVATE)
        collected.append(digest(descriptor))
        os.close(descriptor)
    assert collected[0] == collected[1] != collected[2] and len(collected[0]) == 64


def test_they_are_the_folded_weights(placed: tuple[ModelConfig, int]) -> None:
    config, descriptor = placed
    folded = family_of(config).fold(tiny_params(config, 1), config)
    actual = mapped(descriptor, weight_shapes(config))
    assert jax.tree.structure(actual) == jax.tree.structure(folded)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(folded), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype and not ours.flags.writeable


def test_another_process_maps_them_and_nobody_changes_them(placed: tuple[ModelConfig, int]) -> None:
    config, descriptor = placed
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 0, prot=mmap.PROT_WRITE | mmap.PROT_READ)
    first = jax.tree.leaves(mapped(descriptor, weight_shapes(config)))[0]
    code = f"import os; print(os.pread({descriptor}, 4, 0).hex())"
    done = subprocess.run(
        [sys.executable, "-c", code], pass_fds=[descriptor], capture_output=True, text=True
    )
    assert done.stdout.split()[0] == first.tobytes()[:4].hex()


def test_weights_that_may_leave_their_ranges_are_refused() -> None:
    params = jax.tree.map(lambda w: w * 1000, tiny_params(PRIVATE, 1))
    with pytest.raises(InputError, match="cannot be served"):
        place(params, PRIVATE)
    os.close(place(params, PRIVATE, Split(0, 0), on_shares=False))
