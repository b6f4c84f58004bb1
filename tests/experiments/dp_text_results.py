"""Made-up results of the study of differentially private text."""

from __future__ import annotations

from typing import Any


def row(
    method: str,
    epsilon: float | None,
    batch: int,
    calls: float,
    mauve: float,
    k: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a row of a cell that was run."""
    return {
        "method": method,
        "epsilon": epsilon,
        "batch": batch,
        "top_k": k,
        "temperature": 1.0 if k is None else 1.2,
        "state": "run",
        "calls": calls,
        "mauve": [mauve, 0.05],
        "perplexity_gap": [50.0, 5.0],
        "length": [14.0, 1.0],
        "length_distance": 0.1,
        "names": [0.5, 0.1],
        "empty": 0,
        **more,
    }


def not_run(method: str, epsilon: float, batch: int, state: str) -> dict[str, Any]:
    """Return a row of a cell that was left out."""
    cell = {"method": method, "epsilon": epsilon, "batch": batch, "top_k": None}
    return {**cell, "temperature": 1.0, "state": state}


def made_up(*rows: dict[str, Any]) -> dict[str, Any]:
    """Return a result with these rows."""
    side = {"texts": 5, "files": 2, "tokens": [8.0, 9.0, 10.0, 11.0, 12.0]}
    return {
        "corpus": {
            "origin": "made up",
            "python": "3",
            "licence": "none",
            "sides": {"references": side, "real": side},
        },
        "plan": {"epsilons": [1.0, 10.0], "batches": [7], "texts": 3, "tokens": 12},
        "delta": 1e-6,
        "rows": list(rows),
        "real": {"length": [10, 1], "names": [0.5, 0.1], "perplexity": [80.0, 9.0]},
        "worth": [
            {
                "batch": 7,
                "epsilon": e,
                "clip": 0.5 if e else None,
                "public": [5.0, 0.1],
                "saved": [0.01, 0.02],
            }
            for e in (1.0, 10.0, None)
        ],
    }


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without the seconds that they took."""
    return [{name: row[name] for name in row if name != "processor_s"} for row in rows]
