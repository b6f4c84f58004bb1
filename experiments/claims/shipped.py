"""What RESULTS.md says of the shipped pair, from what `models.training.evaluate` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.common import report
from models.training import evaluate


def in_results(figures: Mapping[str, Any], file: str) -> list[str]:
    """How good the two models are and how well they fit, and where it comes from."""
    origin = report.origin(figures["machine"], file, "no seconds in it")
    return [
        f"{evaluate.agreement(figures)}.",
        evaluate.quality_table(figures), origin,
        evaluate.speed_table(figures), origin,
    ]  # fmt: skip
