"""Slots of tiles: counters that only move forward, and every query meets every row once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocols.arithmetic.slots import Shape, Slots, shape_for


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 20), max_size=9)), max_size=12),
)
def test_slots_only_move_forward(size: int, calls: list[tuple[int, list[int]]]) -> None:
    slots = Slots()
    shapes: dict[int, Shape] = {}
    opened: dict[tuple[int, int], int] = {}
    asked: set[tuple[int, int]] = set()
    for queries, names in calls:
        ids = np.array(sorted(set(names)) + [-1])
        rehearsed = slots.copy()
        rehearsed.schedule(ids, queries, size)
        plan = slots.schedule(ids, queries, size)
        assert rehearsed == slots
        assert not shapes.keys() & plan.fresh
        shapes |= plan.fresh
        for o in plan.openings:
            for position, slot in zip(o.positions.tolist(), o.slots.tolist(), strict=True):
                assert (o.tile, slot) not in opened and slot < shapes[o.tile].slots
                opened[o.tile, slot] = ids[position]
        met = np.zeros((queries, len(ids)), int)
        for use in plan.uses:
            assert use.size == shapes[use.tile].slots <= size
            for query in range(use.queries.start, use.queries.stop):
                assert (use.tile, query) not in asked and query < shapes[use.tile].queries
                asked.add((use.tile, query))
            met[use.rows, use.positions] += 1
            for position, slot in zip(use.positions.tolist(), use.slots.tolist(), strict=True):
                assert opened[use.tile, slot] == ids[position]
        assert (met == (ids >= 0)).all()
        assert slots.tiles.keys() <= shapes.keys()


@given(st.integers(1, 200), st.integers(0, 500), st.integers(1, 9), st.data())
def test_a_tile_holds_what_it_is_begun_for(
    most: int, met: int, more: int, data: st.DataObject
) -> None:
    queries = data.draw(st.integers(1, 2 * most))
    rows = data.draw(st.integers(1, 2 * most))
    beside = data.draw(st.just(0) | st.integers(queries, 2 * most))
    shape = shape_for(queries, rows, most, met=met, beside=beside, more=more)
    assert max(queries, beside) <= shape.queries <= 2 * most
    assert min(rows, most) <= shape.slots <= most


def test_tiles_are_as_large_as_what_is_to_come() -> None:
    """A prefill's tile has queries for some steps; a later one for as many as came before, and room
    for half of their rows; one that stands beside another, for as long as that lasts.
    """
    assert shape_for(39, 37, 64) == (64, 64)
    assert shape_for(96, 56, 128) == (128, 64)
    assert shape_for(256, 500, 128) == (256, 128)
    assert shape_for(3, 46, 128, met=63) == (64, 64)
    assert shape_for(3, 65, 128, met=120) == (128, 128)
    assert shape_for(15, 57, 128, met=96, more=5) == (128, 128)
    assert shape_for(1, 1, 128, met=64, beside=32) == (32, 32)


def _fresh_by_step(prompt: int, heads: int, steps: int) -> list[list[Shape]]:
    """Return the tiles begun by a prefill, and by each step of a token after it."""
    slots = Slots()
    calls = [(prompt, heads * prompt), *((prompt + i, heads) for i in range(1, steps + 1))]
    return [list(slots.schedule(np.arange(n), q, 128).fresh.values()) for n, q in calls]


def test_tiles_of_a_text() -> None:
    """Rows that overflow a tile that lasts get a small one beside it; where it does not, all rows
    move.
    """
    one_head = _fresh_by_step(64, 1, 32)
    assert one_head[:2] == [[(96, 64)], [(32, 32)]] and not any(one_head[2:])
    three_heads = _fresh_by_step(56, 3, 31)
    begun = {i: tiles for i, tiles in enumerate(three_heads) if tiles}
    assert begun == {0: [(192, 64)], 9: [(128, 128)]}
