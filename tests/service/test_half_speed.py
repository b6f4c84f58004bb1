"""Tests pass at half the speed: every process of theirs stands still half of the time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.paths import ROOT
from tests.kit.patience import RUN_S
from tests.kit.processes import Process, all_processes
from tests.service.starving import starved

# None of them stops a process itself, which would go on here.
FILES = ("app/test_wire_faults.py", "app/test_tickets.py", "net/test_control.py")


def descendants(pid: int) -> list[Process]:
    """Return the living processes that `pid` started, and they, and so on."""
    everybody = all_processes()
    actual, parents = [], {pid}
    while parents:
        children = [process for process in everybody if process.parent in parents]
        actual += children
        parents = {child.pid for child in children}
    return actual


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_three_files_pass_at_half_speed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = [str(ROOT / "tests" / name) for name in FILES]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with (tmp_path / "said").open("w+") as said:
        tests = subprocess.Popen(
            [*command, *files], cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            own = os.getpid()
            with starved(lambda: descendants(own), share=0.5, period_s=0.1):
                code = tests.wait(3 * RUN_S)
        finally:
            tests.kill()
            tests.wait()
        said.seek(0)
        words = said.read()
    assert code == 0, words
    assert "passed" in words
