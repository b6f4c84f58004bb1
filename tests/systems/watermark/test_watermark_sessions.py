"""Sessions of a provider that marks: places in a stream, what is recorded, and who is refused."""

from __future__ import annotations

import errno
import os
import stat
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling
from protocols.verification.marked import Marked
from spu_llm.core.errors import BusyError, InputError, SpuLlmError
from spu_llm.core.prg import Prg
from spu_llm.net.manifest import with_nonce
from spu_llm.service import agreeing, programs
from spu_llm.service.provider import ServeOptions, _Sessions
from spu_llm.service.served_models import ServedModel, ServedModels
from spu_llm.service.supervisor import run_session
from spu_llm.service.task import Task
from spu_llm.systems.decoding.records import COMPLETION, PrepareRequest
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.program import Nothing, ProviderInputs, Served
from spu_llm.systems.served import ServedSystem
from spu_llm.systems.watermark import kept, sessions
from spu_llm.systems.watermark.keys import Scheme, write_key
from spu_llm.systems.watermark.served import MarkedTexts
from spu_llm.systems.watermark.sessions import (
    NONCE_BYTES,
    Session,
    SessionsFile,
    Shape,
    recorded,
    sessions_path,
)
from tests.kit.models import PRIVATE
from tests.kit.pair import Pair
from tests.systems.watermark.chains import key_of

SHAPES = st.builds(Shape, st.integers(1, 20), st.integers(0, 4), st.integers(1, 5))


# ---- places


@given(st.integers(0, 2**32), st.lists(st.integers(0, 5000), max_size=20))
def test_words_at_places_are_those_of_the_stream(seed: int, places: list[int]) -> None:
    moved, whole = Prg.from_seed(seed, "x"), Prg.from_seed(seed, "x").words((5001,))
    moved.words((3,))
    actual = moved.words_at(np.array(places, int).reshape(-1, 1))
    np.testing.assert_array_equal(actual, whole[places].reshape(-1, 1))
    np.testing.assert_array_equal(moved.words((2,)), whole[3:5])


@settings(max_examples=40)
@given(SHAPES, st.data())
def test_a_tokens_number_stands_where_the_provider_draws_it(shape: Shape, data: Any) -> None:
    """The rows of all forwards, as the verifier takes them from the stream."""
    key, nonce, rule = key_of(4), bytes(NONCE_BYTES), Marked(Sampling())
    stream = key.session(nonce)
    rows = [rule.provider_input(0, shape.vocab, stream)]
    for _ in range(shape.forwards - 1):
        rows.append(rule.provider_input(shape.drafts, shape.vocab, stream))
    drawn = np.concatenate(rows)
    assert len(drawn) == shape.rows
    tokens = data.draw(st.lists(st.integers(0, shape.vocab - 1), min_size=1, max_size=4))
    words = key.session(nonce).words_at(shape.places(tokens))
    uniform = (words >> np.uint64(11)) * 2.0**-53
    np.testing.assert_array_equal(
        (-np.log(-np.log(uniform))).astype(np.float32), drawn[:, tokens].T
    )


def test_streams_differ_by_key_and_nonce() -> None:
    nonces = [sessions.fresh_nonce() for _ in range(3)]
    streams = [key_of(k).session(nonce) for k in range(2) for nonce in nonces]
    assert len({stream.words((4,)).tobytes() for stream in streams}) == 6
    assert key_of(0).of_session(nonces[0]) != key_of(0).secret


# ---- the file


@given(st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES), SHAPES)
def test_a_line_is_read_as_it_was_written(nonce: bytes, shape: Shape) -> None:
    session = Session.now(nonce, shape)
    assert Session.of_line(session.line()) == session and b"\n" not in session.line()


LINE = Session(bytes(range(16)), "2026-01-31T12:00:00Z", Shape(288, 3, 9)).line()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"x",
        LINE[2:],
        LINE + b" 1",
        LINE.replace(b"Z", b""),
        LINE.replace(b" 9", b" 0"),
        LINE.replace(b" 9", b" -9"),
        LINE + b" ",
        LINE.replace(b"00", b"0g"),
        LINE.replace(b" 288", b" 0288"),
        LINE.upper(),
        LINE.replace(b"0", "\u0660".encode()),
    ],
)
def test_other_lines_are_refused(line: bytes, tmp_path: Path) -> None:
    assert Session.of_line(LINE).shape == Shape(288, 3, 9)
    with pytest.raises(ValueError):
        Session.of_line(line)
    path, key = tmp_path / "key.sessions", key_of(0)
    SessionsFile(path, key).close()
    with open(path, "ab") as file:
        file.write(LINE + b"\n" + line + b"\n")
    for read in (lambda: recorded(path, key), lambda: SessionsFile(path, key)):
        with pytest.raises(InputError, match="damaged in line 3"):
            read()


def session(number: int) -> Session:
    return Session.now(bytes([number]) * NONCE_BYTES, Shape(288, 3, 9))


def test_sessions_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, key = sessions_path(tmp_path / "key"), key_of(0)
    assert path.name == "key.sessions"
    synced: list[str] = []
    sync = os.fsync

    def noted(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    monkeypatch.setattr(kept.os, "fsync", noted)
    with pytest.raises(InputError, match="serve --mark"):
        recorded(path, key)
    with SessionsFile(path, key) as file:
        assert synced == [str(path), str(tmp_path)]  # its name, too
        assert recorded(path, key) == []
        file.add(session(1))
        with pytest.raises(InputError, match="in use by another run"):
            SessionsFile(path, key)
        # Read while it grows, and what is not whole is not read.
        with open(path, "ab") as torn:
            torn.write(session(9).line()[:20])
        assert [s.nonce for s in recorded(path, key)] == [session(1).nonce]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with SessionsFile(path, key) as file:  # the torn one never began
        threads = [threading.Thread(target=file.add, args=(session(i),)) for i in range(2, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(s.nonce[0] for s in recorded(path, key)) == list(range(1, 12))
        # A disk that is full: nothing is left of it, and nobody gets a text.
        whole, write = path.read_bytes(), os.write

        def full(descriptor: int, data: bytes) -> int:
            if len(data) > 10:
                return write(descriptor, data[:10])
            raise OSError(errno.ENOSPC, "no space")

        monkeypatch.setattr(kept.os, "write", full)
        with pytest.raises(SpuLlmError, match="no space") as error:
            file.add(session(20))
        assert not isinstance(error.value, InputError) and path.read_bytes() == whole
        monkeypatch.setattr(kept.os, "write", write)
        file.add(session(21))
        assert recorded(path, key)[-1].nonce == session(21).nonce
    file.close()
    whole = path.read_bytes()
    reused = os.open(tmp_path / "reused", os.O_RDWR | os.O_CREAT)
    with pytest.raises(SpuLlmError, match="it is closed"):
        file.add(session(22))
    os.close(reused)
    assert path.read_bytes() == whole and not (tmp_path / "reused").stat().st_size
    with pytest.raises(InputError, match="no list of sessions of this key"):
        recorded(path, key_of(1))
    path.chmod(0o640)
    for read in (lambda: recorded(path, key), lambda: SessionsFile(path, key)):
        with pytest.raises(InputError, match="chmod 600"):
            read()
    (link := tmp_path / "link").symlink_to(path)
    with pytest.raises(InputError, match="cannot read"):
        recorded(link, key)


# ---- who is served


def test_a_worker_gets_its_sessions_noise_alone(pair: Pair, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "key", Tokenizer.load(pair.private)
    scheme = Scheme(1, method="provider", tokenizer=tokenizer.digest)
    write_key(path, key_of(1), scheme)
    marked = MarkedTexts(path)
    marked.open(tokenizer, studies=False)
    held = ProviderInputs("model", served=(offer := marked.offer(None)).served)
    noise, (nonce, *_) = bytes.fromhex(held.served.stream_key or ""), offer.begin.args  # type: ignore[attr-defined]
    assert noise.hex() not in repr(held) and noise != key_of(1).secret
    assert nonce.hex() not in str(asdict(held))
    assert Prg(noise).words((2,)).tolist() == key_of(1).session(nonce).words((2,)).tolist()
    with pytest.raises(InputError, match="in use"):
        MarkedTexts(path).open(tokenizer, studies=False)
    marked.close()
    for other, words in (
        (Scheme(4, method="race", tokenizer=tokenizer.digest), "no provider's key"),
        (replace(scheme, tokenizer="other"), "another tokenizer"),
    ):
        path.unlink()
        write_key(path, key_of(1), other)
        with pytest.raises(InputError, match=words):
            MarkedTexts(path).open(tokenizer, studies=False)


@pytest.mark.parametrize("program", ["completion", "preparation"])
@pytest.mark.parametrize(
    ("verify", "temperature", "marks", "words"),
    [
        ("marked", 0.8, True, None),
        ("token", 0.8, False, None),
        ("race", 0.8, False, None),
        ("token", 0.8, True, "marks its texts: ask with --verify marked"),
        ("race", 0.8, True, "marks its texts"),
        ("post", 0.8, True, "marks its texts"),
        ("token", 0.0, True, "a --temperature of 0.5 or more"),
        ("marked", 0.5, True, None),
        ("marked", 0.49, True, "marks its texts, which takes --temperature 0.5 or more"),
        ("marked", 0.8, False, "serve --mark KEYFILE"),
        ("marked", 0.0, True, "no greedy decoding"),
    ],
)
def test_a_provider_marks_all_texts_or_none(
    program: str, verify: str, temperature: float, marks: bool, words: str | None
) -> None:
    request: Request = Request(4, 9, 2, temperature, verify)
    if program == "preparation":
        request = PrepareRequest(4, 9, 2, temperature, verify, steps=3)
    text: Any = type("Text", (), {"digest": "x"})
    actual = programs.find(program)
    agreed = agreeing.of_provider(PRIVATE, text, "local", 1) | agreeing.of_client(
        actual, request, text, "local", 1
    )
    held = ProviderInputs("model", served=Served(stream_key="00" * 32 if marks else None))
    task = agreeing.task_of("provider", agreed, held, Path("/pool"))
    system = MarkedTexts(Path("key")) if marks else ServedSystem()

    def admitted() -> Any:
        system.check_program(program)
        job = agreeing.job_of(actual, task)
        system.admit(job)
        return job

    if words is None:
        assert admitted().request == request
    else:
        with pytest.raises(InputError, match=words):
            admitted()


def options_of(pair: Pair, **changed: Any) -> ServeOptions:
    return ServeOptions.rehearsal(pair.private, once=False, sessions=2, **changed)


def test_a_session_is_recorded_when_it_begins_alone(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise is that of the recorded nonce; what is refused, prepared or only admitted leaves no
    line, and what cannot be recorded does not begin.
    """
    tokenizer, path = Tokenizer.load(pair.private), tmp_path / "key"
    write_key(path, key_of(2), Scheme(1, method="provider", tokenizer=tokenizer.digest))
    stated = agreeing.of_provider(PRIVATE, tokenizer, "local", 1)
    marked = MarkedTexts(path)
    marked.open(tokenizer, studies=False)
    options = options_of(pair, system=marked)
    lines: list[str] = []

    def asked(program: Any, request: Any) -> Any:
        return with_nonce(agreeing.of_client(program, request, tokenizer, "local", 1))

    def recorded_now() -> list[Session]:
        return recorded(sessions_path(path), key_of(2))

    models = ServedModels([ServedModel("", pair.private, 0, Path("hints"), stated)])
    with _Sessions(options, models, lines.append, lambda event: None) as serving:
        for program, request, words in (
            (COMPLETION, Request(5, 9, 3, 0.7), "--verify marked"),
            (COMPLETION, Request(5, 9, 3, 0.0), "--verify marked"),
            (programs.find("split-generate"), Nothing(), "split-generate has no way to"),
            (programs.find("private-text"), Nothing(), "private-text has no way to"),
            (programs.find("shared-text"), Nothing(), "shared-text has no way to"),
        ):
            with pytest.raises(InputError, match=words):
                serving._admit(asked(program, request), None)
        assert recorded_now() == []
        good = asked(COMPLETION, Request(5, 9, 3, 0.7, "marked"))
        _, ticket = serving._admit(good, None)
        admitted = serving._places.enter(ticket, None)
        assert recorded_now() == []
        admitted.begin()
        (one,) = recorded_now()
        assert one.shape == Shape(PRIVATE.vocab_size, 3, 9)
        assert admitted.task.own["served"]["stream_key"] == key_of(2).of_session(one.nonce).hex()
        other = serving._places.enter(serving._admit(good, None)[1], None)
        with pytest.raises(BusyError):
            serving._admit(good, None)
        monkeypatch.setattr(kept.os, "fsync", _fails)
        with pytest.raises(SpuLlmError, match="cannot write"):
            other.begin()
        monkeypatch.undo()
        marked.close()
        with pytest.raises(SpuLlmError, match="it is closed"):
            other.begin()
        assert recorded_now() == [one]


def test_what_cannot_begin_gives_its_worker_no_inputs() -> None:
    """And the client hears that it ends, not why."""
    heard: list[str] = []
    control, worker = MagicMock(), MagicMock()
    worker.next_event.return_value = {"event": "ready", "apart": []}
    control.relay.open_worker_side.side_effect = lambda side: heard.append("ready")

    def begin() -> None:
        heard.append("begin")
        raise SpuLlmError("cannot write it")

    task = Task("provider", "completion", {}, {}, 1000, None)
    with pytest.raises(SpuLlmError, match="cannot write it"):
        run_session(control, worker, task, lambda event: None, begin=begin)
    assert heard == ["ready", "begin"]
    worker.submit.assert_not_called()
    worker.stop.assert_called()
    control.bye.assert_called_once_with("the provider's worker failed", ok=False)


def _fails(descriptor: int) -> None:
    raise OSError(errno.EIO, "broken")
