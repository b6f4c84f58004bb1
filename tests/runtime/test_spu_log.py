"""SPU's log, of which a segment's traffic is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spu_llm.core.channel import Traffic
from spu_llm.core.errors import WorkerError
from spu_llm.runtime.spu_runtime import SpuLog

LINE = "Link details: total send bytes 1, recv bytes 2, send actions 3, recv actions 4\n"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SpuLog]:
    """Return a log that SPU does not write."""
    made = object.__new__(SpuLog)
    made.path = tmp_path / "log"
    made.path.write_text("")
    with made.path.open() as file:
        made._file = file
        yield made


def test_the_last_segment_s_traffic_is_read(log: SpuLog) -> None:
    log.path.write_text("other words\n" + LINE.replace("1,", "9,") + LINE)
    assert log.read_traffic() == Traffic(1, 2, 3, 4)
    with pytest.raises(WorkerError, match="no traffic line"):
        log.read_traffic(timeout_s=0.0)


def test_a_full_disk_is_said(log: SpuLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which disk, and what to do."""
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=0, f_frsize=4096))
    with pytest.raises(WorkerError, match=f"disk of {log.path.parent} is full.*set TMPDIR"):
        log.read_traffic(timeout_s=0.0)
