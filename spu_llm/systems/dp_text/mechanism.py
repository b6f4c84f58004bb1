"""One token of InvisibleInk: difference clipping, top-k+, and the distribution that the token is
drawn from.

Vinod, Pillutla, Thakurta (arXiv 2507.02974), section 3 and algorithm 1. Symbols: phi_pub [m], the
public logits; phi_i [B, m], those with reference i in the prompt; C clips; tau is the temperature.

    S(y)     = sum over i of clip_C(phi_i(y) - phi_pub(y)),  a null reference adding exactly 0
    phibar   = phi_pub + S / B                               (algorithm 1, line 5; it prints
                                                             clip_C(phi_i, phi_pub), a slip)
    V_k+     = {y : phi_pub(y) >= l - 2 C / B}, l the k-th largest of phi_pub
    x        ~ softmax(phibar[V_k+] / tau)

Everything here is a pure function of arrays; candidates and public logits are public.

**Exact sensitivity.** Clipped differences are rounded to multiples of 2^-FRAC_BITS within
[-C', C'], C' = C rounded down, so that sums of n of them are exact in float64 (n C' is below 2^29,
whatever sizes are allowed), and what one reference changes is at most C' (2 C' where it is swapped
for another one): no rounding error adds to it. Two parties that hold the differences in a ring with
as many fractional bits compute the same S.

**Exact weights.** Scores u(y) = (phibar(y) - max phi_pub) / tau are held within +-SPAN, which is
1-Lipschitz and centred on a public number, so that no weight e^u underflows and the sensitivity
stays. What is left of floating point is the rounding of u and e^u, ROUNDING in all.
"""

from __future__ import annotations

import numpy as np

FRAC_BITS = 24
LARGEST = 1e4  # logits are held within +-LARGEST; larger ones say no more
SPAN = 600.0  # e^-SPAN is far from the smallest float64
LEAST_TEMPERATURE = 0.05
# How much wider the range of a token's privacy loss may be than without rounding. Of u: half an ulp
# of LARGEST, twice, over tau, for two tokens and two neighbours: 1.5e-10 at the least temperature.
# Of e^u: an ulp.
ROUNDING = 2.0**-32


def sanitised(logits: np.ndarray) -> np.ndarray:
    """Return logits as finite numbers, float64; NaN and -inf (a masked token) become -LARGEST.
    Before anything is subtracted: (-inf) - (-inf) would be NaN.
    """
    # fmax takes the number where the other one is NaN.
    return np.asarray(np.fmin(np.fmax(np.asarray(logits, np.float64), -LARGEST), LARGEST))


def expanded_top_k(public: np.ndarray, k: int | None, clip: float, batch: int) -> np.ndarray:
    """Return V_k+ as token ids in ascending order (int64 [m], m >= k), of public logits [vocab];
    all for k None or k >= vocab. A function of what is public alone. All ties at the threshold are
    in it.

    It holds the top k of every reference acting alone, not that of phibar: references that agree
    move a token by C, for which the slack would have to be 2 C.
    """
    logits = sanitised(public)
    if k is None or k >= len(logits):
        return np.arange(len(logits))
    if k < 1:
        raise ValueError(f"k must be 1 or more, got {k}")
    threshold = np.partition(logits, len(logits) - k)[len(logits) - k]  # the k-th largest
    return np.flatnonzero(logits >= threshold - 2 * clip / batch)


def grid_clip(clip: float, frac_bits: int = FRAC_BITS) -> float:
    """Return C', the clip norm rounded down to a multiple of 2^-frac_bits."""
    return float(np.floor(np.ldexp(clip, frac_bits)) * 2.0**-frac_bits)


def clipped_differences(
    public: np.ndarray,
    private: np.ndarray,
    clip: float,
    *,
    centre: bool = False,
    frac_bits: int = FRAC_BITS,
) -> np.ndarray:
    """Compute clip_C(phi_i - phi_pub), float64 [B, m] of multiples of 2^-frac_bits, for the same m
    tokens in public [m] and private [B, m].

    centre: take from each reference's differences their median first. Softmax does not see a
    constant, and clipping then cuts less; row i still depends on reference i alone.
    """
    differences = sanitised(private) - sanitised(public)[None]
    if centre:
        differences = differences - np.median(differences, axis=1, keepdims=True)
    limit = grid_clip(clip, frac_bits)
    return np.clip(np.rint(np.ldexp(differences, frac_bits)) * 2.0**-frac_bits, -limit, limit)


def clipped_sum(
    public: np.ndarray,
    private: np.ndarray,
    present: np.ndarray,
    clip: float,
    *,
    centre: bool = False,
    frac_bits: int = FRAC_BITS,
) -> np.ndarray:
    """Compute S, float64 [m], an exact multiple of 2^-frac_bits. present: bool [B]; where it is
    False the reference is null, and adds an exact zero whatever its row of `private` holds.
    """
    rows = clipped_differences(public, private, clip, centre=centre, frac_bits=frac_bits)
    return np.where(np.asarray(present, bool)[:, None], rows, 0.0).sum(axis=0)


def mean_logits(public: np.ndarray, total: np.ndarray, batch: int) -> np.ndarray:
    """Compute phibar, float64 [m], of public logits [m] and S [m]; `batch` is B, nulls counted. S /
    B is held within +-LARGEST, where more than B references could lead out of it.
    """
    return sanitised(public) + np.clip(total / batch, -LARGEST, LARGEST)


def weights(public: np.ndarray, mean: np.ndarray, temperature: float) -> np.ndarray:
    """Return e^u, float64 [m], all above zero: what the probabilities are proportional to."""
    scores = (mean - sanitised(public).max()) / temperature
    return np.exp(np.clip(scores, -SPAN, SPAN))


def probabilities(public: np.ndarray, mean: np.ndarray, temperature: float) -> np.ndarray:
    """Compute the token's distribution over the candidates, float64 [m]: softmax(phibar / tau)."""
    unscaled = weights(public, mean, temperature)
    return unscaled / unscaled.sum()
