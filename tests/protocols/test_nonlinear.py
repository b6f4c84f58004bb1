"""Nonlinear functions: exact in plaintext; on shares within their errors, in few messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from protocols.arithmetic.narrow import FRAC_BITS
from protocols.arithmetic.product import scale_rows
from protocols.functions import aggregation, norms
from protocols.functions.activations import (
    GELU,
    PIECES,
    SILU,
    activation_bits,
    gelu,
    gelu_gated,
    relu,
    silu,
    silu_gated,
)
from protocols.functions.norms import NORM_LOW, longer, norm_high, norm_lines, rms_norm
from protocols.functions.piecewise import Quadratics, Untruncated, quadratics
from protocols.functions.reciprocals import reciprocal, rsqrt
from protocols.functions.rotary import rotate
from protocols.functions.softmax import (
    RECIPROCAL_BITS,
    reciprocal_of_sums,
    score_bits,
    softmax_of_product,
    softmax_weights,
)
from spu_llm.compiler.plan import OpCall
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core import field
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner, public
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation

UNIT = 2.0**-FRAC_BITS


def normalised(products: Any, inverse: Untruncated) -> Any:
    """Products with weights, times the reciprocals of the weights' sums."""
    return scale_rows(products, inverse.truncated(), shift=RECIPROCAL_BITS)


EPSILON = 1e-5
RNG = np.random.default_rng(0)


def _held(x: np.ndarray) -> np.ndarray:
    """Numbers whose halves are whole units: sharing them rounds nothing."""
    return (np.round(x / (2 * UNIT)) * 2 * UNIT).astype(np.float32)


# All pieces and thresholds, what lies next to these, and far away.
GRID = np.concatenate(
    [
        np.linspace(-10, 10, 161),
        *(
            np.array(f.thresholds)[:, None] / 16 + [-2 * UNIT, 0, 2 * UNIT, 1 / 16]
            for f in PIECES.values()
        ),
        [-246.0, 246.0],
    ],
    axis=None,
)
GRID = _held(GRID)
RANGE = {"low": 2.0**-4, "high": 2.0**6}
IN_RANGE = _held(np.geomspace(2.0**-4, 2.0**6 * 0.999, 64))
ROWS = _held(RNG.normal(size=(6, 32)) * np.geomspace(0.03, 90, 6)[:, None])
SCORES = _held(np.concatenate([RNG.normal(0, 3, (3, 64)), np.zeros((1, 64))]))
SCORES[0, 5] = 60.0  # one weight alone
HEADS = _held(RNG.normal(0, 8, (6, 3, 10)))  # [row, head, d]
ANGLES = np.outer(np.array([0, 1, 2, 3, 100, 5000]), 10.0 ** -np.arange(5))  # of rows, by pair
TURNS = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=-1)[..., None].astype(np.float32)
ROUNDED = UNIT + 2.0**-18.5 * float(np.max(np.hypot(HEADS[..., :5], HEADS[..., 5:])))


@dataclass(frozen=True)
class Function:
    """`ours` of `x`, and of `own` of the client's, what it should be, and what it takes on shares:
    `messages` of both parties, at most `error` beside a unit and `relative` times the value.
    """

    ours: Callable[..., Any]
    exact: Callable[..., Any]
    x: np.ndarray
    messages: int
    error: float = 4 * UNIT
    relative: float = 0.0
    own: tuple[np.ndarray, ...] = ()


def _normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON)


def _softmax(x: np.ndarray) -> np.ndarray:
    w = np.exp(x - x.max(axis=-1, keepdims=True))
    return w / w.sum(axis=-1, keepdims=True)


def _rotated(x: np.ndarray) -> np.ndarray:
    """Rotate by the angles of the rows, pair by pair, as complex numbers."""
    turned = (x[..., :5] + 1j * x[..., 5:]) * np.exp(1j * ANGLES)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _rotate(x: Any, *own: Any) -> Any:
    """Rotate by turns that are public, or the client's own."""
    return rotate(x, *(own or (jnp.asarray(TURNS),)), hidden=bool(own))


def _allowed(function: Quadratics) -> float:
    """Beside what the fit leaves, a unit of a result (of 14 fraction bits) for each piece that is
    added to the last one, and for that.
    """
    return 1.01 * function.error + (len(function.thresholds) + 1) * 2.0**-14


FUNCTIONS = {
    "gelu": Function(
        gelu,
        lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        GRID,
        messages=10,
        error=_allowed(GELU[6]),
    ),
    "silu": Function(
        silu, lambda x: x / (1 + np.exp(-x)), GRID, messages=10, error=_allowed(PIECES["silu"])
    ),
    "relu": Function(relu, lambda x: np.maximum(x, 0), GRID, messages=6, error=2.0**-10),
    "reciprocal": Function(
        lambda x: reciprocal(x, **RANGE)[0], lambda x: 1 / x, IN_RANGE, messages=10, relative=3e-4
    ),
    "rsqrt": Function(
        lambda x: rsqrt(x, **RANGE)[0], lambda x: x**-0.5, IN_RANGE, messages=10, relative=2e-4
    ),
    "rms_norm": Function(
        lambda x: rms_norm(x, epsilon=EPSILON, gain=2.0)[0],
        lambda x: 2 * _normed(x),
        ROWS,
        messages=16,
        relative=9e-4,
    ),
    "softmax": Function(
        lambda x: softmax_of_product(x * 2.0**FRAC_BITS),
        _softmax,
        SCORES,
        messages=46,
        error=2.0**-15,  # half of it, by which weights are rounded
        relative=4e-4,
    ),
    "silu gated": Function(
        lambda x: silu_gated(x, 1.5 - x),
        lambda x: x / (1 + np.exp(-x)) * (1.5 - x),
        GRID[np.abs(GRID) < 3],
        messages=14,
        # The other factor is below 4.5, and rounded to 14 fraction bits.
        error=4.5 * _allowed(PIECES["silu"]) + 3 * 2.0**-14,
    ),
    # Narrow words of 24 bits with all 18 fraction bits, and of 30.
    "silu gated, small": Function(
        lambda x: silu_gated(x, 1.5 - x, bits=activation_bits(1)),
        lambda x: x / (1 + np.exp(-x)) * (1.5 - x),
        GRID[np.abs(GRID) < 1],
        messages=14,
        error=2.5 * _allowed(PIECES["silu"]) + 2.0**-14,
    ),
    "gelu gated, large": Function(
        lambda x: gelu_gated(x, jnp.full_like(x, 0.25), bits=activation_bits(1000)),
        lambda x: x / 8 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        np.concatenate([GRID, [900.0, -900.0]]),
        messages=14,
        error=0.25 * _allowed(GELU[6]) + 2.0**-14,
    ),
    "gelu gated": Function(
        lambda x: gelu_gated(x, jnp.full_like(x, -0.5), bits=activation_bits(32)),
        lambda x: -x / 4 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        GRID[np.abs(GRID) < 32],
        messages=14,
        error=0.5 * _allowed(GELU[6]),
    ),
    "rotate": Function(_rotate, _rotated, HEADS, messages=2, error=ROUNDED),
    "rotate, hidden": Function(_rotate, _rotated, HEADS, messages=4, error=ROUNDED, own=(TURNS,)),
}


def _opened(fn: Callable[..., Any], own: int = 0) -> SecureFunction:
    """Return fn of shared x, of which each party brings a half, and of `own` arrays of the
    client's.
    """
    return SecureFunction(
        lambda a, b, *own: reveal(fn(a + b, *own), to=Owner.CLIENT, label="y"),
        (Owner.CLIENT, Owner.PROVIDER, *[Owner.CLIENT] * own),
        "nonlinear",
    )


def _halves(session: PartySession, x: np.ndarray) -> list[Any]:
    return [session.private(r, lambda: x / 2, x.shape, np.float32) for r in (CLIENT, PROVIDER)]


def _secure(
    simulation: Simulation, fn: Callable[..., Any], x: np.ndarray, *own: np.ndarray
) -> tuple[Any, Any]:
    """Return fn(x, *own) between two parties on shared x; the result, and the meter's entries of
    all that sent something, but for what opened the result or was made for the pool.
    """
    function = _opened(fn, len(own))

    def program(session: PartySession) -> Any:
        halves = _halves(session, x)
        halves += [session.private(CLIENT, np.array, y.shape, y.dtype, y) for y in own]
        session.prepare(function, *halves)
        mark = len(session.meter.entries)
        out = session.call(function, *halves)
        entries = [
            e
            for e in session.meter.entries[mark:]
            if e.traffic.messages and e.kind != "pool" and e.name != "reveal"
        ]
        return session.get(out), entries

    result, entries = simulation.run(program)[CLIENT]
    return result, entries


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_parties_stay_within_error_and_messages(simulation: Simulation, name: str) -> None:
    f = FUNCTIONS[name]
    actual, entries = _secure(simulation, f.ours, f.x, *f.own)
    assert all(e.kind == "op" for e in entries)  # no SPU segment
    assert sum(e.traffic.messages for e in entries) == f.messages
    exact = f.exact(f.x.astype(np.float64))
    off = np.abs(actual - exact) - f.relative * np.abs(exact)
    assert np.max(off) <= f.error, f.x.reshape(-1)[np.argmax(off)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_plaintext_is_exact_also_under_jit_and_grad(name: str) -> None:
    f = FUNCTIONS[name]
    exact = f.exact(f.x.astype(np.float64))
    allowed = {"rtol": 1e-4, "atol": 1e-6}  # sums of float32 in another order
    np.testing.assert_allclose(f.ours(f.x, *f.own), exact, **allowed)
    np.testing.assert_allclose(jax.jit(f.ours)(f.x, *f.own), exact, **allowed)
    slope = jax.grad(lambda x: f.ours(x, *f.own).sum())(f.x[:1] if f.x.ndim > 1 else f.x[:8])
    assert np.all(np.isfinite(slope))


def test_activations_differentiate_as_their_references() -> None:
    rows = GRID[:160].reshape(4, -1)
    for ours, exact in ((gelu, lambda x: jax.nn.gelu(x, approximate=True)), (silu, jax.nn.silu)):
        np.testing.assert_array_equal(jax.vmap(ours)(rows), exact(rows))
        slopes = [jax.grad(lambda x, f=f: f(x).sum())(rows) for f in (ours, exact)]
        np.testing.assert_allclose(*slopes, atol=1e-6)


@pytest.mark.parametrize("owner", [Owner.PUBLIC, Owner.CLIENT])
def test_positions_turn_heads_without_a_segment(simulation: Simulation, owner: Owner) -> None:
    """Looked up in a table by public positions, or by the client's own, which it alone knows."""
    angles = np.outer(np.arange(9), [1.0, 0.1])
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1)[..., None].astype(np.float32)
    at, x = np.array([8, 0, 3], np.int32), _held(RNG.normal(size=(3, 2, 4)))

    def turned(x: Any, zero: Any, at: Any) -> Any:
        outcomes = rotate(x + zero, jnp.asarray(table)[at], hidden=owner is Owner.CLIENT)
        return reveal(outcomes, to=Owner.CLIENT, label="y")

    function = SecureFunction(turned, (Owner.CLIENT, Owner.PROVIDER, owner), "turned")

    def program(session: PartySession) -> Any:
        own = session.private(CLIENT, lambda: x, x.shape, np.float32)
        zero = session.private(PROVIDER, lambda: np.zeros_like(x), x.shape, np.float32)
        where = public(at)
        if owner is Owner.CLIENT:
            where = session.private(CLIENT, lambda: at, at.shape, np.int32)  # type: ignore[assignment]
        steps = function.plan(own, zero, where)[0].steps
        assert all(isinstance(step, OpCall) or step.local for step in steps)
        return session.get(session.call(function, own, zero, where))

    outcomes, _ = simulation.run(program)
    np.testing.assert_allclose(outcomes, rotate(x, table[at], hidden=True), atol=8 * UNIT)


@pytest.mark.parametrize("hidden", [False, True], ids=["public", "hidden"])
def test_heads_are_turned_up_to_the_largest_values(simulation: Simulation, hidden: bool) -> None:
    """Pairs next to 2^25 long, in all directions."""
    largest = 2.0**25
    pairs = (largest - 4) * np.exp(2j * np.pi * np.arange(90) / 90).reshape(6, 3, 5)
    x = np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float32)
    actual, _ = _secure(simulation, _rotate, x, *[TURNS] * hidden)
    # A float32 of this size is off by one, and its cosines and sines by 2^-25.
    allowed = UNIT + largest * (2.0**-18.5 + 2.0**-24.5) + 1
    np.testing.assert_allclose(actual, _rotated(x.astype(np.float64)), rtol=0, atol=allowed)


def test_gelu_is_closer_and_far_cheaper_than_spus_own(simulation: Simulation) -> None:
    """SPU's tanh is off by 0.005."""
    x = GRID[:160]
    exact = FUNCTIONS["gelu"].exact(x.astype(np.float64))
    ours, own = _secure(simulation, gelu, x)
    stock, stock_own = _secure(simulation, lambda x: jax.nn.gelu(x), x)
    assert np.abs(ours - exact).max() < np.abs(stock - exact).max() / 3
    for measure in ("messages", "bytes"):
        total, spus = (sum(getattr(e.traffic, measure) for e in es) for es in (own, stock_own))
        assert total * 10 < spus


def test_more_thresholds_more_bytes_no_more_messages(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other fits work just as well."""
    sizes = []
    for count, function in {**GELU, **{-n: f for n, f in SILU.items()}}.items():
        if count in (6, -8):
            continue  # the ones in use
        name = "gelu" if count > 0 else "silu"
        on_shares = lambda x, f=function: quadratics(x, f, bits=13)  # noqa: E731
        actual, entries = _secure(simulation, on_shares, GRID[:160])
        exact = FUNCTIONS[name].exact(GRID[:160].astype(np.float64))
        assert np.abs(actual - exact).max() <= _allowed(function)
        assert sum(e.traffic.messages for e in entries) == 10
        sizes.append(sum(e.traffic.bytes for e in entries) / 160)
    assert sizes[:3] == sorted(sizes[:3]) and sizes[3:] == sorted(sizes[3:])


@pytest.mark.parametrize("f", [pytest.param(reciprocal, marks=pytest.mark.slow), rsqrt])
def test_values_out_of_range_are_noticed(simulation: Simulation, f: Any) -> None:
    """Each of them alone, whatever its 64 bits; none of those inside, of which the first is a unit
    above the range's end.
    """
    inside = np.array([2.0**-4 + 2.0**-12, 1.0, 63.99], np.float32)
    outside = [0.0, 2.0**-5, 64.0, 65.0, 127.9, 130.0, 1000.0, -1.0, -(2.0**-4)]
    aliases = [1.0 + s * 2.0**k for k in range(7, 45) for s in (1, -1)] + [2.0**44 - 2.0**21]
    x = np.array([*outside, *aliases])
    counts = _counts(simulation, lambda v: f(v, **RANGE)[1], x[:, None])
    assert np.all(counts > 0), x[counts == 0]
    assert not np.any(_counts(simulation, lambda v: f(v, **RANGE)[1], inside[:, None]))
    assert not f(jnp.asarray(inside), **RANGE)[1] and f(jnp.asarray([65.0]), **RANGE)[1]


def _counts(simulation: Simulation, fn: Callable[..., Any], xs: np.ndarray) -> np.ndarray:
    """Return what is counted of each of xs [cases, ...] alone, call by call."""
    function = _opened(fn)

    def program(session: PartySession) -> list[Any]:
        return [session.get(session.call(function, *_halves(session, x))) for x in xs]

    return np.array(simulation.run(program)[CLIENT])


def test_rows_out_of_a_norms_range_are_noticed(simulation: Simulation) -> None:
    """A row of zeros, one below the range, some above it, whatever their narrow words look like."""
    low, high = np.sqrt(NORM_LOW), np.sqrt(norm_high(32))
    sizes = [1.0, 0.0, low / 1.1, high * 1.1, high * 1.5, high * 6]
    x = np.array([[[low * 1.1] * 32, [size] * 32, [high / 1.1] * 32] for size in sizes])
    x = x.astype(np.float32)
    counts = _counts(simulation, lambda v: rms_norm(v, epsilon=EPSILON)[1], x)
    for size, rows, count in zip(sizes, x, counts, strict=True):
        assert bool(count) == (size != 1.0) == bool(rms_norm(rows, epsilon=EPSILON)[1]), size


def test_rows_too_long_for_64_bits_are_noticed(simulation: Simulation) -> None:
    """Lengths whose squares wrap around: 2^13.5 to 2^31 and whatever words there are, among them
    rows whose sum of squares mod 2^64 is that of a row in range.
    """
    rng = np.random.default_rng(3)
    shapes = rng.normal(size=(32, 32))
    shapes /= np.linalg.norm(shapes, axis=1, keepdims=True)
    rows = [shape * 2.0 ** rng.uniform(13.5, 31) for shape in shapes]
    for exponent in range(13, 45):  # 2^e, whose square is 0 mod 2^64, beside a row in range
        alone = rng.normal(size=32)
        alone[exponent % 32] = 2.0**exponent * (-1) ** exponent
        rows.append(alone)
    x = np.array(rows, np.float32)[:, None].astype(np.float64)
    aliased = np.sum(np.round(x * 2.0**18).astype(np.int64).view(np.uint64) ** 2, axis=-1)
    in_range = (aliased >= 2**36 * 32 * NORM_LOW) & (aliased < 2**36 * 32 * norm_high(32))
    assert np.sum(in_range) > 10  # by their sum of squares alone
    counts = _counts(simulation, lambda v: rms_norm(v, epsilon=EPSILON)[1], x)
    assert np.all(counts > 0), np.flatnonzero(counts == 0)


def test_rows_beside_a_norm_are_checked_in_its_messages(simulation: Simulation) -> None:
    """As `longer` checks them by itself: rows of 26 times the length and far more, and of one word
    whose square is 0 mod 2^64.
    """
    most, rng = 8.0, np.random.default_rng(4)
    shapes = rng.normal(size=(12, 48))
    shapes /= np.linalg.norm(shapes, axis=1, keepdims=True)
    short = [shapes[0] * 0.99 * most, 0 * shapes[0], np.eye(48)[3] * -0.99 * most]
    long = [shape * 26 * most * 2.0**i for i, shape in zip(range(0, 36, 3), shapes, strict=True)]
    long += [np.eye(48)[i] * sign * 2.0**i for i in (8, 14, 30, 44) for sign in (1, -1)]
    others = np.array([*short, *long], np.float32)[:, None]
    normal = np.broadcast_to(rng.normal(size=32), (len(others), 1, 32))
    both = np.concatenate([normal, others], axis=-1).astype(np.float32)

    def beside(v: Any) -> Any:
        return rms_norm(v[:, :32], v[:, 32:], epsilon=EPSILON, longest=(most,))[1]

    for counts in (
        _counts(simulation, beside, both),
        _counts(simulation, lambda rows: longer(rows, longest=most), others),
        np.array([beside(jnp.asarray(rows)) for rows in both]),
    ):
        assert not np.any(counts[: len(short)]) and np.all(counts[len(short) :] > 0), counts
    sent = [
        sum(entry.traffic.messages for entry in _secure(simulation, fn, both[0])[1])
        for fn in (beside, lambda v: rms_norm(v[:, :32], epsilon=EPSILON)[1])
    ]
    assert sent[0] == sent[1]


def test_scores_as_large_as_their_bound_says(simulation: Simulation) -> None:
    """Up to 2^18, and differences of twice that; one weight or some, of large scores or small."""
    largest = 2.0**18
    z = np.zeros((4, 8))
    z[0] = [largest, -largest, largest - 1, *[0] * 5]
    z[1] = [-largest, *[-largest + 3] * 2, *[-largest] * 5]
    z[2] = np.linspace(-largest, largest, 8)
    z[3] = [9000.0, 8999.0, -9000.0, *[-largest] * 5]

    def ours(x: Any) -> Any:
        weights, _ = softmax_weights(x * 2.0**FRAC_BITS, None, score_bits(largest))
        inverse, outside = reciprocal_of_sums(jnp.sum(weights, axis=-1), x.shape[1])
        counted = outside[None].astype(jnp.float32)
        return jnp.concatenate([normalised(weights, inverse).reshape(-1), counted])

    actual, _ = _secure(simulation, ours, z)
    np.testing.assert_allclose(actual[:-1].reshape(z.shape), _softmax(z), atol=2e-3)
    assert not actual[-1]


def test_hidden_scores_weigh_nothing(simulation: Simulation) -> None:
    """However large they are; and weights of a row times other rows are normalised afterwards."""
    visible = np.tril(np.ones((4, 8), bool), 2)
    scores = np.where(visible, SCORES[:, :8], 40.0).astype(np.float32)
    rows = np.array([[1.0, -2.0, 4.0]] * 8, np.float32)

    def ours(x: Any) -> Any:
        weights, _ = softmax_weights(x * 2.0**FRAC_BITS, visible)
        factor, _ = reciprocal_of_sums(jnp.sum(weights, axis=-1), x.shape[1])
        hidden = jnp.sum(jnp.where(visible, 0.0, weights), axis=-1, keepdims=True)
        sums = jnp.sum(weights, axis=-1, keepdims=True) * np.float32(1)
        return jnp.concatenate(
            [normalised(jnp.concatenate([sums, -2 * sums, 4 * sums], axis=-1), factor), hidden],
            axis=-1,
        )

    actual, _ = _secure(simulation, ours, scores)
    np.testing.assert_allclose(actual[:, :3], rows[:4], rtol=4e-4)
    assert not actual[:, 3].any()


@pytest.mark.parametrize("n", [12, 1024, 8192])
def test_means_of_many_values_are_as_exact(simulation: Simulation, n: int) -> None:
    """Of more than the field's factors are fine enough for, in the ring."""
    sums = np.geomspace(1, n, 6)
    values = np.array([1.0, -2.5, 4.0])
    x = _held(np.concatenate([sums[:, None], sums[:, None] * values], axis=-1))

    def ours(x: Any) -> Any:
        inverse, _ = reciprocal_of_sums(x[:, 0], n)
        return aggregation._normalised(x[:, 1:], inverse, n)

    actual, entries = _secure(simulation, ours, x)
    assert any(e.name == "field_scale_rows" for e in entries) == (n <= 1024)
    np.testing.assert_allclose(
        actual, np.broadcast_to(values, actual.shape), rtol=2.0**-10 + 4e-4, atol=2.0**-11
    )


def test_wrong_squares_count_for_nothing(simulation: Simulation) -> None:
    """From 2^9 on the field does not hold the square, and all pieces have been left behind."""
    x = _held(np.array([-999.0, -700, -513, -512, -511, -20, 0, 20, 511, 512, 513, 700, 999]))
    ours = lambda v: silu(v, bits=activation_bits(1000))  # noqa: E731
    actual, _ = _secure(simulation, ours, x)
    assert np.abs(actual - np.where(x > 0, x, 0)).max() <= _allowed(PIECES["silu"])


def test_norms_with_fine_factors_stay_in_the_ring(simulation: Simulation) -> None:
    """A small gain and a wide range: cut to what the field takes, factors would be too coarse."""
    gain, high = 0.125, norm_high(ROWS.shape[-1])
    _, position = norm_lines(ROWS.shape[-1], EPSILON, gain, NORM_LOW, high)
    assert position - field.MAX_SHIFT > norms._MOST_CUT
    ours = lambda x: rms_norm(x, epsilon=EPSILON, gain=gain)[0]  # noqa: E731
    actual, entries = _secure(simulation, ours, ROWS)
    assert not any(e.name == "field_scale_rows" for e in entries)
    np.testing.assert_allclose(
        actual, gain * _normed(ROWS.astype(np.float64)), rtol=2e-3, atol=UNIT
    )


@pytest.mark.parametrize("enough", [True, False])
def test_scores_that_one_party_hides_weigh_nothing(simulation: Simulation, enough: bool) -> None:
    """The largest beside the least visible one; a row that sees nothing has no weights at all. With
    the bits that public ones take, they would weigh.
    """
    largest = 63.0
    scores = np.array([[-largest, largest, largest], [-largest, -largest, largest], [1, 2, 3]])
    hidden = np.array([[0, -1, -1], [0, 0, -1], [-1, -1, -1]], np.int32)
    bits = score_bits(largest, secret=enough)
    assert (bits == 14) == enough

    def weights(z: Any, visible: Any) -> Any:
        return softmax_weights(z * 2.0**FRAC_BITS, visible, bits)[0]

    function = SecureFunction(
        lambda z, visible: reveal(weights(z, visible), to=Owner.CLIENT, label="test"),
        (Owner.PROVIDER, Owner.CLIENT),
        f"hidden by the client, {bits} bits",
    )

    def program(session: Any) -> Any:
        z = session.private(PROVIDER, np.asarray, scores.shape, np.float32, scores.astype("f"))
        seen = session.private(CLIENT, np.asarray, hidden.shape, np.int32, hidden)
        return session.get(session.call(function, z, seen))

    outcomes = simulation.run(program)[CLIENT]
    assert (outcomes[hidden < 0] == 0).all() == enough
    assert (outcomes[hidden == 0] > 0.8).all()


def test_a_norm_of_too_wide_a_range_is_refused() -> None:
    with pytest.raises(ValueError, match="words"):
        norms.norm_lines(256, EPSILON, 1.0, 2.0**-16, 2.0**14)
