"""Pieces of the slow tests: every test in exactly one, and an empty one is no failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
@pytest.mark.parametrize("i", range(5))
def test_some(i): pass
def test_quick(): pass
"""


def run(directory: Path, *options: str) -> tuple[int, list[str], str]:
    """pytest's exit code, the tests that ran, and its output."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.parts", "-p", "no:cacheprovider", "-v"]
    done = subprocess.run(
        [*command, "--rootdir", str(directory), "-c", str(directory / "none.ini"), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    passed = [line.split()[0] for line in done.stdout.splitlines() if " PASSED" in line]
    return done.returncode, passed, done.stdout + done.stderr


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "none.ini").write_text("[pytest]\n")
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(TESTS)
    return tmp_path


def test_each_test_is_in_one_piece(directory: Path) -> None:
    pieces = [run(directory, str(directory), "-k", "some", "--part", f"{k}/3") for k in (1, 2, 3)]
    assert [code for code, *_ in pieces] == [0, 0, 0]
    assert sorted(len(ran) for _, ran, _ in pieces) == [3, 3, 4]
    ran = [test for _, piece, _ in pieces for test in piece]
    assert len(set(ran)) == len(ran) == 10
    again = run(directory, str(directory), "-k", "some", "--part", "2/3")
    assert again[1] == pieces[1][1]


def test_an_empty_piece_passes_and_a_failing_one_does_not(directory: Path) -> None:
    assert run(directory, str(directory), "-k", "quick", "--part", "3/3")[:2] == (0, [])
    (directory / "test_a.py").write_text("def test_some(): assert False")
    assert run(directory, str(directory), "-k", "some and test_a", "--part", "1/1")[0] == 1
    assert run(directory, str(directory), "-k", "nothing")[0] == 5  # as ever without pieces


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "1/0"])
def test_a_piece_that_is_none_is_refused(directory: Path, part: str) -> None:
    code, _, output = run(directory, str(directory), "--part", part)
    assert code == 4 and "K/N" in output
