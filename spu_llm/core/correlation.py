"""Correlated randomness: what both parties make offline, told as one small record.

A correlation is random words (*masks*) of the two parties and a function of them, whose *results*
come out shared. As a rule the masks are drawn by their holders alone, from keyed streams of their
own; the function runs inside SPU, or as a protocol of its own where `fixed` or `matrices` is given.
Where `by_transfers` or `by_slots` is given, masks and results both come out of a protocol. A
protocol later uses each unit once, to hide what it sends.

    product triple:   masks a, b (both shared)             results a * b
    masked product:   mask r (the client's)                results r @ w for the provider's w
    gate:             masks of some bits (bit-sliced)      results products of subsets of them
    transfer:         mask c (client's bit), d (provider's) results c * d
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spu_llm.core import field
from spu_llm.core.integers import Factor
from spu_llm.core.prg import Prg
from spu_llm.core.slots import Slots
from spu_llm.core.transfers import Transfers
from spu_llm.core.values import CLIENT, Owner, as_words


class Form(enum.Enum):
    """Form in which SPU, or each party, holds an array of words."""

    ARITH = "arith"  # additive shares mod 2^64
    BOOL = "bool"  # xor shares of 64 independent bits
    BIT = "bit"  # xor shares of one bit, the word's lowest
    FIELD = "field"  # additive shares modulo the prime of `spu_llm.core.field`
    PRIVATE = "private"  # one party's own words

    @property
    def bits(self) -> int:
        """Return how many bits of a word count."""
        return {Form.BIT: 1, Form.FIELD: field.BITS}.get(self, 64)


@dataclass(frozen=True)
class Part:
    """One array of a unit: `shape` words, known to `holder` (JOINT: each party has a share)."""

    shape: tuple[int, ...]
    holder: Owner
    form: Form

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def is_held_by(self, rank: int) -> bool:
        """Return whether the party of this rank has words of its own of the part."""
        return self.holder in (Owner.JOINT, Owner.of_rank(rank))


def _same(*masks: Any) -> Sequence[Any]:
    return masks


@dataclass(frozen=True)
class Correlation:
    """A kind of correlated randomness.

    name: identifies it, parameters and all, in files and between the parties.
    masks: drawn at random, per unit.
    results: shared results, per unit.
    secure(*inputs[, fixed]) -> arrays: the correlation, over a leading axis of units; on numpy or
        JAX arrays (int64 with wrap-around; bool for Form.BIT).
    derive(*masks) -> arrays: local work on shares of the masks that gives the inputs of `secure`:
        linear, or products of masks of one holder.
    inputs: the parts that `derive` returns; the masks themselves by default.
    fixed: a private matrix of the provider's that all units share, or None; given as a Factor.
    matrices(a, b) -> x [units, n, k], y [units, k, m]: linear local work, x on shares of the first
        of two masks and y of the second, when the one result is x y and may be off by the noise of
        `spu_llm.offline.packed.products`.
    by_transfers(transfers, units) -> masks and results: makes units from random oblivious
        transfers, at both parties at the same time, in place of SPU.
    transfers: random transfers that a unit takes: those in which the client chooses, and those in
        which the provider does; on average, since roles may alternate.
    by_slots(slots, units) -> masks and results: makes units from products of random elements of
        the field, at both parties at the same time, in place of SPU.
    chunk: units made at once; bounds memory.
    """

    name: str
    masks: tuple[Part, ...]
    results: tuple[Part, ...]
    secure: Callable[..., Sequence[Any]]
    derive: Callable[..., Sequence[Any]] = _same
    inputs: tuple[Part, ...] = ()
    fixed: Part | None = None
    matrices: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    by_transfers: Callable[[Transfers, int], Correlations] | None = None
    transfers: tuple[float, float] = (0.0, 0.0)
    by_slots: Callable[[Slots, int], Correlations] | None = None
    chunk: int = 8192

    @property
    def masks_come_out(self) -> bool:
        """Return whether masks come out of what makes the correlation, and are not drawn first."""
        return self.by_transfers is not None or self.by_slots is not None

    def input_parts(self) -> tuple[Part, ...]:
        return self.inputs or self.masks

    def stored_parts(self, rank: int) -> tuple[Part, ...]:
        """Return what a party keeps of a unit: its results, and before them its masks where no key
        gives them again.
        """
        if not self.masks_come_out:
            return self.results
        return (*(part for part in self.masks if part.is_held_by(rank)), *self.results)

    def stored_words(self, rank: int) -> int:
        """Return the number of words per unit that a party keeps."""
        return sum(part.size for part in self.stored_parts(rank))

    def draw(self, rank: int, prg: Prg, units: int) -> list[np.ndarray]:
        """Draw this party's words of the masks; zeros where the other party is the only holder."""
        drawn = []
        for part in self.masks:
            shape = (units, *part.shape)
            is_held = part.is_held_by(rank)
            drawn.append(uniform(part, prg, units) if is_held else np.zeros(shape, np.uint64))
        return drawn

    def stored(self, rank: int, made: Correlations) -> list[np.ndarray]:
        """Return the arrays of `made` that a party keeps."""
        if not self.masks_come_out:
            return made.results
        masks = zip(self.masks, made.masks, strict=True)
        return [*(words for part, words in masks if part.is_held_by(rank)), *made.results]

    def from_stored(self, rank: int, stored: np.ndarray, prg: Prg) -> Correlations:
        """Return the units that a party kept as words [units, words]; prg: draws their masks where
        they are not kept.
        """
        arrays = iter(split(self.stored_parts(rank), stored))
        if not self.masks_come_out:
            return Correlations(self.draw(rank, prg, len(stored)), list(arrays))
        masks = [
            next(arrays)
            if part.is_held_by(rank)
            else np.zeros((len(stored), *part.shape), np.uint64)
            for part in self.masks
        ]
        return Correlations(masks, list(arrays))


def uniform(part: Part, prg: Prg, units: int) -> np.ndarray:
    """Draw uniform words [units, *shape] of a part's form."""
    shape = (units, *part.shape)
    if part.form is Form.FIELD:
        return field.uniform(prg, shape)
    words = prg.words(shape)
    return words & np.uint64(1) if part.form is Form.BIT else words


def together(part: Part, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute the plain words of which the parties hold these shares as masks."""
    if part.form is Form.FIELD:
        return field.added(field.reduced(a), field.reduced(b))
    plain: np.ndarray = a ^ b if part.form in (Form.BOOL, Form.BIT) else a + b
    return plain


def split(parts: Sequence[Part], words: np.ndarray) -> list[np.ndarray]:
    """Split words [units, words] into the arrays [units, *shape] of these parts."""
    arrays, start = [], 0
    for part in parts:
        flat = words[:, start : start + part.size]
        arrays.append(flat.reshape(len(words), *part.shape))
        start += part.size
    return arrays


@dataclass(frozen=True)
class Correlations:
    """A party's words of some units: its masks (zeros for the peer's own) and result shares."""

    masks: list[np.ndarray]
    results: list[np.ndarray]


def cut(correlations: Correlations, start: int, stop: int | None = None) -> Correlations:
    """Return the units from `start` up to `stop`, by default to the end."""
    return Correlations(
        [x[start:stop] for x in correlations.masks], [x[start:stop] for x in correlations.results]
    )


def joined(pieces: Sequence[Correlations]) -> Correlations:
    """Join the units of all pieces, one piece after the other; there must be one."""
    if len(pieces) == 1:
        return pieces[0]
    return Correlations(
        [np.concatenate(parts) for parts in zip(*(p.masks for p in pieces), strict=True)],
        [np.concatenate(parts) for parts in zip(*(p.results for p in pieces), strict=True)],
    )


def evaluate(
    correlation: Correlation, masks: Sequence[np.ndarray], fixed: Factor | None = None
) -> list[np.ndarray]:
    """Compute plain results (uint64) of plain masks: the correlation's exact integer meaning."""
    inputs = correlation.derive(*masks)
    arrays: list[Any] = [
        x.astype(bool) if part.form is Form.BIT else np.asarray(x).view(np.int64)
        for part, x in zip(correlation.input_parts(), inputs, strict=True)
    ]
    if fixed is not None:
        arrays.append(as_words(fixed.entries).view(np.int64))
    with np.errstate(over="ignore"):
        return [np.asarray(y).view(np.uint64) for y in correlation.secure(*arrays)]


def deal(
    correlation: Correlation,
    shares: Sequence[Sequence[np.ndarray]],
    sharing: Prg,
    fixed: Factor | None = None,
) -> list[list[np.ndarray]]:
    """Compute both parties' results for their masks, as an all-seeing dealer: for tests only."""
    units = len(shares[CLIENT][0])
    client = [uniform(part, sharing, units) for part in correlation.results]
    return [client, others_results(correlation, shares, client, fixed)]


def others_results(
    correlation: Correlation,
    shares: Sequence[Sequence[np.ndarray]],
    results: Sequence[np.ndarray],
    fixed: Factor | None = None,
) -> list[np.ndarray]:
    """Compute a party's results from the masks' shares and the peer's results: for tests only."""
    masks = [together(part, a, b) for part, a, b in zip(correlation.masks, *shares, strict=True)]
    plain = evaluate(correlation, masks, fixed)
    return [
        _rest(part, x, y) for part, x, y in zip(correlation.results, plain, results, strict=True)
    ]


def _rest(part: Part, plain: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Compute the other share of a result."""
    if part.form is Form.FIELD:
        return field.subtracted(plain, field.reduced(share))
    rest: np.ndarray = plain ^ share if part.form is Form.BOOL else plain - share
    return rest
