"""What RESULTS.md says of the shipped pair, from what `models.training.evaluate` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.training import evaluate


def in_results(figures: Mapping[str, Any], origin: str) -> list[str]:
    """How good the two models are and how well they fit, and the `origin` of each table."""
    return [
        f"{evaluate.agreement(figures)}.",
        evaluate.quality_table(figures), origin,
        evaluate.speed_table(figures), origin,
    ]  # fmt: skip
