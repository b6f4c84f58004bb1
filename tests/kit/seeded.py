"""The operating system's randomness, replaced by a stream that repeats: for tests whose verdict
would be another once in a while, and that are not about this randomness.
"""

from __future__ import annotations

import os

import pytest

from spu_llm.core.prg import Prg


def seed_urandom(monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> None:
    """Make `os.urandom`, and so every stream and key that is drawn from it, repeat."""
    stream = Prg.from_seed(seed, "the operating system's")

    def drawn(count: int) -> bytes:
        return stream.words((-(-count // 8),)).tobytes()[:count]

    monkeypatch.setattr(os, "urandom", drawn)
