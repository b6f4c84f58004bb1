"""Fits of functions by few polynomials: thresholds and coefficients, with their errors.

The layer after an activation adds up thousands of values with weights of either sign. What their
errors do to such a sum goes with the mean of their squares, so that is what fits make small, not
the largest error. Inputs come from a norm and a matrix: points count by a normal density of
deviation 3, wider than they commonly are. That keeps every model's tails in the fit.

Shares are compared with a threshold t in units of 2^-4 after `protocols.arithmetic.narrow`, which
may be one unit low: which of two neighbours is taken is open for x in [t, t + 1) units. So every
piece is fitted up to one unit beyond the threshold where it ends.

`python -m protocols.functions.fits` prints the pieces that `protocols.functions.activations` has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from protocols.functions.piecewise import COEFFICIENT_BITS, UNIT_BITS, Quadratics

DEVIATION = 3.0
_UNIT = 2.0**-UNIT_BITS
_POINTS = 8  # of a unit

Function = Callable[[np.ndarray], np.ndarray]


def gelu(x: np.ndarray) -> np.ndarray:
    """Compute GELU in its tanh form."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def quadratics(f: Function, reach: float, thresholds: int) -> Quadratics:
    """Return the quadratics with this many thresholds and the smallest mean square error, for f
    that is near 0 below -reach and near x above reach.

    The best thresholds of all follow one by one (Bellman 1961): 1. What every piece would cost.
    2. The least that all pieces up to a threshold cost, and the threshold before it. 3. Back from
    the last one.
    """
    # 1.
    units = round(reach / _UNIT)
    x, w = _points(-units, units)
    costs = _costs(f, x, w)
    zero = np.cumsum(np.sum(w * f(x) ** 2, axis=1))  # up to one unit beyond
    rest = np.cumsum(np.sum(w * (f(x) - x) ** 2, axis=1)[::-1])[::-1]
    # 2.
    least, before = zero, []
    for _ in range(thresholds - 1):
        together = least[:, None] + costs
        before.append(np.argmin(together, axis=0))
        least = np.min(together, axis=0)
    # 3.
    places = [int(np.argmin(least + rest))]
    for previous in reversed(before):
        places.append(int(previous[places[-1]]))
    places = [i - units for i in reversed(places)]
    pieces = tuple(_rounded(f, a, b) for a, b in itertools.pairwise(places))
    fitted = Quadratics(tuple(places), pieces, 0.0)
    return replace(fitted, error=error_of(fitted, f, reach))


def _points(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points x [units, points] of the units from first to last - 1, and what each counts."""
    x = (np.arange(first, last)[:, None] + (np.arange(_POINTS) + 0.5) / _POINTS) * _UNIT
    return x, np.exp(-0.5 * (x / DEVIATION) ** 2)


def _costs(f: Function, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return costs [a, b]: the least weighted sum of squares for a piece over units a to b, b among
    them: it ends at threshold b.

    That is the square of the last entry of R in the QR decomposition of rows (1, x, x^2, f(x)),
    which is kept for every a while b goes on.
    """
    rows = np.sqrt(w)[..., None] * np.stack([np.ones_like(x), x, x**2, f(x)], axis=-1)
    costs = np.full((len(x), len(x)), np.inf)
    triangles: Any = np.zeros((0, 4, 4))
    for b, unit in enumerate(rows):
        triangles = np.concatenate([triangles, np.zeros((1, 4, 4))])
        added = np.broadcast_to(unit, (b + 1, *unit.shape))
        triangles = np.linalg.qr(np.concatenate([triangles, added], axis=1), mode="r")
        costs[:b, b] = triangles[:b, 3, 3] ** 2
    return costs


def _rounded(f: Function, start: int, end: int) -> tuple[int, int, int]:
    """Return the best piece between two thresholds, and one unit beyond, in whole numbers. What
    rounding moves, the lower coefficients take back in the middle m: x^2 = (x - m)^2 + 2 m x - m^2
    and x = (x - m) + m.
    """
    x, w = (part.reshape(-1) for part in _points(start, end + 1))
    scale, m = 2.0**COEFFICIENT_BITS, (start + end + 1) / 2 * _UNIT
    c, b, a = np.polynomial.polynomial.polyfit(x, f(x), 2, w=np.sqrt(w)) * scale
    b += 2 * m * (a - round(a))
    c += -m * m * (a - round(a)) + m * (b - round(b))
    return round(a), round(b), round(c)


def error_of(fitted: Quadratics, f: Function, reach: float) -> float:
    """Return the largest error, each piece taken up to one unit beyond where it ends."""
    edges = [-reach / _UNIT, *fitted.thresholds, reach / _UNIT]
    worst = 0.0
    ends = itertools.pairwise(edges)
    for (a, b, c), (low, high) in zip(fitted.all_pieces(), ends, strict=True):
        x = np.linspace(low, high + 1, 2001) * _UNIT
        worst = max(worst, np.abs((a * x**2 + b * x + c) / 2.0**COEFFICIENT_BITS - f(x)).max())
    return float(worst)


REACH = {"gelu": 6.0, "silu": 16.0}
FITTED = {"gelu": gelu, "silu": silu}


def main() -> None:
    for name, f in FITTED.items():
        print(f"{name.upper()} = {{")
        for count in (4, 6, 8, 10):
            q = quadratics(f, REACH[name], count)
            print(f"    {count}: Quadratics(\n        {q.thresholds},\n        {q.pieces},")
            print(f"        error={float(f'{q.error:.2g}')},\n    ),")
        print("}")


if __name__ == "__main__":
    main()
