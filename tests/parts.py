"""`--part K/N`: the K-th of N pieces of the tests that would run, so that many can run in turn."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", type=_part, help="run the K-th of N pieces")


def _part(text: str) -> tuple[int, int]:
    try:
        k, n = map(int, text.split("/"))
    except ValueError:
        k = n = 0
    if not 1 <= k <= n:
        raise pytest.UsageError(f"--part takes K/N with K from 1 to N, found {text!r}")
    return k, n


@pytest.hookimpl(trylast=True)  # of what marks and keywords leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the tests out in the order of their names: those of a file, which take about as long as
    each other, spread over the pieces.
    """
    if (part := config.getoption("--part")) is None:
        return
    k, n = part
    chosen = set(sorted(item.nodeid for item in items)[k - 1 :: n])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A piece without tests is no failure."""
    if session.config.getoption("--part") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
