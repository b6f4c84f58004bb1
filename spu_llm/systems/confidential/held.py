"""What a vault holds: the keys and values of its user's prompts, and its answers from them.

"Confidential Prompting" (Gim, Li, Zhong), section 4, steps 2 and 3b. The weights pass through,
block by block, for the prefill; nothing of them stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.family import ModelConfig
from models.partials import Partial, partial
from models.stages import stages_of

_LANES = 8  # that go through a block at a time
_SMALLEST = 16  # rows of a text, padded


class Held:
    """Prompts, one a lane, at their owner's.

    Call `begin`, `block` for every block in order, then `end`; or `fill`. public: positions, the
    same in every lane, whose keys and values the engine is given (`migrated`) and answers are not
    about.
    """

    def __init__(
        self, config: ModelConfig, prompts: Sequence[Sequence[int]], public: Sequence[int] = ()
    ) -> None:
        self._config, self._stages, self._prompts = config, stages_of(config), prompts
        longest = max(map(len, prompts))
        # As few shapes as there are powers of two; rows that only fill up come last.
        self._n = min(config.context, max(_SMALLEST, 1 << (longest - 1).bit_length()))
        self._lengths = np.array([len(p) for p in prompts])
        self._public = np.asarray(public, np.int64)
        self._keys: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._x: list[Any] = []
        shown = np.arange(longest) < self._lengths[:, None]
        shown[:, self._public] = False
        self._visible = shown[:, None, None, :]
        self._longest = longest

    def fill(self, weights: Any) -> np.ndarray:
        """Run the whole prefill at once, by whoever has all weights: returns what `end` gives."""
        self.begin(weights)
        for block in weights["blocks"]:
            self.block(block)
        return self.end(weights["head"])

    def begin(self, outer: Any) -> None:
        """Begin the prefill; outer: the weights apart from blocks and head."""
        tokens = np.zeros((len(self._prompts), self._n), np.int32)
        for lane, prompt in enumerate(self._prompts):
            tokens[lane, : len(prompt)] = prompt
        positions = np.arange(self._n, dtype=np.int32)
        for start in range(0, len(tokens), _LANES):
            part = _filled_up(tokens[start : start + _LANES])
            at = jnp.asarray(np.tile(positions, len(part)))
            self._x.append(self._stages.embed(outer, jnp.asarray(part.reshape(-1)), at))

    def block(self, weights: Any) -> None:
        """Run the next block: its keys and values stay, of every prompt."""
        n = self._n
        keys, values = [], []
        for i, x in enumerate(self._x):
            lanes = x.shape[0] // n
            positions = np.tile(np.arange(n, dtype=np.int32), (lanes, 1))
            filled = self._stages.fill(weights, x, positions, self._seen(_LANES * i, lanes))
            self._x[i] = filled.x
            keys.append(np.asarray(filled.keys))
            values.append(np.asarray(filled.values))
        lanes = len(self._prompts)
        self._keep(*(np.concatenate(part)[:lanes, :, : self._longest] for part in (keys, values)))

    def _seen(self, first: int, lanes: int) -> np.ndarray:
        """Return bool [lane, n, n]: what rows see within a block, of lanes from `first` on."""
        n = self._n
        return np.broadcast_to(np.tril(np.ones((n, n), bool)), (lanes, n, n))

    def _keep(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Keep the keys and values of a block, [lane, kv head, n, head_dim]."""
        self._keys.append(keys.copy())
        self._values.append(values.copy())

    def end(self, head: Any) -> np.ndarray:
        """End the prefill, and return logits float32 [lane, vocab] after the prompts."""
        rows = np.concatenate([np.asarray(x).reshape(-1, self._n, x.shape[-1]) for x in self._x])
        last = rows[np.arange(len(self._prompts)), self._lengths - 1]
        self._x = []
        return np.asarray(self._stages.head({"head": head}, _filled_up(last)))[: len(last)]

    def migrated(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values [lane, kv head, m, head_dim] of the public positions."""
        return self._keys[layer][:, :, self._public], self._values[layer][:, :, self._public]

    def reply(self, layer: int, lanes: Sequence[int], query: np.ndarray) -> Partial:
        """Compute the attention of queries [lane, kv head, group, head_dim] over the prompts of
        these lanes.
        """
        at = slice(None) if len(lanes) == len(self._prompts) else np.asarray(lanes)
        keys, values = self._keys[layer][at], self._values[layer][at]
        return partial(query, keys, values, self._visible[at])


def _filled_up(rows: np.ndarray) -> np.ndarray:
    """Pad with rows of zeros to a power of two of rows."""
    more = (1 << (len(rows) - 1).bit_length()) - len(rows)
    return np.pad(rows, [(0, more), *[(0, 0)] * (rows.ndim - 1)])
