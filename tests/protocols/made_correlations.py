"""Correlations, made and checked."""

from __future__ import annotations

import numpy as np

from spu_llm.core import field
from spu_llm.core.correlation import Correlation, Correlations, Form, evaluate
from spu_llm.core.integers import Factor
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation


def made(
    simulation: Simulation, correlation: Correlation, fixed: Factor | None = None
) -> tuple[list[Correlations], float]:
    """Return one chunk at both parties, and its bytes per unit."""

    def work(session: PartySession) -> tuple[Correlations, float]:
        weights = fixed if session.rank == PROVIDER else None
        correlations = session.preprocessing.take(correlation, correlation.chunk, weights)
        entry = [e for e in session.meter.entries if e.name == correlation.name][-1]
        assert entry.phase == "offline" and entry.kind == "pool"
        return correlations, entry.traffic.bytes / correlation.chunk

    results = simulation.run(work)
    return [correlations for correlations, _ in results], results[CLIENT][1]


def check(correlation: Correlation, both: list[Correlations], fixed: Factor | None = None) -> None:
    masks = [
        a + b if part.form in (Form.ARITH, Form.PRIVATE) else a ^ b
        for part, a, b in zip(correlation.masks, both[0].masks, both[1].masks, strict=True)
    ]
    for part, a, b, expected in zip(
        correlation.results,
        both[0].results,
        both[1].results,
        evaluate(correlation, masks, fixed),
        strict=True,
    ):
        np.testing.assert_array_equal(_added(part.form, a, b), expected)


def _added(form: Form, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if form is Form.FIELD:
        return field.added(a, b)
    return a ^ b if form is Form.BOOL else a + b
