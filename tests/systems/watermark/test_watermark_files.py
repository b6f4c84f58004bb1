"""Keys, n-grams, histories, and samplers outside: what is encoded, stored and refused."""

from __future__ import annotations

import http.server
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from spu_llm.core.errors import InputError, PeerError
from spu_llm.systems.watermark.cdfs import FAMILIES, Family
from spu_llm.systems.watermark.endpoint import HttpSampler
from spu_llm.systems.watermark.history import HistoryFile, history_path
from spu_llm.systems.watermark.keys import (
    MAX_NGRAM,
    METHODS,
    Key,
    Scheme,
    encoded,
    read_key,
    token_unit,
    write_key,
)
from spu_llm.systems.watermark.race_marks import context_of
from spu_llm.systems.watermark.sampler import CommandSampler, Drawn
from spu_llm.systems.watermark.sessions import sessions_path
from spu_llm.systems.watermark.units import WordUnits, common, grams
from tests.systems.watermark.chains import key_of

GRAM = st.lists(st.binary(max_size=6), max_size=6).map(tuple)
SCHEMES = st.builds(
    Scheme,
    st.integers(1, MAX_NGRAM),
    st.sampled_from([Family(f) for f in FAMILIES]),
    st.just("tokens"),
    st.sampled_from(METHODS),
    st.text(max_size=8),
)


@given(GRAM, GRAM)
def test_n_grams_are_told_apart(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> None:
    assert (encoded(one) == encoded(other)) == (one == other)
    key = key_of(0)
    assert (key.seed(one) == key.seed(other)) == (one == other)
    assert 0 < key.seed(one).uniform < 1
    assert key.seed(one) != key_of(1).seed(one)


def test_1_23_is_not_12_3() -> None:
    assert encoded([b"1", b"23"]) != encoded([b"12", b"3"])
    assert encoded([token_unit(1)]) != encoded([token_unit(1), token_unit(0)])
    with pytest.raises(ValueError, match="at most"):
        encoded([b"x"] * (MAX_NGRAM + 1))


def test_numbers_of_n_grams_are_uniform() -> None:
    """False alarm: 1e-6."""
    key = key_of(3)
    collected = [key.seed([token_unit(i)]).uniform for i in range(5000)]
    assert stats.kstest(collected, "uniform").pvalue > 1e-6
    names = {key.seed([token_unit(i)]).name for i in range(5000)}
    assert len(names) == 5000  # a name again: 1e-12


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_words_stay_when_spaces_and_capitals_change(text: str) -> None:
    units = WordUnits()
    assert units.of(text) == units.of(" " + text + "\n")
    placed = units.placed(text)
    assert all(0 <= u.start < u.end <= len(text) for u in placed)
    assert [u.start for u in placed] == sorted(u.start for u in placed)
    for unit in placed:  # a word by itself is that word
        assert units.of(text[unit.start : unit.end]) == [unit.value]


@given(st.lists(st.binary(min_size=1, max_size=2)), st.integers(1, 5), st.integers(0, 4))
def test_n_grams_end_at_their_unit(units: list[bytes], n: int, first: int) -> None:
    actual = grams(units, n, first)
    assert len(actual) == max(0, len(units) - first)
    for place, gram in enumerate(actual, first):
        assert len(gram) == min(n, place + 1) and gram[-1] == units[place]
    assert common(units, units + [b"x"]) == len(units)
    tokens = list(range(len(units)))
    assert len(context_of(tokens, n)) == min(n - 1, len(tokens))


@settings(max_examples=30)
@given(SCHEMES)
def test_a_key_file_is_what_was_written(scheme: Scheme) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path, key = Path(folder) / "key", Key.from_os()
        write_key(path, key, scheme)
        assert read_key(path) == (key, scheme)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert key.secret.hex() not in repr(read_key(path)) and "secret" not in repr(key)


def test_key_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(InputError, match="keygen makes one"):
        read_key(path)
    write_key(path, key_of(0), Scheme())
    with pytest.raises(InputError, match="there already"):
        write_key(path, key_of(0), Scheme())
    with pytest.raises(InputError, match="cannot write"):
        write_key(tmp_path / "none" / "key", key_of(0), Scheme())
    good = json.loads(path.read_text())
    secret = good["key"]
    wrong = [
        [],
        {},
        {**good, "key": secret[:-2]},
        {**good, "key": 3},
        {**good, "ngram": 0},
        {**good, "ngram": True},
        {**good, "units": "letters"},
        {**good, "more": 1},
        {**good, "format": 2},
        {**good, "family": {"name": "none", "k": 1}},
        {**good, "family": 3},
        {**good, "method": "race", "units": "words"},
    ]
    for content in wrong:
        path.write_text(json.dumps(content))
        with pytest.raises(InputError, match="damaged") as error:
            read_key(path)
        assert secret[:-2] not in str(error.value)
    path.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        read_key(path)
    with pytest.raises(ValueError, match="32 bytes"):
        Key(b"short")


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_any_other_file_is_no_key(data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with pytest.raises(InputError, match="damaged"):
            read_key(Path(file.name))


def test_a_history_is_kept(tmp_path: Path) -> None:
    path, key = tmp_path / "history", key_of(0)
    names = [key_of(0).seed([token_unit(i)]).name for i in range(4)]
    with HistoryFile(path, key) as history:
        history.add(names[:2])
        history.add(names[1:3])
        assert len(history) == 3
        with pytest.raises(InputError, match="in use"):
            HistoryFile(path, key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    whole = path.read_bytes()
    with open(path, "ab") as file:
        file.write(b"torn")
    with HistoryFile(path, key) as history:
        assert [name in history for name in names] == [True, True, True, False]
    assert path.read_bytes() == whole
    with pytest.raises(InputError, match="no history of this key"):
        HistoryFile(path, key_of(1))
    path.write_bytes(whole[:10])  # torn when it was begun
    with HistoryFile(path, key) as history:
        assert len(history) == 0
    os.chmod(path, 0o644)
    with pytest.raises(InputError, match="chmod 600"):
        HistoryFile(path, key)
    with pytest.raises(InputError, match="cannot keep"):
        HistoryFile(tmp_path / "none" / "history", key)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(InputError, match="cannot keep"):
        HistoryFile(link, key)


PROGRAM = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    one = {"text": f" {len(asked['prefix'])} of {asked['max_tokens']}", "ended": False}
    print(json.dumps({"sequences": [one] * asked["n"]}), flush=True)
"""


def test_a_program_as_sampler() -> None:
    sampler = CommandSampler([sys.executable, "-c", PROGRAM])
    try:
        assert sampler.sample("abc", 2, 5) == [Drawn(" 3 of 5", False)] * 2
        assert sampler.sample("é\n", 1, 1) == [Drawn(" 2 of 1", False)]
    finally:
        sampler.close()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit(3)", "ended"),
        ("input(); print('no'); input()", "no JSON"),
        ("input(); print('{}'); input()", "must answer"),
        ("input(); print('{\"sequences\": []}'); input()", "asked for 2 sequences"),
        ('input(); print(\'{"sequences": [{"text": 1}]}\'); input()', "must answer"),
        ("import time; time.sleep(60)", "not answered"),
    ],
)
def test_programs_that_do_otherwise(program: str, words: str) -> None:
    sampler = CommandSampler([sys.executable, "-c", program], answer_s=1.0)
    try:
        with pytest.raises(PeerError, match=words):
            sampler.sample("a", 2, 1)
    finally:
        sampler.close()


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(InputError, match="cannot start"):
        CommandSampler(["/nonexistent"])


class Endpoint(http.server.BaseHTTPRequestHandler):
    asked: list[tuple[str, dict[str, object]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.headers.get("Authorization", ""), body))
        if body["model"] == "none":
            self.send_error(404)
            return
        choices = [
            {"text": f" t{i}", "index": i, "finish_reason": "stop" if i else "length"}
            for i in range(body["n"])
        ]
        data = json.dumps({"choices": choices} if body["model"] == "m" else []).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/completions"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_endpoint_as_sampler(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Endpoint.asked.clear()
    monkeypatch.setenv("SPU_LLM_API_KEY", "abc")
    actual = HttpSampler(endpoint, "m", 0.8).sample("once", 2, 7)
    assert actual == [Drawn(" t0", False), Drawn(" t1", True)]
    (sent,) = Endpoint.asked
    body = {"model": "m", "prompt": "once", "n": 2, "max_tokens": 7, "temperature": 0.8}
    assert sent == ("Bearer abc", body)
    for model, words in (("none", "answered 404"), ("other", "another form")):
        with pytest.raises(PeerError, match=words):
            HttpSampler(endpoint, model).sample("once", 1, 1)
    with pytest.raises(PeerError, match="cannot reach"):
        HttpSampler("http://127.0.0.1:9/v1/completions", "m").sample("once", 1, 1)
    with pytest.raises(InputError, match="http://"):
        HttpSampler("file:///etc/passwd", "m")


def test_a_link_to_a_key_has_the_history_of_the_key(tmp_path: Path) -> None:
    key = tmp_path / "keys" / "key"
    key.parent.mkdir()
    key.touch()
    link = tmp_path / "link"
    link.symlink_to(key)
    assert history_path(link) == history_path(key) == key.with_name("key.history")
    assert sessions_path(link) == sessions_path(key) == key.with_name("key.sessions")
