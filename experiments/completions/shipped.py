"""What docs/results says of the shipped pair: by `models.training.evaluate`, and the demo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.common.report import both_ways
from models.training import evaluate


def in_results(figures: Mapping[str, Any], origin: str) -> list[str]:
    """Return how good the two models are and how well they fit, and the `origin` of each table."""
    return [
        f"{evaluate.agreement(figures)}.",
        evaluate.quality_table(figures),
        origin,
        evaluate.speed_table(figures),
        origin,
    ]


def demo_in_results(demo: Mapping[str, Any], origin: str) -> list[str]:
    """Return what the demo took, and its `origin`."""
    online, ahead = (both_ways(demo["bytes"][kind]) / 1e6 for kind in ("online", "offline"))
    text = (
        f"First token after {demo['first_token_seconds']:.1f} s, {len(demo['token_ids'])} tokens "
        f"after {demo['elapsed_seconds']:.1f} s in {demo['steps']} steps of "
        f"{1 + demo['config']['request.draft_length']} positions ({demo['accepted']} of "
        f"{demo['drafted']} drafts accepted), {demo['seconds']['decode']:.1f} s of them decoding; "
        f"{online:.0f} MB online, {ahead:.0f} MB ahead."
    )
    return [text, origin]
