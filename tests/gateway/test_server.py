"""The gateway over HTTP, with a client of the provider that is made up: protocols as their own
libraries read them, who may ask, order, and ends.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.api.completion import Completion
from spu_llm.api.events import OnEvent
from spu_llm.core.errors import BusyError, InputError, PeerError, SpuLlmError
from spu_llm.gateway import kept, privacy, quiet, running, server
from spu_llm.gateway.asked import Asked
from spu_llm.gateway.running import Requests
from tests.gateway.fakes import (
    HELLO,
    PIECES,
    Fake,
    Talk,
    asked,
    completion,
    of_anthropic,
    of_openai,
    said,
    served,
)
from tests.kit.patience import eventually

# ---- OpenAI's protocol, as its library reads it


def test_openais_library_gets_an_answer(port: int, fake: Fake) -> None:
    client = of_openai(port)
    assert [model.id for model in client.models.list()] == ["private"]
    assert client.models.retrieve("private").owned_by == "provider"
    got = client.chat.completions.create(model="private", messages=HELLO, max_tokens=9, stop="x")
    assert got.choices[0].message.content == "Good dayé" and got.id.startswith("chatcmpl-")
    assert (got.choices[0].message.role, got.choices[0].finish_reason) == ("assistant", "stop")
    assert got.usage is not None and got.usage.total_tokens == 7 + 3
    extension: Any = got.usage.model_extra
    assert extension["spu_llm"]["wire_bytes"] == 300
    prompt, options = fake.asked[0]
    assert prompt == [Message("user", "hello")] and options.max_new_tokens == 9
    assert options.stop == ("x",)
    text = client.completions.create(model="private", prompt="def")
    assert text.choices[0].text == "Good dayé" and fake.asked[1][0] == "def"


def test_openais_library_reads_a_stream(port: int) -> None:
    stream = of_openai(port).chat.completions.create(
        model="private", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    first, *pieces, end, last = chunks
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert [piece.choices[0].delta.content for piece in pieces] == PIECES
    assert all(piece.choices[0].delta.role is None for piece in pieces)
    assert end.choices[0].finish_reason == "stop" and end.choices[0].delta.content is None
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 3
    assert {chunk.id for chunk in chunks} == {first.id}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    texts = of_openai(port).completions.create(model="private", prompt="def", stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == "Good dayé"


def test_a_stream_ends_as_clients_expect(port: int) -> None:
    body = json.dumps({"model": "private", "messages": HELLO, "stream": True}).encode()
    status, headers, raw = asked(
        port, "POST", "/v1/chat/completions", body, content_type="application/json"
    )
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-store"
    events = raw.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all("usage" not in json.loads(event[6:]) for event in events[:-2])


def test_openais_library_gets_a_response(port: int, fake: Fake) -> None:
    got = of_openai(port).responses.create(model="private", input="hi", instructions="be short")
    assert got.output_text == "Good dayé" and got.status == "completed"
    assert got.usage is not None and got.usage.total_tokens == 10
    assert fake.asked[0][0] == [Message("system", "be short"), Message("user", "hi")]
    chat: Any = [{"role": "user", "content": "hi"}, *got.output, *said("and")]
    again = of_openai(port).responses.create(model="private", input=chat)
    assert again.output_text and len(fake.asked[1][0]) == 3
    fake.does = lambda on_event, look: completion("x", "length")
    cut = of_openai(port).responses.create(model="private", input="hi", max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details is not None


def test_openais_library_reads_a_stream_of_a_response(port: int, fake: Fake) -> None:
    with of_openai(port).responses.stream(model="private", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "Good dayé"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert deltas == PIECES and events[0].type == "response.created"
    assert events[-1].type == "response.completed"

    def fails(on_event: OnEvent, look: Callable[[], None]) -> Completion:
        raise PeerError("the provider is gone")

    fake.does = fails
    failed = list(of_openai(port).responses.create(model="private", input="hi", stream=True))[-1]
    assert failed.type == "response.failed" and failed.response.error is not None
    assert failed.response.error.message == "the provider is gone"


# ---- Anthropic's protocol, as its library reads it


def test_anthropics_library_gets_an_answer(port: int, fake: Fake) -> None:
    got = of_anthropic(port).messages.create(
        model="private", max_tokens=9, messages=HELLO, system="be short"
    )
    (block,) = got.content
    assert block.type == "text" and block.text == "Good dayé"
    assert got.stop_reason == "end_turn" and got.usage.input_tokens == 7
    assert fake.asked[0][0][0] == Message("system", "be short")


def test_anthropics_library_reads_a_stream(port: int) -> None:
    with of_anthropic(port).messages.stream(
        model="private", max_tokens=9, messages=HELLO
    ) as stream:
        assert list(stream.text_stream) == PIECES
        message = stream.get_final_message()
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == 3


@pytest.mark.parametrize(
    ("reason", "of_chat", "of_message"),
    [
        ("eos", "stop", "end_turn"),
        ("stop", "stop", "stop_sequence"),
        ("length", "length", "max_tokens"),
        ("context", "length", "max_tokens"),
    ],
)
def test_why_a_text_ends_is_said(
    port: int, fake: Fake, reason: str, of_chat: str, of_message: str
) -> None:
    fake.does = lambda on_event, look: completion("x", reason)
    got = of_openai(port).chat.completions.create(model="private", messages=HELLO)
    assert got.choices[0].finish_reason == of_chat
    message = of_anthropic(port).messages.create(
        model="private", max_tokens=9, messages=HELLO, stop_sequences=["END"]
    )
    assert message.stop_reason == of_message
    assert message.stop_sequence == ("END" if reason == "stop" else None)


# ---- refusals


def test_libraries_raise_what_is_refused(port: int) -> None:
    client = of_openai(port)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="private", messages=HELLO, logprobs=True)
    assert refusal.value.param == "logprobs" and "tokens alone" in refusal.value.message
    with pytest.raises(openai.NotFoundError) as absent:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert absent.value.code == "model_not_found" and "'private'" in absent.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="private", input="x")
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        of_anthropic(port).messages.create(
            model="private", max_tokens=9, messages=HELLO, extra_body={"top_k": 5}
        )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("the prompt is too long"), 400),
        (BusyError("the provider has no place"), 503),
        (PeerError("the provider is gone"), 502),
    ],
)
def test_errors_of_a_session_have_their_status(
    port: int, fake: Fake, error: SpuLlmError, status: int
) -> None:
    def fails(on_event: OnEvent, look: Callable[[], None]) -> Completion:
        raise error

    fake.does = fails
    with pytest.raises(openai.APIStatusError) as refusal:
        of_openai(port).chat.completions.create(model="private", messages=HELLO)
    assert refusal.value.status_code == status and str(error) in refusal.value.message
    with pytest.raises(openai.APIError, match=str(error)):
        list(of_openai(port).chat.completions.create(model="private", messages=HELLO, stream=True))
    with pytest.raises(anthropic.APIStatusError) as other:
        of_anthropic(port).messages.create(model="private", max_tokens=9, messages=HELLO)
    assert other.value.status_code == status
    fake.does = fake.writes
    assert of_openai(port).completions.create(model="private", prompt="x").choices


def test_who_has_no_token_is_refused() -> None:
    with served(Fake(), token="a" * 16) as port:
        for key in ("none", "", "a" * 15, "ä"):
            status, _, raw = asked(port, "GET", "/v1/models", authorization=f"Bearer {key}")
            assert status == 401 and json.loads(raw)["error"]["type"] == "authentication_error"
        assert of_openai(port, "a" * 16).models.list().data
        assert of_anthropic(port, "a" * 16).messages.create(
            model="private", max_tokens=9, messages=HELLO
        )
        assert asked(port, "GET", "/health")[2] == b'{"status":"ok"}'
        with pytest.raises(anthropic.AuthenticationError):
            of_anthropic(port).messages.create(model="private", max_tokens=9, messages=HELLO)
        assert asked(port, "GET", "/health")[0] == 200
        assert asked(port, "GET", "/privacy")[0] == 401


def test_a_page_in_a_browser_cannot_ask(port: int, fake: Fake) -> None:
    """A form's request has another type; one of a name that points here has another host."""
    body = json.dumps({"model": "private", "messages": HELLO}).encode()
    path = "/v1/chat/completions"
    assert asked(port, "POST", path, body, content_type="text/plain")[0] == 415
    kind = {"content_type": "application/json"}
    assert asked(port, "POST", path, body, **kind, host="evil.example")[0] == 403
    assert asked(port, "POST", path, body, **kind, host=f"evil.example:{port}")[0] == 403
    status, headers, _ = asked(port, "OPTIONS", path, origin="http://evil.example")
    assert status == 405 and not any(name.startswith("access-control") for name in headers)
    assert asked(port, "GET", "/health", host="evil.example")[0] == 403
    assert asked(port, "POST", f"{path}/", body, **kind, host="evil.example")[0] == 404
    assert not fake.asked
    assert asked(port, "POST", path, body, **kind, host=f"127.0.0.1:{port}")[0] == 200


@pytest.mark.parametrize("content", ["", "\ud800"])
def test_texts_that_cannot_be_are_refused_at_once(port: int, fake: Fake, content: str) -> None:
    """Also of a stream, whose status would come too late."""
    chat = [{"role": "user", "content": content}]
    for more in ({}, {"stream": True}, {"\ud800": 1}):
        body = json.dumps({"model": "private", "messages": chat, **more}).encode()
        path = "/v1/chat/completions"
        status, _, raw = asked(port, "POST", path, body, content_type="application/json")
        assert status == 400 and json.loads(raw)["error"]["message"]
    assert not fake.asked


def test_large_requests_are_refused(port: int, fake: Fake) -> None:
    body = b'{"model": "' + b"x" * server.MOST_BYTES + b'"}'
    try:
        status, _, raw = asked(
            port, "POST", "/v1/completions", body, content_type="application/json"
        )
        assert status == 413 and b"4 MiB" in raw
    except ConnectionError:
        pass  # it has closed the connection while the request was sent
    assert not fake.asked and asked(port, "GET", "/health")[0] == 200


# ---- sessions


def test_requests_are_answered_in_their_order(port: int, fake: Fake) -> None:
    turn = threading.Event()

    def holds(on_event: OnEvent, look: Callable[[], None]) -> Completion:
        assert turn.wait(20)
        return completion("x")

    fake.does = holds
    client = of_openai(port)

    def ask(i: int) -> None:
        client.completions.create(model="private", prompt=f"{i}")

    threads = []
    for i in range(4):
        threads.append(threading.Thread(target=ask, args=(i,)))
        threads[-1].start()
        assert eventually(
            lambda n=i: json.loads(asked(port, "GET", "/health")[2])["requests"] == n + 1
        )
    assert len(fake.asked) == 1
    turn.set()
    for thread in threads:
        thread.join(20)
    assert [prompt for prompt, _ in fake.asked] == ["0", "1", "2", "3"]


def test_too_many_requests_are_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MOST", 1)
    fake.does = fake.waits
    with served(fake) as port:
        stream = of_openai(port).completions.create(model="private", prompt="x", stream=True)
        assert next(iter(stream)).choices[0].text == PIECES[0]
        with pytest.raises(openai.InternalServerError, match="try again later"):
            of_openai(port).completions.create(model="private", prompt="x")
        stream.close()


def test_who_has_gone_leaves_the_queue(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MOST", 2)
    fake.does = fake.waits
    with served(fake) as port:
        client = of_openai(port)
        first = client.completions.create(model="private", prompt="x", stream=True)
        next(iter(first))
        for _ in range(3):
            waits = client.with_options(timeout=0.3)
            with pytest.raises(openai.APITimeoutError):
                waits.completions.create(model="private", prompt="y")
            assert eventually(lambda: b'"requests":1' in asked(port, "GET", "/health")[2])
        assert len(fake.asked) == 1
        first.close()


@pytest.mark.parametrize("streams", [True, False])
def test_who_has_gone_ends_the_session(port: int, fake: Fake, streams: bool) -> None:
    fake.does = fake.waits
    body = json.dumps({"model": "private", "prompt": "x", "stream": streams}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    kind = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", body, kind)
    assert eventually(lambda: len(fake.asked) == 1)
    assert not fake.ended
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert eventually(lambda: fake.ended == ["the request was cancelled"])
    fake.does = fake.writes
    assert of_openai(port).completions.create(model="private", prompt="y").choices[0].text


def test_a_stream_says_what_is_done(port: int, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """In comments, which clients leave out, so that nobody takes it for dead."""
    monkeypatch.setattr(server, "QUIET_S", 0.05)
    fake.does = fake.waits
    body = json.dumps({"model": "private", "prompt": "x", "stream": True}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    lines = [answer.readline() for _ in range(4)]
    assert lines[0].startswith(b"data: ") and PIECES[0].encode() in lines[0]
    assert lines[2] == b': "made 3 of 9 batches of correlated randomness"\n'
    connection.close()


def test_the_gateway_ends_with_sessions_at_work(fake: Fake) -> None:
    fake.does = fake.waits
    with served(fake) as port:
        stream = of_openai(port).completions.create(model="private", prompt="x", stream=True)
        next(iter(stream))
    assert fake.ended == ["the request was cancelled"]


def test_what_was_learned_can_be_read(port: int) -> None:
    assert json.loads(asked(port, "GET", "/privacy")[2]) == {"learned": None}
    of_openai(port).completions.create(model="private", prompt="x")
    learned = {"client": ["tokens"], "provider": ["lengths"]}
    assert json.loads(asked(port, "GET", "/privacy")[2]) == {"learned": learned}


def test_counts_and_costs_are_told(fake: Fake, talks: list[Talk]) -> None:
    """In headers, and for Prometheus, where only who may ask reads them."""
    token = "a token of many letters"
    with served(fake, keep=1, token=token) as port:
        raw = of_openai(port, token).chat.completions.with_raw_response
        headers = raw.create(model="private", messages=said("a")).headers
        assert headers["x-spu-llm-seconds-online"] == "5"
        assert (
            headers["x-spu-llm-bytes-offline"] == "3"
            and headers["x-spu-llm-messages-online"] == "6"
        )
        with pytest.raises(openai.NotFoundError):
            of_openai(port, token).chat.completions.create(model="other", messages=said("a"))
        assert asked(port, "GET", "/metrics")[0] == 401
        status, _, body = asked(port, "GET", "/metrics", authorization=f"Bearer {token}")
        lines = body.decode().splitlines()
        path = 'path="/v1/chat/completions"'
        assert status == 200 and f'spu_llm_requests_total{{{path},status="200"}} 1.0' in lines
        assert f'spu_llm_requests_total{{{path},status="404"}} 1.0' in lines
        assert 'spu_llm_tokens_total{kind="answer"} 2.0' in lines
        assert 'spu_llm_bytes_total{phase="online"} 7.0' in lines
        assert "spu_llm_conversations 1.0" in lines


def test_the_page_takes_nothing_from_elsewhere(port: int) -> None:
    """And what was learned is shown with its words as words."""
    for path, kind in (("/", "html"), ("/page/chat.js", "javascript"), ("/page/chat.css", "css")):
        status, headers, body = asked(port, "GET", path)
        assert status == 200 and kind in headers["content-type"] and body
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert b"http://" not in body and b"https://" not in body and b"style=" not in body
    assert asked(port, "GET", "/", host="evil.example")[0] == 403
    html = privacy.page({"client": ["<b>"], "provider": []})
    assert "&lt;b&gt;" in html and "<b>" not in html
    assert asked(port, "GET", "/privacy", accept="text/html")[2].startswith(b"<!doc")


def test_what_the_system_tells(tmp_path: Path) -> None:
    assert not quiet.on_battery(tmp_path / "absent") and not quiet.on_battery(tmp_path)
    for name, kind, online in (("AC", "Mains", "0"), ("BAT0", "Battery", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
        (tmp_path / name / "online").write_text(f"{online}\n")
    assert quiet.on_battery(tmp_path)
    (tmp_path / "AC" / "online").write_text("1\n")
    assert not quiet.on_battery(tmp_path)
    assert quiet.is_busy(6.5, 2) and not quiet.is_busy(5.5, 2)


def test_a_chat_begun_for_nobody_ends(
    fake: Fake, talks: list[Talk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop ends, as after a second Ctrl-C, while a chat is being begun, or answers."""
    begins, goes_on = threading.Event(), threading.Event()

    class Slow(Talk):
        def __init__(self, *args: Any, **named: Any) -> None:
            begins.set()
            assert goes_on.wait(20)
            super().__init__(*args, **named)

    monkeypatch.setattr(kept, "Conversation", Slow)
    requests = Requests({"private": fake}, 1, 1)  # type: ignore[dict-item]

    async def ask_and_leave() -> None:
        requests.begin(Asked("private", [Message("user", "a")], CompletionOptions(), False))
        await asyncio.to_thread(begins.wait, 20)
        threading.Timer(0.2, goes_on.set).start()

    asyncio.run(ask_and_leave())  # which cancels what runs, and waits for its threads
    requests.abandon()
    assert eventually(lambda: not any(t.name == "conversation" for t in threading.enumerate()))
    assert len(talks) == 1 and not talks[0].turns
