"""Attention over blocks of several owners: one maximum or a maximum per block, the same numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import HIDDEN
from protocols.arithmetic.field import FIELD_TRANSFER
from protocols.functions.aggregation import OwnedBlock, with_one_maximum, with_own_maxima
from protocols.functions.softmax import score_bits
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.simulation import Simulation

HEADS, QUERIES, D = 2, 3, 4
SIZES = (5, 7)  # a prefix of the provider's, and shares
LARGEST = 40.0
C, P, J = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT
RNG = np.random.default_rng(4)
QUERY = (3 * RNG.normal(size=(HEADS, QUERIES, D))).astype(np.float32)
KEYS, VALUES = (RNG.normal(size=(2, HEADS, sum(SIZES), D)) * [[[[1.5]]], [[[4.0]]]]).astype(
    np.float32
)
VISIBLE = RNG.random((HEADS, QUERIES, sum(SIZES))) < 0.6
VISIBLE[:, 0, : SIZES[0]] = False  # a row that sees nothing of the first block,
VISIBLE[:, 1, SIZES[0] :] = False  # one that sees nothing of the second,
VISIBLE[:, :2, [0, -1]] = [[[False, True], [True, False]]]
VISIBLE[:, 2, 0] = True


def exact(largest: float = LARGEST) -> np.ndarray:
    scores = np.einsum("hnd,htd->hnt", QUERY, KEYS, dtype=np.float64) * (largest / LARGEST)
    assert np.abs(scores).max() < largest
    scores = np.where(VISIBLE, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hnt,htd->hnd", weights, VALUES))


def attended(
    simulation: Simulation, way: Any, hidden: bool, seen: np.ndarray, largest: float = LARGEST
) -> tuple[np.ndarray, int]:
    """Return what two parties come to over a block in the provider's clear and a shared one, and
    the count of what left its range.
    """
    cut, bits = SIZES[0], score_bits(largest, hidden)

    def attention(query: Any, keys: Any, values: Any, k: Any, v: Any, shown: Any) -> Any:
        visible = jnp.where(shown, 0, HIDDEN) if hidden else seen
        first, last = visible[..., :cut], visible[..., cut:]
        blocks = [OwnedBlock(k, v, first), OwnedBlock(keys, values, last)]
        out, outside = way(query, blocks, bits)
        counted = jnp.broadcast_to(outside.astype(jnp.float32), (1,))
        whole = jnp.concatenate([out.reshape(-1), counted])
        return reveal(whole, to=C, label="attention (test)")

    name = f"{way.__name__} {hidden} {int(seen.sum())} {largest}"
    function = SecureFunction(attention, (C, J, J, P, P, C), name)

    def program(session: Any) -> Any:
        def own(owner: int, x: np.ndarray) -> Any:
            return session.private(owner, np.asarray, x.shape, x.dtype, x)

        scaled = (QUERY * (largest / LARGEST)).astype(np.float32)
        query, keys, values = (own(CLIENT, x) for x in (scaled, KEYS[:, cut:], VALUES[:, cut:]))
        k, v = own(PROVIDER, KEYS[:, :cut]), own(PROVIDER, VALUES[:, :cut])
        return session.get(session.call(function, query, keys, values, k, v, own(CLIENT, seen)))

    outcomes, nothing = simulation.run(program)
    assert nothing is None
    return outcomes[:-1].reshape(QUERY.shape), int(outcomes[-1])


WAYS = pytest.mark.parametrize("way", [with_one_maximum, with_own_maxima])


HIDDEN_OR_NOT = pytest.mark.parametrize("hidden", [False, True], ids=["public", "the client's"])
SCORES = pytest.mark.parametrize("largest", [LARGEST, 1.0])  # 1.0 has the fewest bits there are


@SCORES
@HIDDEN_OR_NOT
@WAYS
def test_both_ways_are_attention_over_all_blocks(
    simulation: Simulation, way: Any, hidden: bool, largest: float
) -> None:
    """Rows that see nothing of one of the blocks among them."""
    actual, outside = attended(simulation, way, hidden, VISIBLE, largest)
    np.testing.assert_allclose(actual, exact(largest), atol=0.02)
    assert not outside


@SCORES
@HIDDEN_OR_NOT
def test_what_no_row_may_see_costs_no_exponential(
    simulation: Simulation, hidden: bool, largest: float
) -> None:
    """Of rows that see one column more each, as in a causal forward; among them one that sees
    nothing but itself. The values are of attention over what is visible.
    """
    reach = (1, 7, 12)
    seen = (RNG.random(VISIBLE.shape) < 0.6) & (np.arange(12) < np.array(reach)[:, None])
    seen[:, :, 0] = True

    def attention(query: Any, keys: Any, values: Any, shown: Any) -> Any:
        visible = jnp.where(shown, 0, HIDDEN) if hidden else seen
        bits = score_bits(largest, hidden)
        block = OwnedBlock(keys, values, visible)
        out, outside = with_one_maximum(query, [block], bits, reach=reach)
        counted = jnp.broadcast_to(outside.astype(jnp.float32), (1,))
        return reveal(jnp.concatenate([out.reshape(-1), counted]), to=C, label="attention (test)")

    function = SecureFunction(attention, (C, J, J, C), f"causal {hidden} {largest}")
    scaled = (QUERY * (largest / LARGEST)).astype(np.float32)

    def program(session: Any) -> Any:
        def own(x: np.ndarray) -> Any:
            return session.private(CLIENT, np.asarray, x.shape, x.dtype, x)

        args = [own(x) for x in (scaled, KEYS, VALUES, seen)]
        demand = session.preprocess(function, *args)
        units = demand.correlations[FIELD_TRANSFER.name].units
        return session.get(session.call(function, *args)), units

    outcomes, units = simulation.run(program)[CLIENT]
    assert units == 2 * HEADS * sum(reach)  # two for each exponential
    scores = np.where(seen, np.einsum("hnd,htd->hnt", scaled, KEYS, dtype=np.float64), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = np.einsum("hnt,htd->hnd", weights / weights.sum(axis=-1, keepdims=True), VALUES)
    np.testing.assert_allclose(outcomes[:-1].reshape(QUERY.shape), wanted, atol=0.02)
    assert not outcomes[-1]


@pytest.mark.parametrize("owner", [C, P], ids=["the client's", "the provider's"])
def test_what_is_added_to_scores_is_one_party_s_own(simulation: Simulation, owner: Owner) -> None:
    """And costs no message: relative positions are a term of every score."""
    bias = (3 * RNG.normal(size=VISIBLE.shape)).astype(np.float32)
    scores = np.einsum("hnd,htd->hnt", QUERY, KEYS, dtype=np.float64) + bias
    weights = np.where(VISIBLE, np.exp(scores), 0.0)
    weights /= weights.sum(axis=-1, keepdims=True)
    messages = []
    for added in (bias, None):

        def attention(query: Any, keys: Any, values: Any, more: Any, given: Any = added) -> Any:
            block = OwnedBlock(keys, values, jnp.asarray(VISIBLE))
            of_scores = None if given is None else more
            out, _ = with_one_maximum(query, [block], score_bits(LARGEST), of_scores)
            return reveal(out, to=C, label="attention (test)")

        function = SecureFunction(attention, (C, J, J, owner), f"biased {added is None} {owner}")

        def program(session: Any, function: SecureFunction = function) -> Any:
            def own(who: int, x: np.ndarray) -> Any:
                return session.private(who, np.asarray, x.shape, x.dtype, x)

            args = [own(CLIENT, x) for x in (QUERY, KEYS, VALUES)]
            args.append(own(CLIENT if owner is C else PROVIDER, bias))
            session.prepare(function, *args)
            mark = len(session.meter.entries)
            opened = session.get(session.call(function, *args))
            sent = [e.traffic.messages for e in session.meter.entries[mark:] if e.kind != "pool"]
            return opened, sum(sent)

        opened, count = simulation.run(program)[CLIENT]
        messages.append(count)
        if added is not None:
            exactly = np.einsum("hnt,htd->hnd", weights, VALUES)
            np.testing.assert_allclose(opened, exactly, atol=0.02)
    assert messages[0] == messages[1]


@WAYS
def test_a_row_that_sees_nothing_is_counted(simulation: Simulation, way: Any) -> None:
    """Its weights have no sum that could be inverted: the reciprocal's own range check."""
    blind = VISIBLE.copy()
    blind[1, 2] = False
    assert attended(simulation, way, True, blind)[1] > 0


@WAYS
def test_each_party_hides_columns_of_its_own(simulation: Simulation, way: Any) -> None:
    """The provider the first two of its block, the client some of the shared one; no row sees the
    former, all see the provider's others.
    """
    seen = VISIBLE.copy()
    seen[..., :2], seen[..., 2 : SIZES[0]] = False, True
    cut, bits = SIZES[0], score_bits(LARGEST, True)

    def attention(
        query: Any, keys: Any, values: Any, k: Any, v: Any, empty: Any, shown: Any
    ) -> Any:
        blocks = [
            OwnedBlock(k, v, jnp.broadcast_to(empty, (HEADS, QUERIES, 2))),
            OwnedBlock(keys, values, jnp.where(shown, 0, HIDDEN)),
        ]
        out, outside = way(query, blocks, bits)
        counted = jnp.broadcast_to(outside.astype(jnp.float32), (1,))
        return reveal(jnp.concatenate([out.reshape(-1), counted]), to=C, label="attention (test)")

    function = SecureFunction(attention, (C, J, J, P, P, P, C), f"{way.__name__}, of each")

    def program(session: Any) -> Any:
        def own(owner: int, x: Any) -> Any:
            return session.private(owner, np.asarray, x.shape, x.dtype, x)

        query, keys, values = (own(CLIENT, x) for x in (QUERY, KEYS[:, cut:], VALUES[:, cut:]))
        k, v = own(PROVIDER, KEYS[:, :cut]), own(PROVIDER, VALUES[:, :cut])
        empty = own(PROVIDER, np.full(2, HIDDEN, np.int32))
        last = own(CLIENT, seen[..., cut:])
        return session.get(session.call(function, query, keys, values, k, v, empty, last))

    outcomes, _ = simulation.run(program)
    scores = np.where(seen, np.einsum("hnd,htd->hnt", QUERY, KEYS, dtype=np.float64), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = np.einsum("hnt,htd->hnd", weights / weights.sum(axis=-1, keepdims=True), VALUES)
    np.testing.assert_allclose(outcomes[:-1].reshape(QUERY.shape), wanted, atol=0.02)
    assert not outcomes[-1]
