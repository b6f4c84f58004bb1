"""Gumbel noise on the ring, and what it costs that it is whole numbers within bounds.

With X_y = ceil(s G_y), G_y standard Gumbel and s a whole number of ring units, argmax_y (f_y + X_y)
of whole scores f_y is the exponential mechanism at temperature s (spec of InvisibleInk, section 7:
s = B tau), but for ties, which the first place wins. `Gumbel.sample` draws X exactly: by inversion
of a uniform real of which as many bits are drawn as decide the number.

The distribution of the winner. Let w_y = exp(f_y / s), r = exp(1 / s), t_j = exp(-j / s), and
S_y = r (w_0 + .. + w_{y-1}) + w_y + .. + w_{m-1}. As P(X <= k) = exp(-exp(-k / s)), y wins with the
noised score j if X_y = j - f_y, X_z <= j - f_z - 1 before it and X_z <= j - f_z after it:

    P(y) = sum_j [exp(-t_j S_y) - exp(-t_j S_{y+1})] = integral of K from ln S_y to ln S_{y+1},
    K(x) = sum_j g(x - j / s),   g(v) = exp(v - exp(v)).

K has the period 1 / s. Poisson's sum gives K = s (1 + fluctuation), at most

    p = 2 sum_{n >= 1} |Gamma(1 + 2 pi i n s)|,   |Gamma(1 + i u)|^2 = pi u / sinh(pi u),

which is below 2^-1000 from s = 100 on. So P(y) = s ln(S_{y+1} / S_y) up to a factor 1 +- p, where
S_{y+1} = S_y + (r - 1) w_y: next to w_y / W, with the sum W of all w.

What is lost (`Gumbel.loss`). Let no score of two neighbours differ by more than D, and go from one
to the other along v, |v_z| <= D. With x = (r - 1) w_y / S_y and the weights q^y of S_y,

    d ln P(y) = a_y A_y / s,   A_y = v_y - q^y . v,   a_y = x / ((1 + x) ln(1 + x)).

a_y lies in [s (1 - 1 / r), 1], and in [1 - 1 / (2 s), 1] therefore; |A_y| <= 2 D. So
|ln P(y) / P'(y)| <= 2 D / s, as for the exponential mechanism. Of two places,
A_y - A_z = v_y - v_z + (q^z - q^y) . v is 2 D + D / s at most, since weights q^y and q^z differ by
factors within [1 / r, r], and so by tanh(1 / (2 s)) in total variation; hence

    |d ln P(y) - d ln P(z)| <= (2 D + D / s + 2 . 2 D / (2 s)) / s = 2 D (1 + 3 / (2 s)) / s.

A range of R in the logarithm is R^2 / 8-zCDP (bounded range: Dong et al., ICML 2020; Cesar and
Rogers, ALT 2021): rho = (D / s)^2 / 2 as for the exponential mechanism, and **whole numbers and
ties cost the factor (1 + 3 / (2 s))^2**, one part in 10^6 for the scales of a text. Bounds of the
support cost delta: unless some draw is outside, which does not depend on scores, the winner is the
one without bounds, so both neighbours' distributions are as far from the unbounded ones, in total
variation, as such a draw is likely.

Noise of two parties. To whoever knows the other noise, it moves the scores, alike for neighbours:
what is left is the mechanism with the noise of one. Outsiders see a mixture of such mechanisms.
The joint distribution is flatter than the exponential mechanism's, by the second noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np

from spu_llm.core.prg import Prg

TAIL_BITS = 64  # a draw is outside the support with less than 2^-TAIL_BITS
_WORD = 64

# Of the quick way: an error of s (|ln E| 4 + 6) 2^-52 at most, with logarithms good to 4 units in
# the last place (NumPy's) and |ln E| < 45; the margin is 4 times that.
_MARGIN = 2.0**-42


@dataclass(frozen=True)
class Loss:
    """The privacy loss of one choice, for given neighbours and number of candidates."""

    rho: float  # zCDP of the distribution without bounds
    epsilon: float  # its pure privacy loss
    total_variation: float  # from the distribution without bounds, of each neighbour

    def delta(self, choices: int, epsilon: float) -> float:
        """Return what `choices` choices, adaptive ones included, add to the delta of a statement
        with this epsilon about the distribution without bounds: P(A) <= P*(A) + v <= e^epsilon
        (P'(A) + v) + delta + v with the total variation v of all choices.
        """
        return choices * self.total_variation * (1 + math.exp(epsilon))


@dataclass(frozen=True)
class Gumbel:
    """ceil(scale G) for a standard Gumbel G, in ring units, set to the nearer end of [low, high]
    where it is outside. ValueError for what is no such distribution.
    """

    scale: int
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.scale < 1 << 40 or not self.low < 0 < self.high:
            raise ValueError(f"no noise has the scale {self.scale} on [{self.low}, {self.high}]")

    @staticmethod
    def of(scale: int, tail_bits: int = TAIL_BITS) -> Gumbel:
        """Return the distribution of this scale whose support leaves out 2^-tail_bits at most."""
        least = tail_bits * math.log(2) + 1  # an e-th of it at each end
        return Gumbel(scale, -math.ceil(scale * math.log(least)), math.ceil(scale * least))

    @property
    def outside(self) -> float:
        """Return the chance that a draw is set to an end, or more: P(X < low) + P(X > high)."""
        below = math.exp(-math.exp(-(self.low - 1) / self.scale))
        return below + -math.expm1(-math.exp(-self.high / self.scale))

    def probabilities(self) -> np.ndarray:
        """Return the chance of every number, float64 [high - low + 1]; for small scales."""
        k = np.arange(self.low, self.high) / self.scale
        below = np.exp(-np.exp(-k))
        return np.diff(np.concatenate([[0.0], below, [1.0]]))

    def loss(self, sensitivity: int, candidates: int, noises: int = 1) -> Loss:
        """Return what a choice among `candidates` candidates costs, if no score of two neighbours
        differs by more than `sensitivity` units; `noises`: of how many parties each score has one.
        """
        s = self.scale
        uneven = _fluctuation(s)
        if uneven >= 1:
            raise ValueError(f"a scale of {s} units is too coarse to say anything")
        apart = math.log1p(uneven) - math.log1p(-uneven)
        span = 2 * sensitivity / s * (1 + 3 / (2 * s)) + 2 * apart
        return Loss(
            rho=span**2 / 8,
            epsilon=2 * sensitivity / s + apart,
            total_variation=min(1.0, noises * candidates * self.outside),
        )

    def sample(self, stream: Prg, shape: tuple[int, ...]) -> np.ndarray:
        """Draw independent numbers, int64 of `shape`: the exact distribution, from as many words of
        `stream` as it takes (one each, nearly always).

        1. The least k with P(X <= k) >= 1 - V is ceil(-s ln E), E = -ln(1 - V), for a uniform V in
        [w, w + 1] 2^-64 by one word w. 2. Where both ends, with a margin for what floating point
        gets wrong, do not give the same k, more words narrow V down.
        """
        words = stream.words(shape).reshape(-1)
        # 1. With 1 - V at hand where V is near to one; the last ends are 0 and infinity.
        bottom = _noise(words, self.scale)
        with np.errstate(over="ignore"):
            top = _noise(words + np.uint64(1), self.scale)
        top[words == ~np.uint64(0)] = -np.inf
        margin = self.scale * _MARGIN
        least, other = (
            np.ceil(np.clip(x, self.low, self.high)) for x in (bottom + margin, top - margin)
        )
        # 2.
        numbers = least.astype(np.int64)
        for i in np.flatnonzero(least != other):
            numbers[i] = self._narrowed(stream, int(words[i]))
        return numbers.reshape(shape)

    def _narrowed(self, stream: Prg, word: int) -> int:
        """Return the draw whose uniform real begins with `word`; `stream` gives the other words."""
        bits = _WORD
        while True:
            ends = Fraction(word, 1 << bits), Fraction(word + 1, 1 << bits)
            largest, least = (self._exact(v, bits) for v in ends)
            if largest[1] == least[0]:
                return least[0]
            word = word << _WORD | int(stream.words((1,))[0])
            bits += _WORD

    def _exact(self, v: Fraction, bits: int) -> tuple[int, int]:
        """Return the least and greatest that ceil(-s ln(-ln(1 - v))), on the support, may be by
        decimal numbers; logarithms of these are rounded correctly.
        """
        if v == 0:
            return self.high, self.high
        if v == 1:
            return self.low, self.low
        digits = bits + 30  # all of v and 1 - v, and 30 more
        context = Context(prec=digits)
        rest = context.divide(Decimal((1 - v).numerator), Decimal((1 - v).denominator))
        inner = context.ln(context.minus(context.ln(rest)))
        x = context.multiply(Decimal(-self.scale), inner)
        # v >= 2^-bits: ln(1 - v) loses fewer than bits / 3 digits against one.
        error = Decimal(self.scale) * Decimal(10) ** (bits // 3 + 4 - digits)
        least, greatest = context.subtract(x, error), context.add(x, error)
        return self._bounded(math.ceil(least)), self._bounded(math.ceil(greatest))

    def _bounded(self, number: int) -> int:
        return min(max(number, self.low), self.high)


def _noise(words: np.ndarray, scale: int) -> np.ndarray:
    """Compute -s ln(-ln(1 - w 2^-64)), float64; infinity for zero."""
    with np.errstate(divide="ignore", over="ignore"):
        near_zero = -np.log1p(-(words.astype(np.float64) * 2.0**-64))
        rest = (np.uint64(0) - words).astype(np.float64) * 2.0**-64
        energy = np.where(words < np.uint64(1 << 63), near_zero, -np.log(rest))
        return -scale * np.log(energy)


def _fluctuation(scale: int) -> float:
    """Return p of the module docstring, or more: terms fall by e^(-pi^2 s) or faster."""
    total, n = 0.0, 1
    while True:
        u = 2 * math.pi * n * scale
        # pi u / sinh(pi u) <= 2.01 pi u e^(-pi u) for pi u >= 6
        exponent = (math.log(2.01 * math.pi * u) - math.pi * u) / 2
        term = 2 * math.exp(exponent)
        total += term
        if term < 1e-300 or n > 50:
            return total + term
        n += 1
