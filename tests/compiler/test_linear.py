"""Linear equations on shares: what JAX computes in plaintext comes out, with no message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.compiler.plan import Plan, Run, make_plan
from spu_llm.compiler.walker import run_local, walk_plan
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Bool,
    Owner,
    Private,
    Public,
    Value,
    encode,
    public,
)
from spu_llm.runtime.simulation import reconstruct

FRAC_BITS = 18
RNG = np.random.default_rng(0)
A = np.round(RNG.normal(size=(3, 4)) * 64).astype(np.float32) / 64
B = np.round(RNG.normal(size=(3, 4)) * 64).astype(np.float32) / 64
WHOLE = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.0
MASK = RNG.random((3, 4)) < 0.5

# Of two shared arrays [3, 4] and a public position.
LINEAR: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda a, b, i: a + b - 0.5,
    "negative": lambda a, b, i: -a,
    "whole factor": lambda a, b, i: a * 3.0 + b * -4.0,
    "whole constants": lambda a, b, i: a * WHOLE,
    "row sums": lambda a, b, i: jnp.sum(a, axis=-1),
    "running sums": lambda a, b, i: jnp.cumsum(a, axis=1),
    "running sums from the end": lambda a, b, i: jax.lax.cumsum(a, axis=0, reverse=True),
    "layout": lambda a, b, i: jnp.flip(a.T.reshape(2, 6)[None], axis=-1),
    "stack": lambda a, b, i: jnp.stack([a, b], axis=1)[:, 0],
    "concatenation with a constant": lambda a, b, i: jnp.concatenate([a, jnp.ones((1, 4))]),
    "split": lambda a, b, i: jnp.split(a, 2, axis=-1)[1],
    "public choice": lambda a, b, i: jnp.where(MASK, a, b),
    "slice at a public place": lambda a, b, i: jax.lax.dynamic_slice_in_dim(a, i, 2),
    "rows written at a public place": lambda a, b, i: jax.lax.dynamic_update_slice(
        a, b[:2], (i, 0)
    ),
    "numbers at constant places": lambda a, b, i: jnp.take(
        a, np.array([[3, 0], [1, 1]]), axis=1, mode="clip"
    ),
    "rows at public places": lambda a, b, i: jnp.take(b, jnp.stack([i, i + 1]), 0, mode="clip"),
    "integers": lambda a, b, i: a * (i + 1) + b,
    "integer as float": lambda a, b, i: a.astype(jnp.float32) * 2.0 + 0.25,
}
OF_INTEGERS = ("integers", "integer as float")
NOT_LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda a, b: a * b,
    "broken factor": lambda a, b: a * 0.5,
    "comparison": lambda a, b: (a < b).astype(jnp.float32),
    "secret choice": lambda a, b: jnp.where(a < 0, a, b),
    "rounding": lambda a, b: a.astype(jnp.int32),
    "rounding to what is not negative": lambda a, b: a.astype(jnp.uint32),
    "matrix product": lambda a, b: a @ b.T,
    "pairs of places": lambda a, b: a[np.array([0, 2]), np.array([3, 1])],
    "nothing beyond the ends": lambda a, b: jnp.take(a, np.array([0, 9]), axis=1, mode="fill"),
}


def shared(plain: np.ndarray, bits: int = 64) -> list[Value]:
    words = encode(plain, FRAC_BITS if plain.dtype.kind == "f" else 0)
    mask = RNG.integers(0, 2**64, words.shape, np.uint64)
    low = np.uint64((1 << bits) - 1) if bits < 64 else ~np.uint64(0)
    frac_bits = FRAC_BITS if plain.dtype.kind == "f" else 0
    return [Arith(w & low, plain.dtype, frac_bits, bits) for w in (mask, words - mask)]


def planned(fn: Callable[..., Any], arrays: Sequence[Any], owners: Any) -> Plan:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return make_plan(lambda *xs: [fn(*xs)], shapes, owners)


def run_both(plan: Plan, inputs: Sequence[Sequence[Value]]) -> list[list[Value]]:
    """Return every step of `plan` at both parties; the public ones are computed plainly."""

    def at(rank: int) -> list[Value]:
        def run(step: Run, values: list[Value]) -> list[Value]:
            assert step.local, step
            return run_local(rank, FRAC_BITS, step, values)

        def no_ops(*args: Any) -> list[list[Value]]:
            raise AssertionError

        return walk_plan(plan, [pair[rank] for pair in inputs], public, run, no_ops)

    return [at(CLIENT), at(PROVIDER)]


@pytest.mark.parametrize("name", LINEAR)
@settings(max_examples=5, derandomize=True)
@given(at=st.integers(-1, 4))
def test_shares_give_what_plaintext_gives(name: str, at: int) -> None:
    """Public positions past the ends are moved inside, as JAX does."""
    scale = 64 if name in OF_INTEGERS else 1
    a, b = ((x * scale).astype(np.int32 if name in OF_INTEGERS else np.float32) for x in (A, B))
    place = np.int32(at)
    plan = planned(LINEAR[name], (a, b, place), [Owner.JOINT, Owner.JOINT, Owner.PUBLIC])
    outcomes = run_both(plan, [shared(a), shared(b), [Public(np.asarray(place))] * 2])
    wanted = LINEAR[name](jnp.asarray(a), jnp.asarray(b), place)
    np.testing.assert_array_equal(reconstruct([outcomes[0][0], outcomes[1][0]]), wanted)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_is_left_to_a_segment(name: str) -> None:
    plan = planned(NOT_LINEAR[name], (A, B), [Owner.JOINT, Owner.JOINT])
    assert any(isinstance(s, Run) and not s.local for s in plan.steps)


def test_what_one_party_knows_is_its_share() -> None:
    plan = planned(lambda a, b: a + b, (A, B), [Owner.JOINT, Owner.PROVIDER])
    theirs = [Private(PROVIDER, B.shape, B.dtype, x) for x in (None, B)]
    outcomes = run_both(plan, [shared(A), theirs])
    np.testing.assert_array_equal(reconstruct([outcomes[0][0], outcomes[1][0]]), A + B)
    # The client's share does not depend on what it does not know.
    mine = shared(A)
    zero = [Private(PROVIDER, B.shape, B.dtype, x) for x in (None, np.zeros_like(B))]
    one, other = (run_both(plan, [mine, x])[CLIENT][0] for x in (theirs, zero))
    assert isinstance(one, Arith) and isinstance(other, Arith)
    np.testing.assert_array_equal(one.words, other.words)


def test_narrow_shares_stay_narrow() -> None:
    small = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
    plan = planned(lambda a, b: a - b * 3, (small, small), [Owner.JOINT] * 2)
    outcomes = run_both(plan, [shared(small, 7), shared(small, 9)])
    first, second = outcomes[0][0], outcomes[1][0]
    assert isinstance(first, Arith) and isinstance(second, Arith) and first.bits == 7
    total = (first.words + second.words) & np.uint64(127)
    np.testing.assert_array_equal(total, (-2 * small).astype(np.int64).view(np.uint64) & 127)


def test_factors_of_two_widen_a_narrow_share() -> None:
    small = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
    plan = planned(lambda a: a * 24, (small,), [Owner.JOINT])
    outcomes = run_both(plan, [shared(small, 5)])
    first, second = outcomes[0][0], outcomes[1][0]
    assert isinstance(first, Arith) and isinstance(second, Arith) and first.bits == 8
    # Mod 2^8: the share says small mod 2^5, and 24 * 2^5 is a multiple of 2^8.
    total = (first.words + second.words) & np.uint64(255)
    np.testing.assert_array_equal(total, (24 * small).astype(np.int64).view(np.uint64) & 255)


def test_bits_of_two_owners_become_shared_bits() -> None:
    plan = planned(
        lambda a, b: jnp.concatenate([a, b]), (MASK, ~MASK), [Owner.CLIENT, Owner.PROVIDER]
    )
    inputs: list[list[Value]] = [
        [Private(owner, MASK.shape, MASK.dtype, x if rank == owner else None) for rank in (0, 1)]
        for owner, x in ((CLIENT, MASK), (PROVIDER, ~MASK))
    ]
    outcomes = run_both(plan, inputs)
    assert all(isinstance(party[0], Bool) for party in outcomes)
    np.testing.assert_array_equal(
        reconstruct([outcomes[0][0], outcomes[1][0]]), np.concatenate([MASK, ~MASK])
    )


def test_shared_bits_move() -> None:
    bits = RNG.random((3, 4)) < 0.5
    mask = RNG.integers(0, 2, bits.shape, np.uint64)
    halves: list[Value] = [
        Bool(w, np.dtype(bool), 0, 1) for w in (mask, mask ^ bits.astype(np.uint64))
    ]
    plan = planned(lambda x: x.T[1:].reshape(-1), (bits,), [Owner.JOINT])
    outcomes = run_both(plan, [halves])
    np.testing.assert_array_equal(
        reconstruct([outcomes[0][0], outcomes[1][0]]), bits.T[1:].reshape(-1)
    )


def test_numbers_in_boolean_shares_are_refused() -> None:
    plan = planned(lambda a, b: a + b, (A, B), [Owner.JOINT] * 2)
    words = np.zeros(A.shape, np.uint64)
    with pytest.raises(TypeError, match="boolean"):
        run_both(plan, [[Bool(words, A.dtype, FRAC_BITS, 64)] * 2, shared(B)])
