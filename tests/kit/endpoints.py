"""Servers that answer as a test says, on this machine."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """`cut`: the connection ends after the body, which is longer by what its length says; no body:
    it is reset before an answer.
    """

    body: bytes | None = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = 0


def choices(*texts: str, why: str | None = "length") -> Reply:
    """Return a completion's answer with these texts."""
    collected = [{"text": text, "index": i, "finish_reason": why} for i, text in enumerate(texts)]
    return Reply(json.dumps({"object": "text_completion", "choices": collected}).encode())


def refused(status: int, content: object, **headers: str) -> Reply:
    """Return an error with a JSON body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(json.dumps(content).encode(), status, named)


@dataclass
class Serving:
    url: str
    asked: list[Body] = field(default_factory=list)  # the requests' bodies
    # And their headers, by names in small letters; "path" is the path.
    heads: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def serving(reply: Callable[[Body, int], Reply]) -> Iterator[Serving]:
    """Yield a server whose answer follows from a request's body and its number, from 0 on."""
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(actual.asked)
                actual.asked.append(body)
                heads = {name.lower(): value for name, value in self.headers.items()}
                actual.heads.append({**heads, "path": self.path})
            given = reply(body, number)
            self.close_connection = given.body is None or given.cut > 0
            if given.body is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(given.body) + given.cut))
            self.end_headers()
            self.wfile.write(given.body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    actual = Serving(f"http://127.0.0.1:{server.server_port}/v1/completions")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield actual
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
