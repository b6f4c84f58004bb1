"""Compact virtual prompts, as published: fakes share the keys and values of what surrounds them.

"Confidential Prompting" (Gim, Li, Zhong), sections 5.2 and 6. Keys and values of text after a fake
are computed as if the fake were not there, once for all fake prompts; each has those of its own
fake besides. A query goes over K' = [K_shared; K_fake] under a mask M of zeros and ones,

    softmax(Q K'^T / sqrt(d_h) + log M) V',

where the printed equation 7 has the mask outside of the softmax. The same is the merge of a partial
over what is shared with one over the own fake (`models.partials`), which is how it is done here.

The user's own prompt is computed exactly. That gives it away, which is why this is not what
obfuscation does by default: it alone agrees with a forward pass of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.family import ModelConfig
from models.partials import Partial, merged, partial
from spu_llm.systems.confidential.held import Held


class Compact(Held):
    """Prompts of equal length that differ in the positions `fakes`; number `own` is exact."""

    def __init__(
        self,
        config: ModelConfig,
        prompts: Sequence[Sequence[int]],
        public: Sequence[int],
        fakes: Sequence[int],
        own: int,
    ) -> None:
        super().__init__(config, prompts, public)
        self._own, self._fakes = own, np.asarray(fakes)
        self._others = np.array([i for i in range(len(prompts)) if i != own])
        self._around = np.setdiff1d(np.arange(self._longest), self._fakes)
        # By layer: keys and values of the own prompt [1, kv head, n, head_dim], of what is around
        # fakes [1, kv head, n - m, head_dim], of the fakes [lane, kv head, m, head_dim].
        self._parts: list[list[tuple[np.ndarray, np.ndarray]]] = []

    @property
    def floats(self) -> int:
        """Return the number of floats that are kept, of all layers."""
        return sum(a.size for layer in self._parts for pair in layer for a in pair)

    def _seen(self, first: int, lanes: int) -> np.ndarray:
        seen = super()._seen(first, lanes).copy()
        for lane in range(lanes):
            if first + lane != self._own:
                seen[lane, self._around[:, None], self._fakes] = False
        return seen

    def _keep(self, keys: np.ndarray, values: np.ndarray) -> None:
        both = (keys, values)
        self._parts.append(
            [
                self._pair(both, [self._own], slice(None)),
                self._pair(both, self._others[:1], self._around),
                self._pair(both, self._others, self._fakes),
            ]
        )

    @staticmethod
    def _pair(
        both: tuple[np.ndarray, np.ndarray], lanes: Any, rows: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        one, other = (np.ascontiguousarray(a[lanes][:, :, rows]) for a in both)
        return one, other

    def migrated(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of the public positions, which no fake stands before, or, as
        published, any.
        """
        lanes, moved = len(self._prompts), []
        own, around, _ = self._parts[layer]
        where = np.searchsorted(self._around, self._public)
        for exact, shared in zip(own, around, strict=True):
            rows = np.repeat(shared[:, :, where], lanes, axis=0)
            rows[self._own] = exact[0, :, self._public].swapaxes(0, 1)
            moved.append(rows)
        return moved[0], moved[1]

    def reply(self, layer: int, lanes: Sequence[int], query: np.ndarray) -> Partial:
        own, around, fakes = self._parts[layer]
        shown = self._visible[self._own, 0, 0]
        replies = []
        for lane, asked in zip(lanes, query[:, None], strict=True):
            if lane == self._own:
                replies.append(partial(asked, *own, shown))
                continue
            at = [int(np.searchsorted(self._others, lane))]
            here = partial(asked, *around, shown[self._around])
            replies.append(merged(here, partial(asked, fakes[0][at], fakes[1][at])))
        return Partial(*(np.concatenate(part) for part in zip(*replies, strict=True)))
