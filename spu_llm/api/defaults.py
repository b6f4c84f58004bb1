"""What calls and commands take where an option is left out."""

from __future__ import annotations

from pathlib import Path

import models

PROMPT = "def read_config(path):"
# What is made ahead for a position costs as much as the rest of a step without a network, so that a
# token is cheapest, everything counted, with 3 to 5 drafts (docs/results).
DRAFT_LENGTH = 4
SESSIONS, MAX_SESSIONS = 4, 64  # of a provider at a time: a worker takes 1.3 GiB and more

DRAFT_MODELS = ("public", "t5/public")  # shipped ones

PREFIX_PAD, MAX_PREFIX_PAD = 32, 4096  # tokens
SESSION_MINUTES = 24 * 60  # until a provider ends one: nobody waits for it any more


def shipped(name: str) -> Path:
    """Return the directory of a shipped model: 'private', 'public', 't5/private', 't5/public'."""
    return Path(models.__file__).parent / "shipped" / name
