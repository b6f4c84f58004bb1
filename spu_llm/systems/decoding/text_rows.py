"""Which rows of the cache hold the text, lane by lane, and where a step's rows stand after them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TextRows:
    """The rows of the cache that hold text, of lanes that are written side by side: each row of the
    cache is one of every lane. Rows that hold no text (rejected drafts, padding of shorter lanes)
    are shown to nobody.

    Where the provider may not know how many drafts stay, this is the client's secret.
    """

    def __init__(self, lengths: Sequence[int], branches: int = 1) -> None:
        """Begin with prompts of so many tokens, padded to the longest. `branches`: of every
        step.
        """
        self._text = np.arange(max(lengths))[None, :] < np.asarray(lengths)[:, None]
        self._branches = branches

    @property
    def written(self) -> int:
        """Return how many rows are written before a step's."""
        return int(self._text.shape[1])

    def place(
        self, count: int, capacity: int, context: int, empty: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where `count` further rows of every lane stand, a `tree`: their positions in the
        text (int32 [lane, count], at most context - 1), and what each sees of a cache of `capacity`
        rows (bool [lane, count, capacity]). The first `empty` rows, of a chain, hold no text: they
        stand where the first row of the text does and see what it sees, and nothing sees them.
        """
        lanes, written = self._text.shape
        lengths = self._text.sum(axis=1, dtype=np.int32)
        after, seen = tree(count, self._branches)
        if empty:
            after = np.maximum(after - empty, 0)
            seen[:, :empty] = np.eye(count, empty, dtype=bool)
        positions = lengths[:, None] + after
        visible = np.zeros((lanes, count, capacity), bool)
        visible[:, :, :written] = self._text[:, None]
        visible[:, :, written : written + count] = seen
        return np.minimum(positions, context - 1), visible

    def add(self, retained: np.ndarray, count: int) -> None:
        """Add `count` rows that were written; `retained`, bool [lane, count]: which of them hold
        text.
        """
        if retained.shape != (len(self._text), count):
            raise ValueError(f"{retained.shape} is not a step of {count} rows of every lane")
        self._text = np.concatenate([self._text, retained], axis=1)

    def cut(self) -> None:
        """Roll back: rows after the last one that a lane retains are written over."""
        last = int(np.flatnonzero(self._text.any(axis=0))[-1])
        self._text = self._text[:, : last + 1]

    def pack(self, count: int) -> np.ndarray:
        """Return which rows hold the text, int32 [lane, count], -1 after the last; they are the
        first ones from now on, of a cache of which `count` are written.
        """
        kept = np.full((len(self._text), count), -1, np.int32)
        for lane, text in enumerate(self._text):
            rows = np.flatnonzero(text)
            kept[lane, : rows.size] = rows
        self._text = kept >= 0
        return kept


def tree(count: int, branches: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tree of a step's rows: the first row, and after it branches of d = (count - 1) /
    branches rows, one branch after the other. The result is how far behind the text each row stands
    (int32 [count]), and which rows each sees (bool [count, count]): the first row, itself, and its
    branch's rows before it.
    """
    branch, draft = np.divmod(np.arange(count - 1), max(1, (count - 1) // branches))
    seen = np.zeros((count, count), bool)
    seen[:, 0] = True
    seen[1:, 1:] = (branch[:, None] == branch) & (draft[:, None] >= draft)
    return np.concatenate([[0], draft + 1]).astype(np.int32), seen
