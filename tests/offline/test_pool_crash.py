"""A party that dies at any moment: no unit comes twice, and the next session works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.paths import ROOT


def crash(tmp_path: Path, *options: str) -> dict[str, Any]:
    # A process of its own: it forks, which a process with threads had better not.
    done = subprocess.run(
        [sys.executable, "-m", "tests.offline.crashing", str(tmp_path), *options],
        cwd=ROOT,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("mode", "every"),
    [
        ("kill", 5),
        ("power", 9),
        *(pytest.param(mode, 1, marks=pytest.mark.slow) for mode in ("kill", "power")),
    ],
)
def test_no_unit_twice(tmp_path: Path, mode: str, every: int) -> None:
    """Either party killed at every call, or some of them, that changes its directory, then at one
    of the next run; with a power cut, all that was not made durable is lost on both sides.
    """
    report = crash(tmp_path, mode, str(every))
    assert not report["faults"], "\n".join(report["faults"][:20])
    assert min(report["calls"]) > 40
    assert report["killed"] == sum(len(range(0, calls, every)) for calls in report["calls"])


@pytest.mark.parametrize(
    ("mode", "every"),
    [
        ("kill", 11),
        ("power", 13),
        *(pytest.param(mode, 2, marks=pytest.mark.slow) for mode in ("kill", "power")),
    ],
)
def test_no_unit_twice_with_results_outside(tmp_path: Path, mode: str, every: int) -> None:
    """As before, with results of batches in object storage."""
    report = crash(tmp_path, mode, str(every), "", "outside")
    assert not report["faults"], "\n".join(report["faults"][:20])
    assert list((tmp_path / "whole" / "objects").iterdir())


def test_a_careless_pool_is_noticed_outside(tmp_path: Path) -> None:
    assert crash(tmp_path, "kill", "9", "state is not written", "outside")["faults"]


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("kill", "state is not written"),
        ("kill", "smaller index"),
        ("kill", "a copy stays in the inbox"),
        ("power", "contents are not synced"),
        ("power", "names are not synced"),
    ],
)
def test_a_careless_pool_is_noticed(tmp_path: Path, mode: str, fault: str) -> None:
    report = crash(tmp_path, mode, "9", fault)
    assert report["faults"]
