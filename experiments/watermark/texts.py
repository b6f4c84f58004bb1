"""Texts of the study of watermarks: many at once, each of a method, its own prompt and its own key.

All prompts have the same number of tokens, so that texts grow side by side in the lanes of one
forward. What chooses a token is the code of `spu_llm.systems.watermark`; only the model is asked
for many texts together. End of text is never drawn, so that all texts are of one length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from models.cache import Block
from models.family import ModelConfig, family_of
from models.hf import load_folded
from models.scoring import lanes_after, picked_lanes
from protocols.verification.distribution import draw
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.systems.watermark.baselines import (
    Aaronson,
    Kirchenbauer,
    Kuditipudi,
    exponential_argmax,
)
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.embedding import Embedder
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import Key, Scheme, token_unit
from spu_llm.systems.watermark.race_marks import TINY, MarkedNoise, context_of, gumbel
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import Content, TokenUnits

NGRAM = 4
AT_ONCE = 64  # lanes of candidates
NEVER = -1e30
UNITS = TokenUnits()


# ---- the model


@dataclass
class State:
    """State of a model after as many positions of every lane."""

    cache: Block
    logits: np.ndarray  # float32 [lane, vocab]
    at: int


class Lanes:
    """A model that continues many texts of one length."""

    def __init__(self, directory: Path, positions: int) -> None:
        self.config, weights = load_folded(directory)
        self.positions = positions
        self._weights = jax.device_put(weights)
        self._run = jax.jit(functools.partial(_forward, self.config), donate_argnums=1)
        self._picked = jax.jit(functools.partial(picked_lanes, self.config.kv_heads))

    def begun(self, prompts: np.ndarray) -> State:
        """Return the state after prompts: int32 [lane, token]."""
        empty = self.config.empty_cache(self.positions, len(prompts))
        # Keys and values begin as the same zeros, and each array may be given away once.
        return self._after(jax.tree.map(lambda rows: rows.copy(), empty), prompts, 0)

    def after(self, state: State, tokens: np.ndarray) -> State:
        """Return the state after one token more in every lane; the given state is used up."""
        return self._after(state.cache, tokens[:, None], state.at)

    def picked(self, state: State, lanes: np.ndarray) -> State:
        """Return the state of the given lanes, which may repeat."""
        return State(self._picked(state.cache, lanes), state.logits[lanes], state.at)

    def _after(self, cache: Block, tokens: np.ndarray, at: int) -> State:
        logits, cache = self._run(self._weights, cache, tokens.astype(np.int32), np.int32(at))
        return State(cache, np.asarray(logits), at + tokens.shape[1])


def _forward(
    config: ModelConfig,
    weights: Any,
    cache: Block,
    tokens: jax.Array,
    at: jax.Array,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, Block]:
    out, written = lanes_after(config, weights, tokens, cache, at, starts)
    return family_of(config).head(weights, out[:, -1]), written


class AlignmentPrior(NamedTuple):
    """Distributions of the next token of every lane, float64."""

    p: np.ndarray  # [lane, vocab]
    log_p: np.ndarray
    entropy: np.ndarray  # [lane], nats


def distribution_of(logits: np.ndarray, temperature: float, never: Sequence[int]) -> AlignmentPrior:
    """Return the distribution of the next token at a temperature, without the tokens `never`."""
    scaled = np.asarray(logits, np.float64) / temperature
    scaled[:, list(never)] = NEVER
    scaled -= scaled.max(axis=1, keepdims=True)
    weights = np.exp(scaled)
    total = weights.sum(axis=1, keepdims=True)
    p, log_p = weights / total, scaled - np.log(total)
    return AlignmentPrior(p, log_p, -np.einsum("ij,ij->i", p, log_p))


# ---- methods


@dataclass(frozen=True)
class Method:
    """Method that chooses the tokens. m, k: candidates, and tokens of each. keys: levels of the
    recursive watermark, m each. history: whether an n-gram marks once.
    """

    name: str
    m: int = 0
    k: int = 1
    keys: int = 1
    delta: float = 0.0
    family: str = "uniform"
    history: bool = False

    @property
    def scheme(self) -> Scheme:
        method = "race" if self.name == "race" else "candidates"
        family = Family(self.family, self.k if self.family == "gamma" else 1)
        return Scheme(NGRAM, family, method=method)


def key_of(seed: int, label: str) -> Key:
    return Key(Prg.from_seed(seed, f"watermark {label}").words((KEY_BYTES // 8,)).tobytes())


@dataclass
class Author:
    """Author of one text: its keys, what it kept of texts before, its own randomness."""

    keys: tuple[Key, ...]
    histories: tuple[History, ...]
    prg: Prg

    @staticmethod
    def of(method: Method, seed: int, label: str, on: bool | None = None) -> Author:
        keys = tuple(key_of(seed, f"{label} key {i}") for i in range(method.keys))
        histories = tuple(History(method.history if on is None else on) for _ in keys)
        return Author(keys, histories, Prg.from_seed(seed, f"watermark {label} draws"))

    def again(self) -> Author:
        """Return the author for another text under the same keys."""
        return Author(self.keys, self.histories, self.prg.child("again"))

    def embedder(self, method: Method) -> Embedder:
        return Embedder(
            self.keys,
            method.scheme,
            _NoSampler(),
            UNITS,
            method.m,
            method.k,
            self.histories,
            self.prg,
        )


class _NoSampler:
    """Candidates are drawn for many texts together."""

    def sample(self, prefix: Content, n: int, max_tokens: int) -> Sequence[Drawn]:
        raise NotImplementedError


class Next:
    """The next token of one text, of a known distribution. `noise`: of a race, what it was drawn
    with; `marked`: of candidates, whether the key had a say in each token.
    """

    def __init__(self, method: Method, author: Author, vocab: int) -> None:
        self.noise = np.zeros(0)
        self.marked: list[bool] = []
        self._finish: Callable[[tuple[int, ...]], None] = lambda generated: None
        make = getattr(self, f"_{method.name.replace('-', '_')}")
        self.token: Callable[[np.ndarray, tuple[int, ...]], int] = make(method, author, vocab)

    def finish(self, generated: tuple[int, ...]) -> None:
        """Tell a race's noise that the text is done."""
        self._finish(generated)

    def _random(self, method: Method, author: Author, vocab: int) -> Any:
        return lambda p, generated: draw(p, float(author.prg.uniform(())))

    def _greedy(self, method: Method, author: Author, vocab: int) -> Any:
        return lambda p, generated: int(p.argmax())

    def _aaronson(self, method: Method, author: Author, vocab: int) -> Any:
        return Aaronson(author.keys[0], vocab, NGRAM).next

    def _kirchenbauer(self, method: Method, author: Author, vocab: int) -> Any:
        scheme = Kirchenbauer(author.keys[0], vocab, method.delta, NGRAM)

        def token(p: np.ndarray, generated: tuple[int, ...]) -> int:
            logits = scheme.logits(np.log(np.maximum(p, 1e-300)), generated)
            return draw(np.exp(logits - logits.max()), float(author.prg.uniform(())))

        return token

    def _kuditipudi(self, method: Method, author: Author, vocab: int) -> Any:
        scheme = Kuditipudi(author.keys[0], vocab)
        start = scheme.begin(author.prg)
        return lambda p, generated: scheme.next(p, start + len(generated))

    def _flat(self, method: Method, author: Author, vocab: int) -> Any:
        embedder = author.embedder(method)
        count = method.m**method.keys

        def token(p: np.ndarray, generated: tuple[int, ...]) -> int:
            drawn = [Drawn((t,), False) for t in draws(p, author.prg.uniform((count,)))]
            chosen, chunk = embedder.chosen(drawn, tail(generated))
            self.marked.append(max(chunk.seeds) > 0)
            assert not isinstance(chosen.content, str)
            return chosen.content[0]

        return token

    _recursive = _flat

    def _white_box(self, method: Method, author: Author, vocab: int) -> Any:
        """Return what chooses tokens as an `Embedder` of all candidates without a history does: by
        their numbers, and one argmax.
        """
        key = author.keys[0]

        def token(p: np.ndarray, generated: tuple[int, ...]) -> int:
            head = tuple(token_unit(t) for t in context_of(generated, NGRAM))
            numbers = [key.seed((*head, token_unit(v))).uniform for v in range(vocab)]
            return exponential_argmax(p, np.array(numbers))

        return token

    def _race(self, method: Method, author: Author, vocab: int) -> Any:
        noise = MarkedNoise(author.keys[0], NGRAM, vocab, author.histories[0], author.prg)
        self._finish = noise.finish
        return self._raced(noise.row)

    def _plain_race(self, method: Method, author: Author, vocab: int) -> Any:
        """Return what chooses tokens by a race without a mark, with noise of the position."""

        def row(generated: Sequence[int]) -> np.ndarray:
            stream = author.prg.child(f"noise {len(generated)}")
            return gumbel(np.clip(stream.uniform((vocab,)), TINY, 1 - TINY))

        return self._raced(row)

    def _raced(self, row: Callable[[Sequence[int]], np.ndarray]) -> Any:
        def token(p: np.ndarray, generated: tuple[int, ...]) -> int:
            self.noise = row(generated)
            return raced(p, self.noise)

        return token


def tail(generated: tuple[int, ...]) -> tuple[int, ...]:
    """Return all that the n-grams of what follows reach into."""
    return generated[-(NGRAM - 1) :]


def raced(p: np.ndarray, noise: np.ndarray) -> int:
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(p) + noise))


def draws(p: np.ndarray, points: np.ndarray) -> list[int]:
    """Return the tokens at these points of the cumulative distribution."""
    cumulative = np.cumsum(p)
    drawn = np.searchsorted(cumulative, points * cumulative[-1], side="right")
    return np.minimum(drawn, len(p) - 1).tolist()  # type: ignore[no-any-return]


# ---- writing


@dataclass
class Written:
    """Texts of one method, and what the model says of their tokens: [text, token]."""

    tokens: np.ndarray
    nats: np.ndarray  # -log p
    entropy: np.ndarray  # of the distribution that the token was drawn from, nats
    # Of races: whether a draft model draws the same token with the same noise, and sum min(p, q).
    matched: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))
    overlap: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    # Of candidates: whether the key had a say in the token.
    marked: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))


def write(
    method: Method,
    authors: Sequence[Author],
    lanes: Lanes,
    prompts: np.ndarray,
    count: int,
    temperature: float,
    never: Sequence[int],
    drafter: Lanes | None = None,
) -> Written:
    """Write `count` tokens after each prompt [text, token]."""
    if method.k > 1:
        group = max(1, AT_ONCE // method.m)
        parts = [
            _by_chunks(
                method,
                authors[i : i + group],
                lanes,
                prompts[i : i + group],
                count,
                temperature,
                never,
            )
            for i in range(0, len(prompts), group)
        ]
        return Written(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("tokens", "nats", "entropy")
            )
        )
    return _by_token(method, authors, lanes, prompts, count, temperature, never, drafter)


def _by_token(
    method: Method,
    authors: Sequence[Author],
    lanes: Lanes,
    prompts: np.ndarray,
    count: int,
    temperature: float,
    never: Sequence[int],
    drafter: Lanes | None,
) -> Written:
    vocab, numbers = lanes.config.vocab_size, range(len(prompts))
    nexts = [Next(method, author, vocab) for author in authors]
    generated: list[tuple[int, ...]] = [() for _ in numbers]
    nats, entropy, matched, overlap = (np.zeros((count, len(prompts))) for _ in range(4))
    state = lanes.begun(prompts)
    drafted = drafter.begun(prompts) if drafter else None
    for i in range(count):
        distribution = distribution_of(state.logits, temperature, never)
        row = np.array([nexts[j].token(distribution.p[j], generated[j]) for j in numbers])
        nats[i] = -distribution.log_p[numbers, row]
        entropy[i] = distribution.entropy
        if drafter and drafted:
            q = distribution_of(drafted.logits, temperature, never).p
            matched[i] = [raced(q[j], nexts[j].noise) == row[j] for j in numbers]
            overlap[i] = np.minimum(distribution.p, q).sum(axis=1)
        generated = [(*text, int(t)) for text, t in zip(generated, row, strict=True)]
        if i + 1 < count:
            state = lanes.after(state, row)
            drafted = drafter.after(drafted, row) if drafter and drafted else None
    for one, text in zip(nexts, generated, strict=True):
        one.finish(text)
    written = Written(np.array(generated), nats.T, entropy.T)
    written.marked = np.array([one.marked for one in nexts], bool)
    if drafter:
        written.matched, written.overlap = matched.T > 0, overlap.T
    return written


def _by_chunks(
    method: Method,
    authors: Sequence[Author],
    lanes: Lanes,
    prompts: np.ndarray,
    count: int,
    temperature: float,
    never: Sequence[int],
) -> Written:
    """Write chunk by chunk: candidates of k tokens are lanes of their own; the chosen one's rows
    stay.
    """
    texts, m = range(len(prompts)), method.m
    embedders = [author.embedder(method) for author in authors]
    generated: list[tuple[int, ...]] = [() for _ in texts]
    kept: list[list[np.ndarray]] = [[], []]
    owner = np.repeat(np.arange(len(prompts)), m)
    state = lanes.begun(prompts)
    for _ in range(0, count, method.k):
        state = lanes.picked(state, owner)
        made: list[np.ndarray] = []
        facts: list[tuple[np.ndarray, np.ndarray]] = []
        for i in range(method.k):
            distribution = distribution_of(state.logits, temperature, never)
            points = np.stack([author.prg.uniform((m,)) for author in authors]).reshape(-1)
            row = np.array(
                [draws(p, point[None])[0] for p, point in zip(distribution.p, points, strict=True)]
            )
            made.append(row)
            facts.append((-distribution.log_p[np.arange(len(row)), row], distribution.entropy))
            if i + 1 < method.k:
                state = lanes.after(state, row)
        chunks = np.stack(made, axis=1)
        chosen = []
        for j in texts:
            mine = [tuple(row) for row in chunks[owner == j].tolist()]
            drawn = [Drawn(chunk, False) for chunk in mine]
            winner, _ = embedders[j].chosen(drawn, tail(generated[j]))
            chosen.append(j * m + drawn.index(winner))
            generated[j] += mine[drawn.index(winner)]
        lane = np.array(chosen)
        for of, part in zip(kept, zip(*facts, strict=True), strict=True):
            of.append(np.stack(part, axis=1)[lane])
        state = lanes.after(lanes.picked(state, lane), chunks[lane, -1])
    nats, entropy = (np.concatenate(of, axis=1)[:, :count] for of in kept)
    return Written(np.array(generated)[:, :count], nats, entropy)
