"""Whether rows of shared words are short, for every row of 64-bit words: public random projections.

A sum of squares is computed mod 2^64 and says nothing of a row that is too long for it. A
projection z = sum_i r_i x_i mod 2^64 with public random whole numbers r_i costs nothing: each party
multiplies its own share. It is small for a short row and, by chance of one half at least, not small
for a long one, so PROJECTIONS = 40 of them pass a long row with a probability of 2^-40 at most.

Let S be the length that rows may have (in words). With S = 2^32 / GAP, which is LONGEST, those that
pass for no longer than GAP S have a sum of squares below 2^64. Let r_i be uniform in [-2^a, 2^a).
With s^2 the variance of z and |x| the length of a row:

short  |x| <= S. A uniform number is strictly sub-Gaussian: the mean of exp(l r) is at most
       exp(l^2 4^a / 6). So |z| exceeds b = (TAIL 2^a / sqrt(3) + sqrt(d) / 2) S, the last term for
       the mean -1/2 of r, with a probability of at most 2 exp(-TAIL^2 / 2) < 2^-46 a projection.
long   |x| >= GAP S. Two cases, each for the draw of r alone, whatever x is.
       - Some |x_i| >= X = 2^63 / (d 2^a), as a signed word. Given the other r_j, the values for
         consecutive r_i lie |x_i| >= X > 2 b apart mod 2^64, so no two of them are both in
         [-b, b): at most one half.
       - All |x_i| < X. Then z does not wrap around, and is a sum of independent, symmetric,
         log-concave numbers, but for the rounding of r, which is 2^-a of it. Such a sum's density
         is at most s^-1 / sqrt(2) (Bobkov and Chistyakov, J. Theor. Probab. 28 (2015), 2.1), and
         s = 2^a |x| / sqrt(3); so |z| < b has a probability of at most sqrt(2) b / s: one half for
         |x| >= 23 S. GAP = 26 leaves room for the rounding and for the units below.

`bound` chooses a, and b as a number of the units that a comparison looks at (the top `bits` bits).
Both parties draw r from their common stream at every call, when x is already shared. They could
compute it before: r is independent of x for semi-honest parties.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocols.arithmetic.narrow import FRAC_BITS, MAX_BITS
from protocols.arithmetic.truncate import share_of
from protocols.bits.convert import arith_cost, as_arith
from spu_llm.core.op import protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.simulated import nothing_to_correct, uniform_messages
from spu_llm.core.values import Arith, Value

PROJECTIONS = 40
GAP = 26
LONGEST = 2.0**32 / GAP * 2.0**-FRAC_BITS  # 630
_TAIL = 8.1


@dataclass(frozen=True)
class Bound:
    """Factors of `factor_bits` bits; a short row's projections are in [-units, units) of the top
    `bits` bits of a word.
    """

    factor_bits: int
    units: int
    bits: int


@functools.cache
def bound(width: int, bits: int, longest: float = LONGEST) -> Bound:
    """Return the bound for rows of `width` numbers, as long as `longest` at most. Raise ValueError
    when projections that compare `bits` bits cannot tell these from long rows.
    """
    words = longest * 2.0**FRAC_BITS
    unit = 2.0 ** (64 - bits)
    for a in range(30, 3, -1):
        deviation = 2.0**a / math.sqrt(3) * words
        # One unit more, since narrow words may be one low.
        units = math.ceil((_TAIL * deviation + math.sqrt(width) / 2 * words) / unit) + 1
        b = (units + 1) * unit
        if 2 * b < 2.0**63 / (width * 2.0**a) and math.sqrt(8) * b < GAP * deviation:
            return Bound(a + 1, units, bits)
    raise ValueError(f"no projections that compare {bits} bits for rows of {width}")


@functools.cache
def least_bits(width: int, longest: float = LONGEST) -> int:
    """Return the fewest bits that comparisons of projections of such rows take (see `bound`). Raise
    ValueError for rows that are too wide.
    """
    for bits in range(9, MAX_BITS):
        with suppress(ValueError):
            return bound(width, bits, longest).bits
    return bound(width, MAX_BITS, longest).bits


def _factors(common: Prg, width: int, factor_bits: int) -> np.ndarray:
    """Draw r [width, PROJECTIONS], as ring words."""
    words = common.words((width, PROJECTIONS)) >> np.uint64(64 - factor_bits)
    return words - np.uint64(1 << (factor_bits - 1))


def _two_party(party: Party, x: Value, *, factor_bits: int) -> Arith:
    share = as_arith(party, x)
    factors = _factors(party.common, x.shape[-1], factor_bits)
    return Arith(share.words @ factors, share.dtype, share.frac_bits)


def _reference(x: Any, *, factor_bits: int) -> Any:
    """Compute projections on factors of the reference's own, from a fixed seed."""
    factors = _factors(Prg.from_seed(0, "projection"), x.shape[-1], factor_bits).view(np.int64)
    return x @ factors.astype(x.dtype)


def _model(
    inputs: Sequence[Sequence[Value]], common: Prg, *, factor_bits: int
) -> Sequence[np.ndarray]:
    x_0, x_1 = (share_of(values[0]) for values in inputs)
    return [(x_0 + x_1) @ _factors(common, x_0.shape[-1], factor_bits)]


project = protocol_op(
    "project",
    reference=_reference,
    two_party=_two_party,
    cost=lambda x, factor_bits: arith_cost(x),
    simulate=uniform_messages(_two_party, nothing_to_correct),
    model=_model,
    non_interactive=True,
)
"""Projections [rows, PROJECTIONS] of shared rows x [rows, d] on public factors that are uniform in
[-2^(factor_bits - 1), 2^(factor_bits - 1)): shares mod 2^64, in words of x's fraction bits."""
