"""Both halves of `make test` together are all tests, and a failure in either is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import halves


def test_the_halves_hold_every_test_once() -> None:
    longer, shorter = ([Path(place) for place in half] for half in halves.halves())
    for test in Path(halves.__file__).parent.rglob("test_*.py"):
        holders = [p for p in (*longer, *shorter) if p == test or p in test.parents]
        assert len(holders) == 1, test


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 1)])
def test_either_may_fail(
    monkeypatch: pytest.MonkeyPatch, first: int, second: int, capfd: Any
) -> None:
    class Other:
        returncode = second
        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731

        def communicate(self) -> tuple[str, None]:
            return "what it said\n", None

    monkeypatch.setattr(halves.subprocess, "Popen", lambda *args, **options: Other())
    monkeypatch.setattr(halves.subprocess, "call", lambda command: first)
    assert bool(halves.main()) == bool(first or second)
    assert capfd.readouterr().out == "what it said\n"
