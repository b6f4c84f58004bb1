"""What a provider writes down: its log, its audit file, its counts."""

from __future__ import annotations

import json
import re
import stat
import urllib.request
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.app import journaling, serving
from spu_llm.core.errors import (
    BusyError,
    InputError,
    LimitError,
    ManifestMismatch,
    PeerError,
    WantedError,
    WorkerError,
)
from spu_llm.net.stream import listen
from spu_llm.service import journal, listening
from spu_llm.service.journal import AuditFile, Bounded, Record, Session
from spu_llm.service.listening import LINES, LINES_S
from spu_llm.service.metrics import Metrics
from tests.kit.pair import Pair
from tests.kit.patience import END_S
from tests.kit.processes import Start

SECRET = "a sentence that nobody else may read"
AGREED = {
    "request.prompt_tokens": 7,
    "request.temperature": 0.7,
    "request.public_prefix": "17,4,9",
    "request.pool": "0123456789abcdef",
    "model.n_layer": 2,
    "session": "f" * 64,
}


def session() -> Session:
    return Session.of(None, "completion", AGREED)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def free_port() -> int:
    with listen("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


# ---- records


def test_a_session_is_told_by_numbers_alone() -> None:
    one = session()
    assert journal.begun(one).fields == {
        "session": one.id,
        "program": "completion",
        "request.prompt_tokens": 7,
        "request.temperature": 0.7,
    }


def test_a_session_of_a_named_model_names_it() -> None:
    one = Session.of(None, "completion", AGREED | {"served_model": "large"})
    assert journal.ended(one, 1.0, (2, 3), None).fields["model"] == "large"


@pytest.mark.parametrize("error", [PeerError, LimitError, WantedError])
def test_words_that_a_peer_may_hear_are_kept(error: Any) -> None:
    fields = journal.ended(session(), 1.0, (2, 3), error("too much")).fields
    assert (fields["error"], fields["reason"]) == (error.__name__, "too much")


@pytest.mark.parametrize("error", [WorkerError, InputError])
def test_what_a_worker_says_is_not_kept(error: Any) -> None:
    record = journal.ended(session(), 1.0, (2, 3), error(SECRET))
    assert record.fields["error"] == error.__name__
    assert SECRET not in record.as_json(with_words=False)
    assert SECRET in record.as_json(with_words=True)  # the log's, as people see it


@pytest.mark.parametrize("error", [InputError, ManifestMismatch])
def test_why_a_client_was_refused_is_kept(error: Any) -> None:
    assert journal.refused(error("no such program"), "", None).fields["reason"] == "no such program"


@given(st.text(), st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()))
def test_a_record_is_one_line(words: str, fields: dict[str, Any]) -> None:
    line = Record("listening", words, fields).as_json(with_words=True)
    assert len(line.splitlines()) == 1 and json.loads(line)["event"]


# ---- the audit file


def test_lines_are_appended_also_after_it_was_renamed(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = AuditFile(path)
    audit.write(Record("one"))
    path.rename(tmp_path / "old")
    audit.write(Record("two"))
    AuditFile(path).write(Record("three"))
    assert [line["event"] for line in lines(path.read_text())] == ["two", "three"]
    assert [line["event"] for line in lines((tmp_path / "old").read_text())] == ["one"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give a file to append to"):
        AuditFile(tmp_path / "none" / "audit")


def test_a_full_disk_lets_no_record_pass() -> None:
    with pytest.raises(WantedError, match="cannot write its audit file"):
        AuditFile(Path("/dev/full")).write(Record("one"))


def test_no_half_of_a_line_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit"
    audit = AuditFile(path)
    audit.write(Record("one"))
    write = journal.os.write
    monkeypatch.setattr(journal.os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    with pytest.raises(WantedError):
        audit.write(Record("two"))
    assert [line["event"] for line in lines(path.read_text())] == ["one"]


def test_a_full_audit_file_hides_nothing_from_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it cannot hold ends a session; that it ended is said and counted all the same."""
    audit, counts = tmp_path / "audit", free_port()
    log = journaling.opened(
        Namespace(audit=audit, metrics=f"127.0.0.1:{counts}", log_format=journaling.TEXT)
    )
    one = session()
    log(journal.begun(one))
    audit.unlink()
    audit.symlink_to("/dev/full")
    with pytest.raises(WantedError, match="cannot write its audit file"):
        log(journal.ended(one, 1.0, (1, 2), WorkerError("x")))
    assert "session failed: x" in capsys.readouterr().err
    text = read(counts)
    assert "spu_llm_provider_open_sessions 0.0" in text
    assert 'sessions_total{outcome="WorkerError",program="completion"} 1.0' in text
    serving._told(log, journal.RELOADED)("reloaded")  # which no session depends on
    assert "spu-llm: reloaded" in capsys.readouterr().err


def test_no_client_fills_a_disk_with_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    now, kept = [0.0], list[Record]()
    monkeypatch.setattr(listening, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log = Bounded(kept.append)

    def refused(client: str, times: int) -> None:
        for _ in range(times):
            log.take(Record(journal.REFUSED, "no", {"fingerprint": client}))

    refused("one", 500)
    assert len(kept) == LINES + 1 and "more refusals of one client" in kept[-1].words
    refused("other", 3)
    log.take(journal.begun(session()))
    assert len(kept) == LINES + 5  # another client's, and sessions, are all there
    now[0] = LINES_S
    refused("one", 2)
    assert [record.words for record in kept[-2:]] == ["no", "no"]


# ---- counts


def test_counts_follow_the_records() -> None:
    metrics, (one, other) = Metrics(), (session(), session())
    for record in (
        journal.begun(one),
        journal.begun(other),
        journal.ended(one, 12.0, (100, 50), None),
        journal.refused(LimitError("x"), "", None),
        Record(journal.REFUSED, "a stranger"),
    ):
        metrics.count(record)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"spu_llm_provider_{name}", labels)

    assert value("open_sessions") == 1
    assert value("sessions_total", program="completion", outcome="finished") == 1
    assert value("wire_bytes_total", direction="sent") == 100
    assert value("session_seconds_bucket", le="10.0") == 0
    assert value("session_seconds_bucket", le="30.0") == 1
    assert value("refusals_total", error="LimitError") == 1
    assert value("refusals_total", error="stranger") == 1
    metrics.count(journal.ended(other, 1.0, (1, 2), WorkerError("x")))
    assert value("open_sessions") == 0
    assert value("sessions_total", program="completion", outcome="WorkerError") == 1


def test_waiting_sessions_are_counted_until_they_wait_no_more() -> None:
    metrics, sessions = Metrics(), [session() for _ in range(4)]

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"spu_llm_provider_{name}", labels)

    for one in sessions:
        metrics.count(journal.waiting(one))
    assert value("waiting_sessions") == 4
    ends = (
        journal.placed(sessions[0], "10.0.0.1"),
        journal.no_room(sessions[1], BusyError("no room")),
        journal.ended(sessions[2], 1.0, (0, 0), WorkerError("x")),
        journal.begun(sessions[3]),
    )
    for left, record in enumerate(reversed(ends)):
        metrics.count(record)
        assert value("waiting_sessions") == 3 - left
    assert value("placed_sessions_total", machine="10.0.0.1") == 1
    assert value("refusals_total", error="BusyError") == 1
    assert value("sessions_total", program="completion", outcome="BusyError") is None


def test_an_address_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(InputError, match="another address"):
        Metrics().listen("127.0.0.1", listener.getsockname()[1])


# ---- processes


def test_a_session_is_written_down_everywhere(start: Start, pair: Pair, tmp_path: Path) -> None:
    audit, counts = tmp_path / "audit", free_port()
    places = ["--audit", str(audit), "--metrics", f"127.0.0.1:{counts}", "--log-format", "json"]
    server = start(*pair.serve(*places), stub="")
    port = server.until_listening()
    asked = start(*pair.generate(port, "--prompt", SECRET, "--public-prefix", "shared"), stub="")
    assert asked.wait(END_S) == 0, asked.stderr
    server.until("stderr", journal.FINISHED)
    kept = lines(audit.read_text())
    assert [line["event"] for line in kept] == [journal.LISTENING, journal.BEGUN, journal.FINISHED]
    assert kept[1]["session"] == kept[2]["session"] and kept[1]["program"] == "completion"
    assert kept[1]["request.max_new_tokens"] == 32 and kept[2]["wire_bytes_received"] > 100
    logged = lines(server.stderr)
    assert [line["event"] for line in logged] == [line["event"] for line in kept]
    assert re.fullmatch("session finished, .* MB on the wire", logged[-1]["words"])
    text = read(counts)
    assert 'sessions_total{outcome="finished",program="completion"} 1.0' in text
    for place in (audit.read_text(), server.stderr, text):
        assert SECRET not in place and "shared" not in place


def test_no_session_runs_that_cannot_be_written_down(start: Start, pair: Pair) -> None:
    server = start(*pair.serve("--audit", "/dev/full"), stub="")
    server.wait(END_S)
    assert server.errors == ["the provider cannot write its audit file"]


@pytest.mark.slow
def test_a_full_disk_ends_a_session_with_the_reason(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    audit = tmp_path / "audit"
    server = start(*pair.serve("--audit", str(audit)), stub="")
    port = server.until_listening()
    audit.unlink()
    audit.symlink_to("/dev/full")
    client = start(*pair.generate(port), stub="")
    client.assert_failed(1, "the provider cannot write its audit file", within_s=END_S)
    audit.unlink()
    again = start(*pair.generate(port), stub="")
    assert again.wait(END_S) == 0, again.stderr
    assert [line["event"] for line in lines(audit.read_text())][:1] == [journal.BEGUN]
