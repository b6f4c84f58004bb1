"""Endpoints as they are: fewer choices than asked for, reasons, halves of characters, limits,
connections that end, proxies; and a text that is cut short.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from urllib3.util.retry import Retry

from spu_llm.app import cli
from spu_llm.core.errors import InputError, PeerError
from spu_llm.systems.watermark import posting
from spu_llm.systems.watermark.embedding import Embedder, Made
from spu_llm.systems.watermark.endpoint import HttpSampler
from spu_llm.systems.watermark.history import HistoryFile
from spu_llm.systems.watermark.keys import Scheme, write_key
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import WordUnits
from tests.kit.endpoints import Body, Reply, choices, refused, serving
from tests.systems.watermark.chains import key_of

WORDS = " the cat sat on a mat and slept until rain came down".split()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that nobody asked for are short here."""
    monkeypatch.setattr(posting, "_PATIENCE", Retry(total=3, backoff_factor=0.01))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def _words(body: Body, number: int) -> Reply:
    return choices(*(" " + random.choice(WORDS) for _ in range(body["n"])))


# ---- fewer choices


@pytest.mark.parametrize("at_most", [1, 3])
def test_choices_that_are_missing_are_asked_for(at_most: int) -> None:
    def few(body: Body, number: int) -> Reply:
        return choices(*[f" t{number}"] * min(body["n"], at_most))

    with serving(few) as server:
        sampler = HttpSampler(server.url, "m")
        for _ in range(2):
            assert len(sampler.sample("x", 7, 1)) == 7
        sizes = [body["n"] for body in server.asked]
    assert sizes[0] == 7 and max(sizes[1:]) <= max(at_most, 7 - at_most)
    assert sum(min(size, at_most) for size in sizes) == 14  # none is thrown away
    assert all(size <= at_most for size in sizes[-7 // at_most :])


def test_a_server_of_one_choice_is_asked_for_one_each() -> None:
    def one(body: Body, number: int) -> Reply:
        if body["n"] > 1:
            return refused(400, {"error": {"message": "Only one completion choice is allowed"}})
        return choices(f" t{number}")

    with serving(one) as server:
        sampler = HttpSampler(server.url, "m")
        actual = sampler.sample("x", 4, 1) + sampler.sample("x", 4, 1)
        assert [body["n"] for body in server.asked] == [4] + [1] * 8  # refused once
    assert len(set(actual)) == 8


def test_no_choice_and_too_many_are_refused() -> None:
    for texts in ([], [" a"] * 3):
        with serving(lambda body, number, texts=texts: choices(*texts)) as server:  # type: ignore[misc]
            with pytest.raises(PeerError, match=f"for 2 texts and answered {len(texts)}"):
                HttpSampler(server.url, "m").sample("x", 2, 1)


# ---- reasons


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"code": 400, "message": "too long"}}', "answered 400: too long"),
        (b'{"error": "no such\\nmodel\\u001b]52;c;AA\\u0007"}', "answered 400: no such model␛]52"),
        (b'{"object": "error", "message": "busy\\u202e"}', r"answered 400: busy<U\+202E>"),
        (b'{"detail": [{"loc": ["body"], "msg": "field required"}]}', "400: field required"),
        (b"plain words\n", "answered 400: plain words"),
        (b"<html>a page</html>", "answered 400: Bad Request"),
        (b"", "answered 400: Bad Request"),
        (b"\xff" * 1000, "answered 400: .{300}$"),
        (b'{"error": ' * 900 + b"1" + b"}" * 900, "answered 400: Bad Request"),
    ],
)
def test_the_reason_of_a_refusal_is_shown_in_one_harmless_line(body: bytes, shown: str) -> None:
    with serving(lambda asked, number: Reply(body, 400)) as server:
        with pytest.raises(PeerError, match=shown) as error:
            HttpSampler(server.url, "m").sample("x", 2, 1)
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_an_error_that_is_called_a_success() -> None:
    with serving(lambda body, number: refused(200, {"error": {"message": "no GPU"}})) as server:
        with pytest.raises(PeerError, match="answered with an error: no GPU"):
            HttpSampler(server.url, "m").sample("x", 1, 1)


def test_a_redirection_is_not_followed() -> None:
    with serving(lambda body, number: Reply(b"", 307, {"Location": "/elsewhere"})) as server:
        with pytest.raises(PeerError, match="answered 307: Temporary Redirect"):
            HttpSampler(server.url, "m").sample("x", 1, 1)
        assert len(server.asked) == 1


# ---- where a text ends, and halves of characters


@pytest.mark.parametrize(
    ("why", "ended"),
    [("stop", True), ("eos_token", True), ("other", True), ("length", False), (None, False)],
)
def test_any_other_reason_than_length_ends_a_text(why: str | None, ended: bool) -> None:
    with serving(lambda body, number: choices(" end", why=why)) as server:
        assert HttpSampler(server.url, "m").sample("x", 1, 1) == [Drawn(" end", ended)]


def test_a_text_that_was_broken_off_is_none() -> None:
    with serving(lambda body, number: choices(" e", why="abort")) as server:
        with pytest.raises(PeerError, match="broke off"):
            HttpSampler(server.url, "m").sample("x", 1, 1)


@pytest.mark.parametrize("half", ["\ufffd", "", "\ufffd\ufffd"])
def test_half_a_character_is_drawn_again_as_a_whole(half: str) -> None:
    def emoji(body: Body, number: int) -> Reply:
        whole = "🙂" if body["max_tokens"] > 3 else half
        return choices(*[" a" + half, whole][: body["n"]] if body["n"] > 1 else [whole])

    with serving(emoji) as server:
        actual = HttpSampler(server.url, "m").sample("x", 2, 1)
        assert [(body["n"], body["max_tokens"]) for body in server.asked] == [(2, 1), (1, 4)]
    assert actual == [Drawn(" a", False), Drawn("🙂", False)]


def test_an_endpoint_that_only_gives_halves() -> None:
    with serving(lambda body, number: choices("\ufffd")) as server:
        with pytest.raises(PeerError, match="no whole character in 13 tokens"):
            HttpSampler(server.url, "m").sample("x", 1, 1)


# ---- limits and failures


@pytest.mark.parametrize("status", [429, 503])
def test_a_limit_is_waited_for(status: int) -> None:
    def limited(body: Body, number: int) -> Reply:
        return refused(status, {}, Retry_After="1") if number == 1 else choices(" a")

    said: list[str] = []
    with serving(limited) as server:
        sampler = HttpSampler(server.url, "m", on_wait=said.append)
        assert [sampler.sample("x", 1, 1) for _ in range(2)] == [[Drawn(" a", False)]] * 2
        assert len(server.asked) == 3
    assert said == [f"waiting 1 s, the endpoint answered {status}"]


@pytest.mark.parametrize("wait", ["soon", "-3", "9" * 5000, "Wed, 99 Foo 2026 00:00:00 GMT", ""])
def test_a_time_that_is_none_is_not_waited_for(wait: str) -> None:
    def limited(body: Body, number: int) -> Reply:
        return refused(429, {}, Retry_After=wait) if number < 2 else choices(" a")

    with serving(limited) as server:
        assert HttpSampler(server.url, "m").sample("x", 1, 1) == [Drawn(" a", False)]


def test_patience_ends() -> None:
    with serving(lambda body, number: refused(429, {"error": "slow down"})) as server:
        with pytest.raises(PeerError, match="answered 429: slow down"):
            HttpSampler(server.url, "m").sample("x", 1, 1)
        assert len(server.asked) == 4
    with serving(lambda body, number: refused(429, {"error": "no"}, Retry_After="9999")) as server:
        with pytest.raises(PeerError, match="answered 429: no"):
            HttpSampler(server.url, "m").sample("x", 1, 1)
        assert len(server.asked) == 1


def test_a_connection_that_ends_before_an_answer_is_tried_again() -> None:
    with serving(lambda body, number: Reply(None) if number == 1 else choices(" a")) as server:
        sampler = HttpSampler(server.url, "m")
        assert [sampler.sample("x", 1, 1) for _ in range(2)] == [[Drawn(" a", False)]] * 2
        assert len(server.asked) == 3


@pytest.mark.parametrize("reply", [Reply(b"{}", cut=9), refused(500, {"error": "out of memory"})])
def test_what_may_have_been_done_is_not_asked_again(reply: Reply) -> None:
    with serving(lambda body, number: reply) as server:
        with pytest.raises(PeerError, match="broke off its answer|500: out of memory"):
            HttpSampler(server.url, "m").sample("x", 1, 1)
        assert len(server.asked) == 1


def test_a_server_that_answers_too_late_is_not_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/completions"
        with pytest.raises(PeerError, match="read timeout=0.2"):
            HttpSampler(url, "m", answer_s=0.2).sample("x", 1, 1)


def test_an_address_where_nobody_answered_before_fails_at_once() -> None:
    said: list[str] = []
    with pytest.raises(PeerError, match="cannot reach .*Connection refused") as error:
        HttpSampler("http://127.0.0.1:9/v1/completions", "m", on_wait=said.append).sample("x", 1, 1)
    assert not said and "object at" not in str(error.value)
    with pytest.raises(PeerError, match="cannot reach"):
        HttpSampler("http://nowhere.invalid/v1/completions", "m").sample("x", 1, 1)


# ---- proxies


def test_this_machine_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(_words) as server:
        assert len(HttpSampler(server.url, "m").sample("x", 2, 1)) == 2
        named = server.url.replace("127.0.0.1", "localhost")
        assert len(HttpSampler(named, "m").sample("x", 2, 1)) == 2


def test_others_are_reached_through_the_environment_s_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "http://model.invalid:8000/v1/completions"
    with serving(_words) as proxy:
        address = proxy.url.removeprefix("http://").split("/")[0]
        for given in (f"http://user:a%20b@{address}", address):
            monkeypatch.setenv("http_proxy", given)
            assert len(HttpSampler(url, "m").sample("x", 2, 1)) == 2
        monkeypatch.setenv("no_proxy", "model.invalid")
        with pytest.raises(PeerError, match="cannot reach"):
            HttpSampler(url, "m").sample("x", 2, 1)
    assert [head["path"] for head in proxy.heads] == [url, url]
    assert proxy.heads[0]["proxy-authorization"] == "Basic dXNlcjphIGI="
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:9")
    with pytest.raises(InputError, match="unset http_proxy"):
        HttpSampler(url, "m")


def test_a_key_that_no_header_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPU_LLM_API_KEY", "se\ncret")
    with pytest.raises(InputError) as error:
        HttpSampler("http://127.0.0.1:9", "m")
    assert "cret" not in str(error.value)
    monkeypatch.delenv("SPU_LLM_API_KEY")
    for url in ("http://[::1/x", "http:///x", "ftp://a"):
        with pytest.raises(InputError, match="an endpoint is http"):
            HttpSampler(url, "m")
    with pytest.raises(InputError, match="holds no login") as error:
        HttpSampler("https://user:secret@host/v1/completions", "m")
    assert "secret" not in str(error.value)


# ---- a text that is cut short


def test_a_text_that_was_cut_short_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(body: Body, number: int) -> Reply:
        return _words(body, number) if number < 6 else refused(429, {"error": "quota"})

    key, result = tmp_path / "key", tmp_path / "out.json"
    write_key(key, key_of(0), Scheme(2, units="words"))
    with serving(failing) as server, pytest.raises(SystemExit) as error:
        cli.main(
            [
                "watermark",
                "embed",
                "--key",
                str(key),
                "--endpoint",
                server.url,
                "--candidates",
                "3",
                "--json",
                str(result),
            ]
        )
    assert error.value.code == 1
    printed = capsys.readouterr()
    made = json.loads(result.read_text())
    assert printed.out == made["text"] + "\n" and len(made["text"].split()) == 6
    assert made["finish_reason"] == "cut" and len(made["chunks"]) == 6
    assert "answered 429: quota" in printed.err and "to go on" in printed.err


def test_what_nobody_wrote_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, result = tmp_path / "key", tmp_path / "out.json"
    write_key(key, key_of(0), Scheme(2, units="words"))
    with serving(lambda body, number: refused(401, {"error": "who?"})) as server:
        with pytest.raises(SystemExit):
            cli.main(
                [
                    "watermark",
                    "embed",
                    "--key",
                    str(key),
                    "--endpoint",
                    server.url,
                    "--json",
                    str(result),
                ]
            )
    printed = capsys.readouterr()
    assert not printed.out and not result.exists() and "to go on" not in printed.err


class _Recorded(HistoryFile):
    decided: list[frozenset[bytes]] = []

    def add(self, names: Iterable[bytes]) -> None:
        self.decided.append(frozenset(names))
        super().add(self.decided[-1])


class _Failing:
    """A sampler of few words, so that n-grams come again, which fails in the midst."""

    def __init__(self, calls: int) -> None:
        self._left, self._random = calls, random.Random(calls)

    def sample(self, prefix: object, n: int, max_tokens: int) -> list[Drawn]:
        self._left -= 1
        if self._left < 0:
            raise PeerError("limited")
        return [Drawn(" " + self._random.choice(WORDS), False) for _ in range(n)]


def test_no_n_gram_decides_twice_when_a_text_goes_on(tmp_path: Path) -> None:
    key, scheme, prompt = key_of(5), Scheme(2, units="words"), "Once"
    _Recorded.decided = []
    for calls in (20, 15, 5):
        made = Made("")
        with _Recorded(tmp_path / "history", key) as history:
            embedder = Embedder((key,), scheme, _Failing(calls), WordUnits(), 4, 1, (history,))
            with pytest.raises(PeerError, match="limited"):
                embedder.text(prompt, 100, made=made)
        assert made.reason == "cut" and len(made.chunks) == calls
        prompt += str(made.content)
    decided = _Recorded.decided
    assert len(decided) == 40 and len(prompt.split()) == 41
    assert sum(map(len, decided)) == len(frozenset().union(*decided)) > 60
