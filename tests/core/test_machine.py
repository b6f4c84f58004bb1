"""What a study writes of the machine and the code that it measured."""

from __future__ import annotations

import re
import subprocess
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from spu_llm.core import machine as local


def test_a_measurement_says_what_it_ran_on_and_of() -> None:
    actual = local.machine()
    assert actual.cores >= 1 and actual.memory_gib > 1
    assert min(actual.load) >= 0
    age = datetime.now(timezone.utc) - datetime.fromisoformat(actual.date)
    assert timedelta(seconds=-1) < age < timedelta(minutes=1)
    assert actual.spu == "0.9.5" and actual.python.startswith("3.1")
    assert actual.commit == "unknown" or re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", actual.commit)
    assert set(asdict(actual)) >= {"commit", "date", "cores", "memory_gib", "load", "processor"}


def test_changed_files_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "__file__", str(tmp_path / "local.py"))
    assert local._commit() == "unknown"
    file = tmp_path / "local.py"

    def git(*arguments: str) -> str:
        names = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        command = ["git", *names, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    file.write_text("1", encoding="utf-8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "One")
    commit = git("rev-parse", "HEAD").strip()
    clean = local._commit()
    assert len(clean) >= 7 and commit.startswith(clean)
    file.write_text("2", encoding="utf-8")
    assert local._commit() == f"{clean}-dirty"
