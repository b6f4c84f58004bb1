"""What commands take where an option is left out."""

from __future__ import annotations

from pathlib import Path

import models

PROMPT = "def read_config(path):"
DRAFT_LENGTH = 7


def shipped(name: str) -> Path:
    """Directory of a shipped model ('private' or 'public')."""
    return Path(models.__file__).parent / "shipped" / name
