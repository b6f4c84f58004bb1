"""The largest settings of a completion."""

from __future__ import annotations

MAX_NEW_TOKENS = 1_000_000  # any model's context ends before
MAX_DRAFTS = 32  # of a step: twice the most that POST measures
MAX_CANDIDATES = 16
