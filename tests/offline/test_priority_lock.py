"""Completions go first in a client's directory; what is made in the background gives way."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spu_llm.core.errors import PoolError, WantedError
from spu_llm.offline import priority_lock
from spu_llm.offline.priority_lock import going_first, in_background, is_claimed
from spu_llm.offline.stock import stocks
from tests.kit.paths import ROOT


def never() -> None:
    raise AssertionError("there is nothing to wait for")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def test_what_is_made_ends_when_a_completion_comes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion waits until then, and says so once."""
    said: list[str] = []
    making = in_background(directory)
    look = making.__enter__()
    look()

    def pause(seconds: float) -> None:
        with pytest.raises(WantedError, match="a completion wants"):
            look()
        said.append("pause")
        if len(said) == 4:
            making.__exit__(None, None, None)

    monkeypatch.setattr(priority_lock.time, "sleep", pause)
    with going_first(directory, lambda: said.append("waits")):
        assert said == ["waits", "pause", "pause", "pause"]


def test_a_completion_is_seen_by_what_is_being_made(directory: Path) -> None:
    assert not is_claimed(directory)
    with going_first(directory, never):
        assert is_claimed(directory)
        with pytest.raises(WantedError, match="a completion wants"), in_background(directory):
            raise AssertionError("it begins nevertheless")
    assert not is_claimed(directory)
    with in_background(directory) as look:
        assert is_claimed(directory)
        look()


def test_the_first_to_end_leaves_the_second_ones_claim(directory: Path) -> None:
    second = going_first(directory, never)
    with going_first(directory, never):
        second.__enter__()
    assert is_claimed(directory)
    second.__exit__(None, None, None)
    assert not is_claimed(directory)


def test_only_one_makes_in_the_background(directory: Path) -> None:
    with in_background(directory):
        with pytest.raises(WantedError, match="in use by another"), in_background(directory):
            raise AssertionError("there are two")


def test_a_completion_waits_no_longer_than_it_says(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priority_lock, "WAIT_S", 0.2)
    with in_background(directory) as look:
        with pytest.raises(PoolError, match="in use .* did not end within 0.2 s"):
            with going_first(directory, lambda: None):
                raise AssertionError("both have it")
        look()  # it wants the directory no more


CLAIM = """
import sys, time
from pathlib import Path
from spu_llm.offline import priority_lock
with priority_lock.{claim}:
    print("has it", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    "claim", ["going_first(Path(sys.argv[1]), lambda: None)", "in_background(Path(sys.argv[1]))"]
)
def test_who_is_killed_leaves_no_claim(directory: Path, claim: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM.format(claim=claim), str(directory)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stdout.readline() == b"has it\n"
    assert is_claimed(directory)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not is_claimed(directory)
    with going_first(directory, never):
        pass
    with in_background(directory):
        pass


def test_the_locks_are_their_owner_s_and_no_correlations(directory: Path) -> None:
    with going_first(directory, never):
        pass
    with in_background(directory):
        assert stocks(directory) == []
    assert {path.name for path in directory.iterdir()} == {"id", "wanted", "making"}
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def _open_to_others(directory: Path) -> None:
    directory.mkdir(0o755)


def _a_link(directory: Path) -> None:
    directory.mkdir(0o700)
    (directory / "wanted").symlink_to(os.devnull)


@pytest.mark.parametrize(
    ("spoil", "said"), [(_open_to_others, "make it 700"), (_a_link, "symbolic link")]
)
def test_what_cannot_be_used_is_refused(
    directory: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(directory)
    with pytest.raises(PoolError, match=said), going_first(directory, never):
        raise AssertionError("it is used")
