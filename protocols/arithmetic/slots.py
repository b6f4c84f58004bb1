"""Which mask row every row of a cache has: plain numbers, found alike by both parties.

Masks come in tiles of `size` slots for cached rows and as many mask rows for queries. What is
handed out is never handed out again: counters only move forward, and a row that leaves its tile
gets another slot. Rows go by ids that never repeat, so that versions of a cache can share
the counters.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class _Tile:
    """The numbers of slots and query rows that a tile has handed out."""

    slots: int = 0
    queries: int = 0


@dataclass(frozen=True)
class Opening:
    """Rows of the cache, at these positions, to be opened under these slots of a tile."""

    tile: int
    positions: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Use:
    """Queries `rows` meet the rows of the cache that are in one tile, under its rows `queries`."""

    tile: int
    rows: slice
    queries: slice
    positions: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Schedule:
    """The tiles that one product takes: fresh tiles, openings and uses, in their order."""

    fresh: list[int] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)


@dataclass
class Slots:
    """The tiles in use. `slot_of`: tile and slot of a row, by its id."""

    size: int
    tiles: dict[int, _Tile] = field(default_factory=dict)
    slot_of: dict[int, tuple[int, int]] = field(default_factory=dict)
    begun: int = 0  # tiles so far; the latest one takes rows

    def copy(self) -> Slots:
        return Slots(
            self.size,
            {t: copy.copy(v) for t, v in self.tiles.items()},
            dict(self.slot_of),
            self.begun,
        )

    def schedule(self, ids: np.ndarray, queries: int) -> Schedule:
        """Plan a product of `queries` queries and the rows with these ids [positions], -1 where
        there is none; hand out its slots and query rows.

        At most `size` queries go together:
        1. The rows of a tile that has too few query rows left leave it.
        2. Rows without a slot get one of the latest tile, then of fresh ones. If it is too small
           for them, rows leave every tile that is less than half in use.
        3. The queries get rows of every tile in use. Other tiles are forgotten.
        """
        positions, plan = np.flatnonzero(ids >= 0), Schedule()
        if positions.size:
            names = ids[positions].tolist()
            for start in range(0, queries, self.size):
                rows = slice(start, min(start + self.size, queries))
                self._block(names, positions, rows, plan)
        return plan

    def _block(
        self, names: Sequence[int], positions: np.ndarray, rows: slice, plan: Schedule
    ) -> None:
        count = rows.stop - rows.start
        # 1.
        self._leave([t for t in self._members(names) if not self._lasts(t, count)])
        # 2.
        homeless = [i for i, name in enumerate(names) if name not in self.slot_of]
        if len(homeless) > self._room(count):
            self._leave([t for t, m in self._members(names).items() if 2 * len(m) < self.size])
            homeless = [i for i, name in enumerate(names) if name not in self.slot_of]
        while homeless:
            if not self._room(count):
                self.begun += 1
                self.tiles[self.begun] = _Tile()
                plan.fresh.append(self.begun)
            now, homeless = homeless[: self._room(count)], homeless[self._room(count) :]
            first = self.tiles[self.begun].slots
            slots = np.arange(first, first + len(now))
            self.tiles[self.begun].slots += len(now)
            self.slot_of.update(
                {names[i]: (self.begun, slot) for i, slot in zip(now, slots, strict=True)}
            )
            plan.openings.append(Opening(self.begun, positions[now], slots))
        # 3.
        members = self._members(names)
        for tile, here in members.items():
            first = self.tiles[tile].queries
            self.tiles[tile].queries += count
            assert self.tiles[tile].queries <= self.size and self.tiles[tile].slots <= self.size
            slots = np.array([self.slot_of[names[i]][1] for i in here])
            queries = slice(first, first + count)
            plan.uses.append(Use(tile, rows, queries, positions[here], slots))
        self._leave([t for t in self.tiles if t not in members and t != self.begun])

    def _members(self, names: Sequence[int]) -> dict[int, list[int]]:
        """Return, for each tile, the indices in `names` of the rows that are in it."""
        members: dict[int, list[int]] = {}
        for i, name in enumerate(names):
            if name in self.slot_of:
                members.setdefault(self.slot_of[name][0], []).append(i)
        return members

    def _lasts(self, tile: int, queries: int) -> bool:
        return self.tiles[tile].queries + queries <= self.size

    def _room(self, queries: int) -> int:
        """Return the latest tile's free slots, or 0 if it lacks query rows for `queries`."""
        if self.begun not in self.tiles or not self._lasts(self.begun, queries):
            return 0
        return self.size - self.tiles[self.begun].slots

    def _leave(self, tiles: Sequence[int]) -> None:
        """Forget these tiles, whoever's rows are in them."""
        gone = set(tiles)
        self.tiles = {t: v for t, v in self.tiles.items() if t not in gone}
        self.slot_of = {name: at for name, at in self.slot_of.items() if at[0] not in gone}
