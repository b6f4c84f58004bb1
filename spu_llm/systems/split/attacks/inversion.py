"""A8: exact causal inversion.

A row follows from the tokens up to it, by the front alone. So for j = 1 .. n, with the front's keys
and values of the tokens found so far:

1. Each candidate token goes through the public front at position j.
2. The one whose row is nearest to the row that came is the guess; its keys and values are kept.

All V tokens are candidates. First come those whose rows at j, with no text before, are nearest to
the one that came: where one of a few has it up to rounding, no other is tried.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import HIDDEN, Block, Prefix, Rows
from models.family import family_of
from spu_llm.systems.split.attacks.views import HostView, Public

SAME = 2e-3  # relative distance of rows that are the same: float16's rounding is below 5e-4
FIRST = 256  # candidates that are tried before all
TOGETHER = 4096  # candidates in memory at a time


def attack(view: HostView, public: Public) -> list[list[int]]:
    """Find, at every position, the token whose row is nearest to the row that came (A8)."""
    if not view.rows:
        return []
    longest = max(len(rows) for rows in view.rows)
    search = _Search(public, longest)
    caches = [search.empty] * len(view.rows)
    guesses: list[list[int]] = [[] for _ in view.rows]
    for position in range(longest):
        alone = search.alone(position)
        for i, rows in enumerate(view.rows):
            if position < len(rows):
                row = np.asarray(rows[position], np.float32)
                token, caches[i] = search.nearest(position, row, alone, caches[i])
                guesses[i].append(token)
    return guesses


class _Search:
    """The search for texts of up to `positions` tokens, through the client's front."""

    def __init__(self, public: Public, positions: int) -> None:
        config, family = public.config, family_of(public.config)
        front = public.parts[0]

        def empty(rows: int) -> Block:
            layers = len(front["blocks"])
            return config.with_layers(layers).empty_cache(rows) if layers else Block((), ())

        self.empty, own = empty(positions), empty(1)
        self._tokens = np.arange(config.vocab_size, dtype=np.int32)

        def through(tokens: Array, at: Array, before: Block, known: Array) -> tuple[Array, Block]:
            """Compute the rows [c, d] and cache rows of each of the tokens [c] at position `at`,
            after the first `known` rows of `before`.
            """
            rows = Rows(at[None, None], jnp.ones((1, 1, 1), bool), 0)
            hidden = jnp.where(jnp.arange(positions) < known, 0, HIDDEN).astype(jnp.int32)

            def one(token: Array) -> tuple[Array, Block]:
                x = family.embed(front, config, token[None], rows.positions[0])
                prefix = Prefix(before, positions, hidden)
                x, cache, _ = family.through(front["blocks"], config, x, rows, own, prefix)
                return x[0], cache

            return jax.vmap(one)(tokens)

        @jax.jit
        def best(tokens: Array, at: Array, row: Array, before: Block) -> tuple[Array, Array, Block]:
            """Return the token of [c] whose row is nearest, its distance, and the cache with it."""
            reached, caches = through(tokens, at, before, at)
            away = jnp.linalg.norm(reached - row, axis=-1)
            nearest = jnp.argmin(away)

            def written(old: Array, new: Array) -> Array:
                return jax.lax.dynamic_update_slice(old, new[nearest], (0, at, 0))

            return tokens[nearest], away[nearest], jax.tree.map(written, before, caches)

        self._best: Any = best
        self._alone: Any = jax.jit(lambda *args: through(*args)[0])

    def alone(self, position: int) -> np.ndarray:
        """Compute the rows [vocab, d] of all tokens at `position`, with no text before."""
        parts = _portions(self._tokens, 0)
        at, known = jnp.int32(position), jnp.int32(0)
        rows = [np.asarray(self._alone(part, at, self.empty, known)) for part in parts]
        return np.concatenate(rows)[: len(self._tokens)]

    def nearest(
        self, position: int, row: np.ndarray, alone: np.ndarray, cache: Block
    ) -> tuple[int, Block]:
        """Return the token with the nearest row, and the cache with it."""
        order = np.argsort(np.linalg.norm(alone - row, axis=1), kind="stable").astype(np.int32)
        at, size = jnp.int32(position), float(np.linalg.norm(row))
        best = None
        for tried in _portions(order, FIRST):
            token, away, written = self._best(tried, at, row, cache)
            if best is None or float(away) < best[0]:
                best = float(away), int(token), written
            if best[0] <= SAME * size:
                break
        assert best is not None
        return best[1:]


def _portions(order: np.ndarray, first: int) -> list[np.ndarray]:
    """Split candidates into the `first` ones, if any, and all others in arrays of one length: the
    last array repeats candidates.
    """
    some, rest = order[:first], order[first:]
    size = min(TOGETHER, len(rest))
    filled = np.resize(rest, -(-len(rest) // size) * size) if size else rest
    others = [filled[i : i + size] for i in range(0, len(filled), max(1, size))]
    return [some, *others] if first else others
