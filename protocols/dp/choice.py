"""The noisy argmax over candidates: InvisibleInk's draw of a token without its trusted curator.

    x = argmax_y [B phi_pub(y) + S(y) + X(y)],   S = sum_i clip(phi_i - phi_pub),

in units of 2^-18, with X of `protocols.dp.noise` at the scale B tau: softmax of phi_pub + S / B at
the temperature tau (Gumbel-max; spec of InvisibleInk, section 7). S moves by `bound` units at most
between neighbours (`protocols.dp.clip`), and nothing after it rounds. What is opened is the place
of the winner; a noised score is another mechanism's output and never leaves its shares.

Two forms. `choose`: phi_i are shares, of a secure forward; references and noise are one party's,
phi_pub the other's. `choose_of_both`: each party has references of its own and the model, and
brings the sum of its clipped terms with its own noise, in the clear to itself (`own_scores`); of
the protocol the tournament is left. There each party is protected from the other by its own noise
alone, and outsiders by both; the token's distribution is flatter than softmax.

A tournament is as wide as its numbers need (`span_bits`), for which phi_pub is held within `spread`
of its largest candidate and noise within its support: no private number can leave the range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from protocols.arithmetic.narrow import FRAC_BITS, in_units
from protocols.dp.clip import LEAST_BITS, clip
from protocols.dp.noise import Gumbel, Loss
from protocols.functions.argmax import argmax
from spu_llm.core.prg import Prg

UNIT = 2.0**-FRAC_BITS
_WIDEST = 5  # numbers of a match: wider ones take more comparisons than the clipping leaves
_MAX_SPAN = 31  # bits of what int32 holds of both signs, less one for the sums on the way


@dataclass(frozen=True)
class Choice:
    """Public sizes of a draw: B references, at most `bound` units from each, noise of the
    distribution `noise` (of two parties, if `noises` is 2), phi_pub of the candidates within
    `spread` of the largest. ValueError for what does not fit 32 bits.
    """

    references: int
    bound: int
    noise: Gumbel
    spread: float
    noises: int = 1

    def __post_init__(self) -> None:
        if self.references < 1 or self.bound < 1 or not self.spread > 0:
            raise ValueError("a draw has one reference or more, a bound and a spread above zero")
        if self.span_bits > _MAX_SPAN:
            raise ValueError(
                f"scores of {self.references} references spread over 2^{self.span_bits} units of "
                f"2^-{FRAC_BITS}, more than 2^{_MAX_SPAN}; give fewer references or a lower "
                "temperature"
            )

    @staticmethod
    def of(
        references: int, clip_norm: float, temperature: float, spread: float, noises: int = 1
    ) -> Choice:
        """Return a choice with C rounded down and B tau rounded up: both towards more privacy.
        Raise ValueError for a C below 2^-18.
        """
        bound = math.floor(clip_norm / UNIT)
        scale = math.ceil(references * temperature / UNIT)
        return Choice(references, bound, Gumbel.of(scale), spread, noises)

    @property
    def spread_units(self) -> int:
        return math.ceil(self.spread / UNIT)

    @property
    def behind(self) -> int:
        """Return the units that no score makes up for: one that far behind the best never wins."""
        noise = self.noises * (self.noise.high - self.noise.low)
        return noise + 2 * self.references * self.bound + 1

    @property
    def span_bits(self) -> int:
        """Return the bits of a difference of two scores. phi_pub enters by the difference of two
        candidates, or by what puts one out of the race, whichever is more.
        """
        base = max(self.references * self.spread_units, self.behind)
        return (base + self.behind).bit_length() + 1

    def loss(self, candidates: int) -> Loss:
        """Return the privacy loss of one draw, for replace-by-null."""
        return self.noise.loss(self.bound, candidates, self.noises)

    def quantised(self, public: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return phi_pub of the candidates [m] in units, and B times its difference from the
        largest, which is `spread` at most, filled up to `width` places that never win: int32
        [width] each. Raise ValueError for more than `width` candidates, none, or logits that are
        not below 2^12 in magnitude.
        """
        m = len(public)
        if not 1 <= m <= width or not np.all(np.abs(public) < 2.0**12):
            raise ValueError(f"{m} candidates, or odd ones, do not fit {width} places")
        units = np.zeros(width, np.int64)
        units[:m] = np.rint(np.asarray(public, np.float64) / UNIT)
        base = np.full(width, -self.behind, np.int64)
        base[:m] = np.maximum(units[:m] - units[:m].max(), -self.spread_units) * self.references
        return units.astype(np.int32), base.astype(np.int32)

    def draw_noise(self, stream: Prg, width: int) -> np.ndarray:
        """Draw one party's noise, int32 [width]."""
        return self.noise.sample(stream, (width,)).astype(np.int32)


def choose(
    private: Array, live: Array, public: Array, base: Array, noise: Array, choice: Choice
) -> Array:
    """Draw a token among m candidates: return its place (int32 scalar).

    private: phi_i, float [B, m]; live: bool [B], False for a null reference; public: what phi_i is
    compared with, and base: B times phi_pub, int32 [m] units each; noise: int32 [m].

    1. d_i = phi_i - phi_pub, mod 2^33. 2. Clip; rows that are not live are zero. 3. Sum, with base
    and noise. 4. The tournament.
    """
    # 1.
    differences = in_units(private, bits=LEAST_BITS) - public
    # 2.
    clipped = clip(differences, live, bound=choice.bound)
    # 3.
    scores = jnp.sum(clipped, axis=0, dtype=jnp.int32) + (base + noise)
    # 4.
    return winner(scores, choice)


def choose_of_both(client: Array, provider: Array, base: Array, choice: Choice) -> Array:
    """Draw a token among m candidates, by the scores [m] that each party brings (`own_scores`) and
    B times phi_pub, which both know: return its place (int32 scalar).
    """
    return winner(in_units(client + provider, bits=LEAST_BITS) + base, choice)


def winner(scores: Array, choice: Choice) -> Array:
    """Return where the largest of int32 [m] stands."""
    return argmax(scores[None], bits=choice.span_bits, widest=_WIDEST)[0]


def own_scores(
    private: np.ndarray, live: np.ndarray, public: np.ndarray, noise: np.ndarray, choice: Choice
) -> np.ndarray:
    """Compute a party's own part, in the clear to it: the sum of its clipped terms, with its noise;
    int32 [m]. private: phi_i of its own references, float [n, m]; public: as `Choice.quantised`
    gives it. A term is in [-bound, bound] whatever private holds.
    """
    held = np.nan_to_num(np.asarray(private, np.float64), nan=0.0, posinf=1e6, neginf=-1e6)
    units = np.rint(np.clip(held, -1e6, 1e6) / UNIT).astype(np.int64)
    terms = np.clip(units - public, -choice.bound, choice.bound)
    total = np.where(live[:, None], terms, 0).sum(axis=0)
    return (total + noise).astype(np.int32)
