"""The private model writes: many texts side by side, with its distributions at the places that
count, in the clear at its owner.

A text is a *script*: tokens that are given, and runs of tokens that the model draws. The lanes of
one cache hold as many texts as there are lanes; when a text is over, the next script begins in its
lane, which from then on sees only its own rows, if what it gives fits into the rows that are left.
When the cache is full, the texts in it are over, too.

Where an encoder reads the beginning of a text, its source, a cache holds one text a lane, all of
whose sources have the same length, and only what follows the source takes rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.alignment.answers import Answer
from models.cache import CacheT, Rows, lengthened
from models.encoder_decoder import encoded
from models.family import ModelConfig, Params, family_of

LEAST = 4  # places that count, of a text that is kept
_GROWTH = 64  # rows by which the cache grows


@dataclass(frozen=True)
class Source:
    """Tokens that an encoder reads: the first part of a text's script, of one length in all texts.
    What is given next is a start token.
    """

    tokens: Sequence[int]


@dataclass(frozen=True)
class Given:
    """Tokens that stand in a text as they are; `counts`: the model's distributions there do."""

    tokens: Sequence[int]
    counts: bool = False


@dataclass(frozen=True)
class Drawn:
    """Tokens that the model draws, up to one that ends a text, and so many at most. That token
    stays if the text ends with it; where more is given after it, that begins with one of its own.
    """

    most: int
    counts: bool = True


Script = Sequence[Source | Given | Drawn]


def rows_of(script: Script) -> int:
    """Return how many rows a script takes at least: all that is given, and a little that is drawn.
    Its last token needs none.
    """
    given = sum(len(part.tokens) for part in script if isinstance(part, Given))
    return given - 1 + (LEAST if any(isinstance(part, Drawn) for part in script) else 0)


class Scripts:
    """Scripts in their order, each of which waits until there are rows enough for it."""

    def __init__(self, scripts: Iterator[Script], begun: int = 0) -> None:
        """Take scripts, of which the first `begun` ones are left out."""
        self._scripts = itertools.islice(scripts, begun, None)
        self._first: Script | None = next(self._scripts, None)
        self.begun = begun

    @property
    def is_over(self) -> bool:
        return self._first is None

    def next(self, rows: int) -> Script | None:
        """Return the next script; None when there is none, or it takes more rows."""
        if self._first is None or max(1, rows_of(self._first)) > rows:
            return None
        script, self._first = self._first, next(self._scripts, None)
        self.begun += 1
        return script


@dataclass
class Lane:
    """A text while it is written."""

    script: Script
    start: int  # the row of the cache that its first token, or the one after its source, stands in
    tokens: list[int] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    log_p: list[np.ndarray] = field(default_factory=list)
    source: int = 0  # tokens that an encoder reads
    _part: int = 0
    _done: int = 0  # tokens of this part

    def __post_init__(self) -> None:
        if self.script and isinstance(first := self.script[0], Source):
            self.tokens, self.counts = list(first.tokens), [False] * len(first.tokens)
            self.source, self._part = len(first.tokens), 1

    def open(self) -> bool:
        """Tell whether the text goes on."""
        while self._part < len(self.script) and isinstance(part := self.script[self._part], Given):
            if self._done < len(part.tokens):
                return True
            self._next_part()
        return self._part < len(self.script)

    def _next_part(self) -> None:
        self._part, self._done = self._part + 1, 0

    def goes_on(self, ids: np.ndarray, log_p: np.ndarray, drawn: int, ends: frozenset[int]) -> None:
        """Append the next token of an open text, given the model's distribution and a draw."""
        part = self.script[self._part]
        if isinstance(part, Drawn) and drawn in ends and self._part + 1 < len(self.script):
            self._next_part()
            assert self.open()
            part = self.script[self._part]
        assert not isinstance(part, Source)
        token = part.tokens[self._done] if isinstance(part, Given) else drawn
        self.tokens.append(int(token))
        self.counts.append(part.counts and len(self.tokens) > self.source + 1)
        if self.counts[-1]:
            self.ids.append(ids)
            self.log_p.append(log_p)
        self._done += 1
        if isinstance(part, Drawn) and (drawn in ends or self._done == part.most):
            self._next_part()

    def answer(self) -> Answer | None:
        """Return the text so far; None where too little of it counts."""
        if len(self.ids) < LEAST:
            return None
        return Answer(
            np.array(self.tokens, np.int32),
            np.array(self.counts, bool),
            np.stack(self.ids).astype(np.int32),
            np.stack(self.log_p).astype(np.float32),
            self.source,
        )


@dataclass
class Writer:
    """A model that writes `lanes` texts at once, of `rows` rows together in each lane."""

    config: ModelConfig
    params: Params
    ends: frozenset[int]
    lanes: int
    rows: int
    top_k: int
    temperature: float

    def __post_init__(self) -> None:
        self._weights = jax.device_put(family_of(self.config).fold(self.params, self.config))
        self._step = jax.jit(
            partial(_step, self.config, self.top_k, self.temperature), donate_argnums=1
        )
        self._encode = jax.jit(partial(encoded, self.config))
        self._longer = jax.jit(lengthened, static_argnums=1)

    def round(self, scripts: Scripts, seed: int) -> list[Answer]:
        """Fill the cache once; return the texts."""
        # The cache grows as rows are written, since attention goes over all it has. Copies: buffers
        # that a step takes over must differ.
        first = min(self.rows, _GROWTH)
        cache = jax.tree.map(jnp.copy, self.config.empty_cache(first, self.lanes))
        key = jax.random.key(seed)
        lanes = [self._begun(scripts, 0) for _ in range(self.lanes)]
        if self.config.encodes and (some := [lane for lane in lanes if lane is not None]):
            read = [lane or some[0] for lane in lanes]
            sources = np.array([lane.tokens[: lane.source] for lane in read], np.int32)
            cache = self._encode(self._weights, sources, cache)
        answers: list[Answer] = []
        for row in range(self.rows):
            if not any(lane is not None for lane in lanes):
                break
            tokens = np.array([0 if lane is None else lane.tokens[-1] for lane in lanes], np.int32)
            starts = np.array([row if lane is None else lane.start for lane in lanes], np.int32)
            if row == cache.positions:
                cache = self._longer(cache, min(self.rows, row + _GROWTH))
            key, now = jax.random.split(key)
            made, cache = self._step(self._weights, cache, tokens, starts, np.int32(row), now)
            ids, log_p, drawn = map(np.asarray, made)
            for i, lane in enumerate(lanes):
                if lane is None:
                    continue
                if lane.open():
                    lane.goes_on(ids[i], log_p[i], int(drawn[i]), self.ends)
                if not lane.open() or row == self.rows - 1:
                    answers += [one] if (one := lane.answer()) is not None else []
                    lanes[i] = self._begun(scripts, row + 1)
        return answers

    def _begun(self, scripts: Scripts, row: int) -> Lane | None:
        """Return the next text, with its first token after a source, which is given."""
        if (row and self.config.encodes) or (script := scripts.next(self.rows - row)) is None:
            return None
        lane = Lane(script, row)
        assert bool(lane.source) == self.config.encodes and lane.open()
        nothing = np.empty(0)
        lane.goes_on(nothing, nothing, -1, self.ends)
        return lane


def _step(
    config: ModelConfig,
    top_k: int,
    temperature: float,
    weights: Params,
    cache: CacheT,
    tokens: jax.Array,
    starts: jax.Array,
    row: jax.Array,
    key: jax.Array,
) -> tuple[Any, CacheT]:
    """Return, for the token of each lane in row `row`: ids and log-probabilities [lane, K] of what
    comes next, and a draw [lane]; and the cache with the row.
    """
    family = family_of(config)
    positions = row - starts
    row_numbers = jnp.arange(cache.positions)
    visible = (row_numbers >= starts[:, None]) & (row_numbers <= row)
    x = family.embed(weights, config, tokens, positions)
    at = Rows(positions[:, None], visible[:, None], row)
    hidden, cache, _ = family.forward(weights, config, x, at, cache)
    log_p = jax.nn.log_softmax(family.head(weights, hidden) / temperature)
    top, ids = jax.lax.top_k(log_p, top_k)
    return (ids, top, drawn_of(log_p, key)), cache


def drawn_of(log_p: jax.Array, key: jax.Array) -> jax.Array:
    """Draw a token from each row of log_p [n, vocab], as int32 [n], by one uniform number: the
    first one up to which more than that share of all mass lies.
    """
    masses = jnp.cumsum(jnp.exp(log_p), axis=-1)
    share = jax.random.uniform(key, (len(log_p), 1)) * masses[:, -1:]
    return jnp.argmax(masses > share, axis=-1).astype(jnp.int32)
