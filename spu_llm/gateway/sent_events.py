"""Server-sent events as text (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import json
from typing import Any


def event(value: dict[str, Any], kind: str | None = None) -> str:
    """Return an event whose data is JSON, with its kind where the protocol names it."""
    named = "" if kind is None else f"event: {kind}\n"
    return f"{named}data: {json.dumps(value, ensure_ascii=False)}\n\n"


def comment(words: str) -> str:
    """Return a comment, which clients leave out."""
    return f": {json.dumps(words)}\n\n"
