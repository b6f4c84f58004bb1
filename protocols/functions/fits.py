"""Fits of functions by few polynomials: thresholds and coefficients, with their errors.

Shares are compared with a threshold t in units of 2^-4 after `protocols.arithmetic.narrow`, which
may be one unit low: which of two neighbours is taken is open for x in [t, t + 1) units. So every
piece is fitted up to one unit beyond the threshold where it ends.

`python -m protocols.functions.fits` prints the pieces that `protocols.functions.nonlinear` has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from protocols.functions.piecewise import COEFFICIENT_BITS, UNIT_BITS, Quadratics

_UNIT = 2.0**-UNIT_BITS
_NODES = 129

Function = Callable[[np.ndarray], np.ndarray]


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def minimax(f: Function, low: float, high: float, degree: int) -> tuple[float, np.ndarray]:
    """Error and coefficients (lowest first) of the best polynomial on [low, high], by exchange
    (Remez) on Chebyshev nodes.
    """
    u = -np.cos(np.pi * np.arange(_NODES) / (_NODES - 1))
    x = (low + high) / 2 + (high - low) / 2 * u
    y, powers = f(x), np.polynomial.chebyshev.chebvander(u, degree)
    signs = (-1.0) ** np.arange(degree + 2)
    chosen = np.round(np.linspace(0, _NODES - 1, degree + 2)).astype(int)
    for _ in range(30):
        *fit, level = np.linalg.solve(np.column_stack([powers[chosen], signs]), y[chosen])
        off = y - powers @ fit
        largest = np.abs(off).max()
        if largest <= abs(level) * (1 + 1e-6) + 1e-15:
            break
        # The largest of every run of one sign; of too many, the ends go first.
        runs = np.split(np.arange(_NODES), np.flatnonzero(np.diff(np.sign(off) >= 0)) + 1)
        peaks = [run[np.argmax(np.abs(off[run]))] for run in runs]
        while len(peaks) > degree + 2:
            peaks.pop(0 if abs(off[peaks[0]]) < abs(off[peaks[-1]]) else -1)
        if len(peaks) < degree + 2:
            break
        chosen = np.array(peaks)
    series = np.polynomial.chebyshev.Chebyshev(fit, domain=[low, high])
    coefficients = series.convert(kind=np.polynomial.Polynomial).coef
    return float(largest), np.pad(coefficients, (0, degree + 1 - len(coefficients)))


def quadratics(f: Function, reach: float, thresholds: int) -> Quadratics:
    """The best ones with so many thresholds, for f that is near 0 below -reach and near x above
    reach: the smallest error for which pieces that go as far as it lets them are few enough.
    """
    low, high = 1e-5, 0.5
    for _ in range(24):
        middle = float(np.sqrt(low * high))
        if len(_places(f, reach, middle)) <= thresholds:
            high = middle
        else:
            low = middle
    places = _places(f, reach, high)
    ends = itertools.pairwise(places)
    pieces = tuple(_rounded(f, a * _UNIT, (b + 1) * _UNIT) for a, b in ends)
    fitted = Quadratics(tuple(places), pieces, 0.0)
    return replace(fitted, error=error_of(fitted, f, reach))


def _places(f: Function, reach: float, error: float) -> list[int]:
    """Thresholds in units, from the left; every piece as long as it stays within `error`."""
    grid = np.arange(round(-reach / _UNIT), round(reach / _UNIT) + 1)
    x = grid * _UNIT
    # Zero holds up to one unit beyond the first threshold, x from the last one on.
    first = int(grid[np.flatnonzero(np.abs(f(x)) > error)[0]]) - 2
    last = int(grid[np.flatnonzero(np.abs(f(x) - x) > error)[-1]]) + 1
    places = [first]
    while places[-1] < last:
        start = places[-1]
        good, bad = start, last + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            if minimax(f, start * _UNIT, (middle + 1) * _UNIT, 2)[0] <= error:
                good = middle
            else:
                bad = middle
        if good == start:
            return [*places, *range(last - 99, last + 1)]  # no such error with these units
        places.append(good)
    return places


def _rounded(f: Function, low: float, high: float) -> tuple[int, int, int]:
    """The best piece in whole numbers. What rounding moves, the lower coefficients take back in the
    middle m: x^2 = (x - m)^2 + 2 m x - m^2 and x = (x - m) + m.
    """
    scale, m = 2.0**COEFFICIENT_BITS, (low + high) / 2
    c, b, a = minimax(f, low, high, 2)[1] * scale
    b += 2 * m * (a - round(a))
    c += -m * m * (a - round(a)) + m * (b - round(b))
    return round(a), round(b), round(c)


def error_of(fitted: Quadratics, f: Function, reach: float) -> float:
    """The largest error, each piece taken up to one unit beyond where it ends."""
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
