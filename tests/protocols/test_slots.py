"""Slots of tiles: counters that only move forward, and every query meets every row once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocols.arithmetic.slots import Slots


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 20), max_size=9)), max_size=12),
)
def test_slots_only_move_forward(size: int, calls: list[tuple[int, list[int]]]) -> None:
    slots = Slots(size)
    opened: dict[tuple[int, int], int] = {}
    asked: set[tuple[int, int]] = set()
    begun: set[int] = set()
    for queries, names in calls:
        ids = np.array(sorted(set(names)) + [-1])
        plan = slots.schedule(ids, queries)
        assert not begun & set(plan.fresh)
        begun |= set(plan.fresh)
        for o in plan.openings:
            for position, slot in zip(o.positions.tolist(), o.slots.tolist(), strict=True):
                assert (o.tile, slot) not in opened and slot < size
                opened[o.tile, slot] = ids[position]
        met = np.zeros((queries, len(ids)), int)
        for use in plan.uses:
            for query in range(use.queries.start, use.queries.stop):
                assert (use.tile, query) not in asked and query < size
                asked.add((use.tile, query))
            met[use.rows, use.positions] += 1
            for position, slot in zip(use.positions.tolist(), use.slots.tolist(), strict=True):
                assert opened[use.tile, slot] == ids[position]
        assert (met == (ids >= 0)).all()
        assert set(slots.tiles) <= begun
