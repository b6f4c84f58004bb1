"""The held-out prompts of the studies of whole runs."""

from __future__ import annotations

import json
from dataclasses import dataclass

from experiments.common.saved import DATA

PROMPTS = DATA / "prompts.json"
TEMPERATURE = 0.7  # of sampled runs


@dataclass(frozen=True)
class Prompt:
    """A text of some kind; `number`, from 1 on, seeds its runs."""

    number: int
    kind: str
    text: str


def read_prompts() -> list[Prompt]:
    """Return all prompts of the study, in their order."""
    rows = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return [Prompt(i, row["kind"], row["text"]) for i, row in enumerate(rows, start=1)]
