"""Results that are committed: `experiments/data/NAME.json`, as the command's `--json` wrote them.

Tables, notebooks and the README's figure are made of them. `index.json` says of each which command
writes it again, whether nothing else ran on the machine ("quiet"), and what else to know ("note").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


def load(name: str) -> dict[str, Any]:
    """The result `name`."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found


def origin(name: str) -> str:
    """The command that made the result `name`, what its seconds are worth, and its note if any."""
    made = load("index")[name]
    worth = "" if timed(name) else "; taken beside other work: seconds are upper bounds"
    return f"from `{made['command']}`{worth}" + (f"; {made['note']}" if "note" in made else "")


def timed(name: str) -> bool:
    """Whether nothing else ran, so that seconds may be compared."""
    return bool(load("index")[name]["quiet"])
