"""The commands `bench` and `experiment`: measurements that live in `experiments/`."""

from __future__ import annotations

from typing import Any


def add_commands(commands: Any) -> None:
    """Add the study commands to the parser."""
