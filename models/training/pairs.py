"""Pairs of a source and what follows it, for training models whose encoder reads the source.

Two tasks, as in T5 (Raffel et al. 2020): a text is continued after a source of one of a few
lengths, and spans of a text that sentinels stand for are written out (section 3.1.4: of 96 tokens
15 %, in spans of 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from models.training.unigram import END_ID, PAD_ID

SOURCES = (12, 24, 48, 96)  # tokens of a source that is continued
TARGET = 64  # tokens of a continuation
CORRUPTED, SPANS, SPAN = 96, 5, 3  # tokens, spans that are left out, their mean length
CORRUPTED_SHARE = 0.25  # of batches


class Pairs(NamedTuple):
    """Pairs of one shape. Tokens of `target` are predicted one by one after those of `begun`."""

    source: np.ndarray  # int32 [pair, m]
    begun: np.ndarray  # int32 [pair, n]: the start token, and the target without its last token
    target: np.ndarray  # int32 [pair, n]


def stream_of(documents: Sequence[np.ndarray], rng: np.random.Generator | None) -> np.ndarray:
    """Return all documents, each ending with </s>, one after the other, shuffled by `rng`."""
    order = range(len(documents)) if rng is None else rng.permutation(len(documents))
    return np.concatenate([documents[i] for i in order])


def pairs(
    documents: Sequence[np.ndarray], sentinels: Sequence[int], batch: int, rng: np.random.Generator
) -> Iterator[Pairs]:
    """Yield endless batches of pairs from windows of shuffled documents."""
    while True:
        stream = stream_of(documents, rng)
        for _ in range(len(stream) // (batch * TARGET)):
            if rng.random() < CORRUPTED_SHARE:
                starts = rng.integers(len(stream) - CORRUPTED, size=batch)
                yield corrupted(_windows(stream, starts, CORRUPTED), sentinels, rng)
            else:
                length = int(rng.choice(SOURCES))
                starts = rng.integers(len(stream) - length - TARGET, size=batch)
                yield continued(_windows(stream, starts, length + TARGET), length)


def continued(windows: np.ndarray, length: int) -> Pairs:
    """Return pairs of the first `length` tokens of windows [pair, n], and the others."""
    source = np.pad(windows[:, :length], [(0, 0), (0, 1)], constant_values=END_ID)
    return _pairs(source, windows[:, length:])


def corrupted(windows: np.ndarray, sentinels: Sequence[int], rng: np.random.Generator) -> Pairs:
    """Return pairs of windows [pair, CORRUPTED] in which sentinels stand for SPANS spans, and the
    spans after their sentinels. The number of tokens left out is the same in all.
    """
    rows = [_corrupted(window, sentinels, rng) for window in windows]
    source, target = (np.array(part, np.int32) for part in zip(*rows, strict=True))
    return _pairs(source, target)


def _corrupted(
    window: np.ndarray, sentinels: Sequence[int], rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    left_out = SPANS * SPAN
    source: list[int] = []
    target: list[int] = []
    at = 0
    # Kept and left out by turns, the first part kept.
    kept, taken = _parts(len(window) - left_out, rng), _parts(left_out, rng)
    for i, (keep, take) in enumerate(zip(kept, taken, strict=True)):
        source += [*window[at : at + keep], sentinels[i]]
        target += [sentinels[i], *window[at + keep : at + keep + take]]
        at += keep + take
    return [*source, END_ID], [*target, sentinels[SPANS], END_ID]


def _parts(total: int, rng: np.random.Generator) -> np.ndarray:
    """Return SPANS random lengths, each 1 or more, whose sum is `total`."""
    cuts = np.sort(rng.choice(np.arange(1, total), SPANS - 1, replace=False))
    return np.diff([0, *cuts, total])


def _pairs(source: np.ndarray, target: np.ndarray) -> Pairs:
    begun = np.pad(target[:, :-1], [(0, 0), (1, 0)], constant_values=PAD_ID)
    return Pairs(source, begun, target)


def _windows(stream: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return stream[starts[:, None] + np.arange(length)]
