"""One request to the gateway in OpenAI's protocol, and how it ended."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

PATH = "/v1/chat/completions"
MOST_S = 7200.0  # between two parts of an answer: nothing here gives up before the gateway does


@dataclass
class Reply:
    """Answer to a request, and how it ended: "answered", "error" (as the protocol has it), "broken"
    (the connection ended before the answer did) or "malformed" (what came is not of the protocol).
    """

    how: str = "broken"
    status: int = 0  # of HTTP; 0: none came
    id: str = ""
    text: str = ""
    finish: str = ""
    message: str = ""  # of an error
    usage: dict[str, Any] = field(default_factory=dict)
    begun_s: float = 0.0  # monotonic
    first_text_s: float | None = None  # from the beginning
    seconds: float = 0.0


def ask(
    port: int,
    messages: Sequence[dict[str, str]],
    tokens: int,
    *,
    stream: bool,
    on_text: Callable[[], None] = lambda: None,
    model: str = "private",
    temperature: float | None = 0.0,
) -> Reply:
    """Ask for the answer to a chat, by default the likeliest one, and wait for its end. `on_text`:
    called when the first text of a stream is there. `temperature`: None: the gateway's own.
    """
    reply = Reply(begun_s=time.monotonic())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MOST_S)
    body = {"model": model, "messages": list(messages), "max_tokens": tokens, "stream": stream}
    if temperature is not None:
        body["temperature"] = temperature
    if stream:
        body["stream_options"] = {"include_usage": True}
    try:
        connection.request("POST", PATH, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        reply.status = answer.status
        kind = answer.headers.get_content_type()
        if kind == "text/event-stream":
            _read_stream(answer, reply, on_text)
        else:
            _take_whole(json.loads(answer.read()), reply)
    except (http.client.HTTPException, OSError):
        reply.how = "broken"
    except (ValueError, KeyError, IndexError, TypeError) as error:
        reply.how, reply.message = "malformed", f"{type(error).__name__}"
    finally:
        connection.close()
        reply.seconds = time.monotonic() - reply.begun_s
    return reply


def _take_whole(value: dict[str, Any], reply: Reply) -> None:
    if reply.status != 200:
        return _take_error(value, reply)
    (choice,) = value["choices"]
    reply.id, reply.usage = value["id"], value["usage"]
    reply.text, reply.finish = choice["message"]["content"], choice["finish_reason"]
    reply.how = "answered"


def _take_error(value: dict[str, Any], reply: Reply) -> None:
    """Take an error object: its message is a line for people."""
    error = value["error"]
    message, kind = error["message"], error["type"]
    proper = isinstance(message, str) and message and "\n" not in message and kind
    reply.how, reply.message = "error" if proper else "malformed", str(message)


def _read_stream(
    answer: http.client.HTTPResponse, reply: Reply, on_text: Callable[[], None]
) -> None:
    """Read events until the last one; a stream that ends without it has broken."""
    while line := answer.readline():
        if not line.startswith(b"data: "):
            continue  # a comment, or the end of an event
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            reply.how = "answered" if reply.finish else "malformed"
            return
        value = json.loads(data)
        if "error" in value:
            return _take_error(value, reply)
        if reply.id not in ("", value["id"]):
            raise ValueError("another answer's event")
        reply.id = value["id"]
        reply.usage = value.get("usage") or reply.usage
        for choice in value["choices"]:
            if text := choice["delta"].get("content"):
                if reply.first_text_s is None:
                    reply.first_text_s = time.monotonic() - reply.begun_s
                    on_text()
                reply.text += text
            reply.finish = choice["finish_reason"] or reply.finish


def get(port: int, path: str) -> bytes:
    """Return what the gateway answers to GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()
