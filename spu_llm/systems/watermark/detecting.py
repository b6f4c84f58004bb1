"""Detection, with the key alone: no model, no prompt (§2.4, §2.6).

Every n-gram of the text counts once, where it stands first: those that come again have the same
number, and would be counted as evidence twice. What was inserted, deleted or replaced spoils the
n-grams that reach over it and leaves the others, and so does where an excerpt begins.

Which part of a text is marked: windows of many lengths at many places are tested by Fisher's score,
and each p-value is multiplied by how many windows there are (Bonferroni), so that in a text without
a mark anything is found with probability `alpha` at most, whatever the windows share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from spu_llm.core.errors import InputError
from spu_llm.systems.watermark.cdfs import gamma
from spu_llm.systems.watermark.keys import KeyFile
from spu_llm.systems.watermark.race_marks import scored
from spu_llm.systems.watermark.scores import combined, log_p
from spu_llm.systems.watermark.units import Unit, Units, grams

ALPHA = 1e-3
SHORTEST = 8  # units of a window
_LN10 = math.log(10)
# Marks in the noise that a token is drawn by, from those before it, and their own scores.
_OF_RACES = {"race": "fisher", "aaronson": "fisher", "kirchenbauer": "green"}


@dataclass(frozen=True)
class Marked:
    """The unit at a place of the text and its number, None where its n-gram stood before."""

    start: int
    end: int
    uniform: float | None


@dataclass(frozen=True)
class Span:
    """A part of the text, in units and in characters, its p-value and that after correction."""

    first: int
    last: int  # the one after
    start: int
    end: int
    log_p: float
    log_p_corrected: float


@dataclass(frozen=True)
class OfKey:
    """The finding of one key. `scored`: distinct n-grams."""

    scored: int
    log_p: float
    units: list[Marked] = field(repr=False)
    spans: list[Span] = field(default_factory=list)
    log_p_anywhere: float = 0.0  # of the best window, corrected


@dataclass(frozen=True)
class Verdict:
    """The findings of all keys; log_p: of all of them together, and of p-values told by others."""

    log_p: float
    keys: list[OfKey]
    alpha: float = ALPHA

    @property
    def marked(self) -> bool:
        return self.log_p <= math.log(self.alpha)


def detect(
    keys: Sequence[KeyFile],
    units: Sequence[Units],
    text: str,
    *,
    score: str | None = None,
    m: int = 2,
    k: int = 1,
    told: Sequence[float] = (),
    alpha: float = ALPHA,
    locate: bool = True,
) -> Verdict:
    """Test whether a text was marked under these keys, and where. `units`: of each key's scheme.
    `score`: None, the scheme's own. `told`: p-values of the same text by independent keys that
    others hold. Raise InputError where a p-value is none, or a key is given twice.
    """
    if len({file.key for file in keys}) < len(keys):
        raise InputError("a key is given twice; p-values of one key cannot be joined")
    if not 0 < alpha < 1:
        raise InputError(f"--alpha must be between 0 and 1, found {alpha}")
    if not all(0 < p <= 1 for p in told):
        raise InputError("a p-value that is joined must be above 0 and at most 1")
    marks = [
        _of_key(marks_of(file, of.placed(text)), file, score, m, k, alpha, locate)
        for file, of in zip(keys, units, strict=True)
    ]
    logs = [*(one.log_p for one in marks), *map(math.log, told)]
    return Verdict(logs[0] if len(logs) == 1 else combined(logs), marks, alpha)


def marks_of(file: KeyFile, placed: Sequence[Unit]) -> list[Marked]:
    """Return the numbers of a text's units, each n-gram's where it stands first; large where they
    speak for a mark.
    """
    values = [unit.value for unit in placed]
    if file.scheme.method in _OF_RACES:
        numbers: Iterable[tuple[bytes, float]] = scored(
            file.key, tokens_of(placed), file.scheme.ngram
        )
        if file.scheme.method == "kirchenbauer":  # green are the tokens of small numbers
            numbers = [(name, 1 - uniform) for name, uniform in numbers]
    else:
        numbers = (file.key.seed(gram) for gram in grams(values, file.scheme.ngram))
    marks, seen = [], set()
    for unit, (name, uniform) in zip(placed, numbers, strict=True):
        marks.append(Marked(unit.start, unit.end, None if name in seen else uniform))
        seen.add(name)
    return marks


def tokens_of(placed: Sequence[Unit]) -> list[int]:
    """Return the tokens that a text's units are."""
    return [int.from_bytes(unit.value, "little") for unit in placed]


def uniforms(marks: Sequence[Marked]) -> np.ndarray:
    return np.array([mark.uniform for mark in marks if mark.uniform is not None], np.float64)


def _of_key(
    marks: list[Marked],
    file: KeyFile,
    score: str | None,
    m: int,
    k: int,
    alpha: float,
    locate: bool,
) -> OfKey:
    numbers = uniforms(marks)
    # The winner of a race is drawn by a number near 1, which Fisher's score sees best.
    score = score or _OF_RACES.get(file.scheme.method, "sum")
    whole = log_p(numbers, file.scheme.family, score, m, k)
    if not locate:
        return OfKey(len(numbers), whole, marks)
    spans, anywhere = spans_of(marks, alpha)
    return OfKey(len(numbers), whole, marks, spans, anywhere)


# ---- where


def windows(length: int) -> list[tuple[int, int]]:
    """Return (first, last) of all windows that are tested in a text of so many units: lengths that
    grow by a half, at places a quarter of their length apart, and the last of each at the end.
    """
    places, size = [], min(SHORTEST, length)
    while 0 < size < length:
        step = max(1, size // 4)
        starts = [*range(0, length - size, step), length - size]
        places += [(start, start + size) for start in starts]
        size = max(size + 1, size * 3 // 2)
    return [*places, (0, length)] if length else []


def spans_of(marks: Sequence[Marked], alpha: float = ALPHA) -> tuple[list[Span], float]:
    """Return the parts that are marked, none of which overlap, best first chosen and given in the
    order of the text; and the log p that there is any.
    """
    tested = windows(len(marks))
    if not tested:
        return [], 0.0
    evidence = [0.0 if mark.uniform is None else -math.log1p(-mark.uniform) for mark in marks]
    sums = np.concatenate([[0.0], np.cumsum(evidence)])
    counts = np.concatenate([[0], np.cumsum([mark.uniform is not None for mark in marks])])
    ends = np.array(tested)
    total = sums[ends[:, 1]] - sums[ends[:, 0]]
    count = counts[ends[:, 1]] - counts[ends[:, 0]]
    logs = _log_tails(count, total)
    penalty = math.log(len(tested))
    chosen: list[Span] = []
    for i in np.argsort(logs, kind="stable"):
        corrected = min(0.0, float(logs[i]) + penalty)
        if corrected > math.log(alpha):
            break
        first, last = tested[i]
        if all(last <= span.first or first >= span.last for span in chosen):
            place = marks[first].start, marks[last - 1].end
            chosen.append(Span(first, last, *place, float(logs[i]), corrected))
    chosen.sort(key=lambda span: span.first)
    return chosen, min(0.0, float(logs.min()) + penalty)


def _log_tails(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return log P(Gamma(count) >= total) for each window; 0 where the count is 0."""
    p = special.gammaincc(np.maximum(counts, 1), np.maximum(totals, 0.0))
    p = np.where(counts > 0, p, 1.0)
    with np.errstate(divide="ignore"):
        logs = np.log(p)
    for i in np.flatnonzero(p < 1e-280):
        logs[i] = gamma(int(counts[i]), float(totals[i])).log_sf
    return np.asarray(logs)


# ---- as JSON


def as_p(log: float) -> str:
    """Write a p-value to read, also where a double has none so small."""
    if log > -600:
        return f"{math.exp(log):.3g}"
    tens = math.floor(log / _LN10)
    return f"{math.exp(log - tens * _LN10):.2f}e{tens}"


def as_json(verdict: Verdict) -> dict[str, object]:
    return {
        "marked": verdict.marked,
        "alpha": verdict.alpha,
        "p": as_p(verdict.log_p),
        "log10_p": verdict.log_p / _LN10,
        "keys": [
            {
                "units": len(one.units),
                "scored": one.scored,
                "p": as_p(one.log_p),
                "log10_p": one.log_p / _LN10,
                "p_anywhere": as_p(one.log_p_anywhere),
                "log10_p_anywhere": one.log_p_anywhere / _LN10,
                "spans": [
                    {
                        "start": span.start,
                        "end": span.end,
                        "units": span.last - span.first,
                        "p": as_p(span.log_p),
                        "p_corrected": as_p(span.log_p_corrected),
                        "log10_p_corrected": span.log_p_corrected / _LN10,
                    }
                    for span in one.spans
                ],
            }
            for one in verdict.keys
        ],
    }
