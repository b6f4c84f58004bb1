"""Which mask row every row of a cache has: plain numbers, found alike by both parties.

Masks come in tiles of slots for cached rows and mask rows for queries, as many of either as
`shape_for` says when a tile is begun. What is handed out is never handed out again: counters only
move forward, and a row that leaves its tile gets another slot. Rows go by ids that never repeat, so
that versions of a cache can share the counters.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """The mask rows for queries, and the slots for cached rows, of a tile."""

    queries: int
    slots: int


_LATER = 24  # queries of the steps after a prefill
_STEPS = 16  # steps like this one that a tile begun in it serves
_LASTING = 8  # such steps that a tile should last for, to stand beside another


def shape_for(
    queries: int, rows: int, most: int, *, met: int = 0, beside: int = 0, more: int = 1
) -> Shape:
    """Return the shape of a fresh tile for `queries` at once, 2 `most` at most, and `rows` without
    a slot, after `met` queries. What a tile costs grows with either.

    Queries, in quarters of `most`: `beside`, what the tiles that it stands beside have left at
    most. If there is none, those at once and some of later steps; in such a step sixteen times as
    many, or as many as came before, up to `most`, since a text that went on for long may go on for
    as long. Slots, of `most`, a half and a quarter: as few as hold the rows, and after a prefill
    half of those that later steps bring, if each brings `more`.
    """
    later = min(max(_STEPS * queries, met), most) if met else 0
    wanted = beside or max(queries + min(_LATER, most // 2), later)
    quarter = max(1, most // 4)
    some = min(-(-wanted // quarter) * quarter, 2 * most)
    held = rows + (some // queries * more // 2 if met else 0)
    return Shape(some, next((n for n in (most // 4, most // 2) if held <= n), most))


@dataclass
class _Tile:
    """A tile, and the numbers of slots and query rows that it has handed out."""

    shape: Shape
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
    """Queries `rows` meet the rows of the cache that are in one tile, under its rows `queries`.
    `size`: the slots of the tile.
    """

    tile: int
    size: int
    rows: slice
    queries: slice
    positions: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Schedule:
    """The tiles that one product takes: fresh tiles, openings and uses, in their order."""

    fresh: dict[int, Shape] = field(default_factory=dict)
    openings: list[Opening] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)


@dataclass
class Slots:
    """The tiles in use. `slot_of`: tile and slot of a row, by its id."""

    tiles: dict[int, _Tile] = field(default_factory=dict)
    slot_of: dict[int, tuple[int, int]] = field(default_factory=dict)
    begun: int = 0  # tiles so far; the latest one takes rows
    met: int = 0  # queries so far

    def copy(self) -> Slots:
        tiles = {t: copy.copy(v) for t, v in self.tiles.items()}
        return replace(self, tiles=tiles, slot_of=dict(self.slot_of))

    def schedule(self, ids: np.ndarray, queries: int, most: int) -> Schedule:
        """Plan a product of `queries` queries and the rows with these ids [positions], -1 where
        there is none; hand out its slots and query rows. Fresh tiles have `most` slots at most.

        Twice as many queries go together:
        1. The rows of a tile that has too few query rows left leave it.
        2. Rows without a slot get one of the latest tile, then of fresh ones. If it is too small
           for them, rows leave every tile that is less than half in use, or will not last.
        3. The queries get rows of every tile in use. Other tiles are forgotten.
        """
        positions, plan = np.flatnonzero(ids >= 0), Schedule()
        if positions.size:
            names = ids[positions].tolist()
            for start in range(0, queries, 2 * most):
                rows = slice(start, min(start + 2 * most, queries))
                self._block(names, positions, rows, most, plan)
        return plan

    def _block(
        self, names: Sequence[int], positions: np.ndarray, rows: slice, most: int, plan: Schedule
    ) -> None:
        count = rows.stop - rows.start
        more = sum(name not in self.slot_of for name in names)
        # 1.
        self._leave([t for t in self._members(names) if not self._lasts(t, count)])
        # 2.
        homeless = [i for i, name in enumerate(names) if name not in self.slot_of]
        if len(homeless) > self._room(count):
            lasting = min(_LASTING * count, most // 4)
            members = self._members(names)
            self._leave(
                [
                    t
                    for t, here in members.items()
                    if 2 * len(here) < self.tiles[t].shape.slots or not self._lasts(t, lasting)
                ]
            )
            homeless = [i for i, name in enumerate(names) if name not in self.slot_of]
        beside = max((self._left(t) for t in self._members(names)), default=0)
        while homeless:
            if not self._room(count):
                self.begun += 1
                shape = shape_for(
                    count, len(homeless), most, met=self.met, beside=beside, more=more
                )
                self.tiles[self.begun], plan.fresh[self.begun] = _Tile(shape), shape
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
            of = self.tiles[tile]
            queries = slice(of.queries, of.queries + count)
            of.queries += count
            assert of.queries <= of.shape.queries and of.slots <= of.shape.slots
            slots = np.array([self.slot_of[names[i]][1] for i in here])
            plan.uses.append(Use(tile, of.shape.slots, rows, queries, positions[here], slots))
        self._leave([t for t in self.tiles if t not in members and t != self.begun])
        self.met += count

    def _members(self, names: Sequence[int]) -> dict[int, list[int]]:
        """Return, for each tile, the indices in `names` of the rows that are in it."""
        members: dict[int, list[int]] = {}
        for i, name in enumerate(names):
            if name in self.slot_of:
                members.setdefault(self.slot_of[name][0], []).append(i)
        return members

    def _left(self, tile: int) -> int:
        """Return a tile's free query rows."""
        return self.tiles[tile].shape.queries - self.tiles[tile].queries

    def _lasts(self, tile: int, queries: int) -> bool:
        return queries <= self._left(tile)

    def _room(self, queries: int) -> int:
        """Return the latest tile's free slots, or 0 if it lacks query rows for `queries`."""
        if self.begun not in self.tiles or not self._lasts(self.begun, queries):
            return 0
        of = self.tiles[self.begun]
        return of.shape.slots - of.slots

    def _leave(self, tiles: Sequence[int]) -> None:
        """Forget these tiles, whoever's rows are in them."""
        gone = set(tiles)
        self.tiles = {t: v for t, v in self.tiles.items() if t not in gone}
        self.slot_of = {name: at for name, at in self.slot_of.items() if at[0] not in gone}
