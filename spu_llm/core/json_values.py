"""JSON that somebody else wrote: names that stand once, and values as a message quotes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_MOST_SHOWN = 80  # characters of a value in a message


def names_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's fields, as `object_pairs_hook` of `json.loads`. ValueError when a name
    stands twice: readers differ in which of the two they take.
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{shown(name)} is there twice")
        values[name] = value
    return values


def shown(value: object) -> str:
    """Return a value as a message quotes it: JSON in ASCII, its beginning."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
