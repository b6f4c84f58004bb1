"""Deadlines are on the monotonic clock: the wall clock, which may jump, is read where a date is
shown or a certificate's time is checked, and nowhere else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.kit.paths import ROOT

READERS = {
    "spu_llm/net/identity.py": "times of certificates",
    "spu_llm/gateway/openai.py": "when an answer was made",
    "spu_llm/gateway/responses.py": "when an answer was made",
    "spu_llm/gateway/server.py": "when a model was there",
    "spu_llm/app/commands/doctor.py": "whether this machine's clock is right",
    "spu_llm/systems/watermark/sessions.py": "when a session was",
    "spu_llm/service/journal.py": "when something was written down",
    "spu_llm/offline/inbox.py": "how old a file is, whichever process wrote it",
    "spu_llm/core/machine.py": "when a measurement was made",
    "models/chat.py": "the date that a chat template may ask for",
}
_CALLS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}


def reads(tree: ast.AST) -> Iterator[str]:
    """Yield the calls that read the wall clock, also where a function is only named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ".".join(ast.unparse(node).split(".")[-2:])
            if name in _CALLS:
                yield name
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{one.name}" for one in node.names if one.name.startswith("time"))


def test_deadlines_are_on_the_monotonic_clock() -> None:
    there = {
        path.relative_to(ROOT).as_posix()
        for package in ("spu_llm", "protocols", "models")
        for path in (ROOT / package).rglob("*.py")
        if list(reads(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert there == set(READERS)


@pytest.mark.parametrize(
    "code", ["time.time() + 5", "from time import time", "f(clock=time.time)", "datetime.now(tz)"]
)
def test_a_read_of_the_wall_clock_is_seen(code: str) -> None:
    assert list(reads(ast.parse(code)))
