"""Approximations: exact in plaintext, within their stated errors between two parties, cheaper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from protocols.nonlinear import (
    EXP_FLOOR,
    GELU_COEFFICIENTS,
    GELU_REACH,
    exp_nonpositive,
    gelu,
)
from spu_llm.reveal import reveal
from spu_llm.secure import PartySession, SecureFunction, Simulation
from spu_llm.values import CLIENT, PROVIDER, Owner

GRID = np.linspace(-12, 12, 4001, dtype=np.float32)
EXACT: dict[str, tuple[Callable[..., Any], Callable[..., Any], np.ndarray]] = {
    "gelu": (gelu, lambda x: jax.nn.gelu(x, approximate=True), GRID),
    "exp_nonpositive": (exp_nonpositive, jnp.exp, np.linspace(-200, 0, 4001, dtype=np.float32)),
}
ERROR = {"gelu": 1e-3, "exp_nonpositive": 3e-3}


@pytest.mark.parametrize("name", EXACT)
def test_plaintext_is_exact_also_under_jit_grad_and_vmap(name: str) -> None:
    ours, exact, grid = EXACT[name]
    np.testing.assert_array_equal(ours(grid), exact(grid))
    np.testing.assert_allclose(jax.jit(ours)(grid), exact(grid), atol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda x: ours(x).sum())(grid), jax.grad(lambda x: exact(x).sum())(grid), atol=1e-6
    )
    rows = grid[:4000].reshape(4, -1)
    np.testing.assert_array_equal(jax.vmap(ours)(rows), exact(rows))


def _secure(simulation: Simulation, fn: Callable[..., Any], x: np.ndarray) -> tuple[Any, Any]:
    """fn(x) between two parties on shared x; the result and the segment's traffic."""
    function = SecureFunction(
        lambda a, b: reveal(fn(a + b), to=Owner.CLIENT, label="y"),
        (Owner.CLIENT, Owner.PROVIDER), "nonlinear",
    )  # fmt: skip

    def program(session: PartySession) -> Any:
        halves = [
            session.private(r, lambda: x / 2, x.shape, np.float32) for r in (CLIENT, PROVIDER)
        ]
        out = session.call(function, *halves)
        segment = [e for e in session.meter.entries if e.kind == "segment"][-1]
        return session.get(out), segment.traffic

    result, traffic = simulation.run(program)[CLIENT]
    return result, traffic


@pytest.mark.parametrize("name", EXACT)
def test_two_parties_stay_within_the_stated_error(simulation: Simulation, name: str) -> None:
    ours, exact, grid = EXACT[name]
    found, _ = _secure(simulation, ours, grid)
    assert np.abs(found - np.asarray(exact(grid))).max() < ERROR[name]


def test_gelu_is_cheaper_and_closer_than_spus_own(simulation: Simulation) -> None:
    stock, stock_traffic = _secure(simulation, lambda x: jax.nn.gelu(x), GRID)
    ours, traffic = _secure(simulation, gelu, GRID)
    exact = np.asarray(jax.nn.gelu(GRID))
    assert np.abs(ours - exact).max() < np.abs(stock - exact).max() / 5
    assert traffic.messages < 0.6 * stock_traffic.messages
    assert traffic.bytes < 0.6 * stock_traffic.bytes


def test_gelu_far_outside_its_range_is_still_relu(simulation: Simulation) -> None:
    """The polynomial overflows there; the selection discards it exactly."""
    x = np.array([-1000.0, -100.0, -40.0, 40.0, 100.0, 1000.0], np.float32)
    found, _ = _secure(simulation, gelu, x)
    np.testing.assert_allclose(found, np.maximum(x, 0), atol=1e-3)


def test_gelu_coefficients_are_the_chebyshev_fit() -> None:
    nodes = 0.5 + 0.5 * np.cos(np.pi * (np.arange(4001) + 0.5) / 4001)
    x = GELU_REACH * np.sqrt(nodes)
    even = 0.5 * x * np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    fit = np.polynomial.chebyshev.Chebyshev.fit(nodes, even, 6, domain=[0, 1])
    expected = fit.convert(kind=np.polynomial.Polynomial).coef
    np.testing.assert_allclose(GELU_COEFFICIENTS, expected, rtol=1e-4)


def test_exponential_below_its_floor_needs_the_clamp(simulation: Simulation) -> None:
    x = np.array([-600.0, -530.0, -256.0, -20.0, 0.0], np.float32)
    clamped, _ = _secure(simulation, lambda v: exp_nonpositive(jnp.maximum(v, EXP_FLOOR)), x)
    np.testing.assert_allclose(clamped, np.exp(x), atol=3e-3)
    bare, _ = _secure(simulation, exp_nonpositive, x)
    assert np.abs(bare - np.exp(x)).max() > 1  # without it the claim above would be vacuous
