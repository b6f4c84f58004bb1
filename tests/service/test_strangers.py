"""Strangers who connect to a server and say nothing, half of a greeting, or nonsense: whoever is
known gets in all the same, also from the strangers' own address.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spu_llm.net import identity, tls
from spu_llm.net.control_plane import check_health
from spu_llm.net.identity import CERTIFICATE, Identity
from spu_llm.net.messages import Messages
from spu_llm.net.stream import TcpStream
from tests.kit.pair import Pair
from tests.kit.patience import END_S, eventually
from tests.kit.processes import Start

STRANGERS = 300  # more than a server keeps
ATTEMPTS = 8
KNOWN_S = 30.0  # for whoever is known, on a machine however slow
PAUSE_S = 0.001
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"


def hello() -> bytes:
    """Return how a client begins, in TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    memory = tls.Memory()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(memory.incoming, memory.outgoing).do_handshake()
    return memory.outgoing.read()


SAID: dict[str, Callable[[], bytes]] = {
    "silent": lambda: b"",
    "half": hello,
    "garbage": lambda: os.urandom(100),
}


class Strangers:
    """So many connections from one address, each made again when the server has closed it."""

    def __init__(self, port: int, said: bytes) -> None:
        self._address, self._said = (HERE, port), said
        self._open: set[socket.socket] = set()
        self.made = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Strangers:
        self._thread.start()
        assert eventually(lambda: self.made >= STRANGERS, END_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        for sock in self._open:
            sock.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                self._connect()
            poll = select.poll()
            for sock in self._open:
                poll.register(sock, select.POLLIN)
            ended = {number for number, _ in poll.poll(0)}
            for sock in [sock for sock in self._open if sock.fileno() in ended]:
                with contextlib.suppress(OSError):
                    if sock.recv(1 << 16):  # the server's part of a greeting
                        continue
                self._open.remove(sock)
                sock.close()
            time.sleep(PAUSE_S)

    def _connect(self) -> None:
        if len(self._open) < STRANGERS:
            sock = socket.create_connection(self._address, 2.0)
            self._open.add(sock)
            self.made += 1
            sock.sendall(self._said)


class Known:
    """A server, and who is let in there: `ask` raises when that fails."""

    def __init__(self, port: int, own: Identity, calls: bool) -> None:
        self.port, self._own, self._calls = port, own, calls

    def connect(self, source: str) -> tls.TlsStream:
        sock = socket.create_connection((HERE, self.port), KNOWN_S, (source, 0))
        protocol = tls.CONTROL if self._calls else tls.DATA
        return tls.as_client(TcpStream(sock), self._own, HERE, protocol)

    def ask(self, source: str) -> None:
        if self._calls:
            assert check_health(self.connect(source), KNOWN_S)
        else:
            self.begin(source).close()

    def begin(self, source: str) -> Messages:
        """Return a request, as far as the model that it is for."""
        messages = Messages(self.connect(source), "the server", KNOWN_S)
        try:
            messages.say("hello")
            while messages.hear("evidence", "model")["type"] != "model":
                pass  # a vault has evidence to show first
        except BaseException:
            messages.close()
            raise
        return messages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("identities")
    for name in ("owner", "vault", "user"):
        identity.make(root / name, f"{name}.example", 30)
    return root


@pytest.fixture(scope="module")
def servers(start_shared: Start, pair: Pair, folders: Path) -> Iterator[Callable[[str], Known]]:
    """Yield each of the three that listen, started when it is asked for."""
    made: dict[str, Known] = {}

    def options(own: str, other: str) -> list[str]:
        return [
            "--identity",
            str(folders / own),
            "--trust",
            str(folders / other / CERTIFICATE),
            "--listen",
            f"{HERE}:0",
        ]

    def known(own: str, other: str, port: int, calls: bool = False) -> Known:
        return Known(port, identity.load(folders / own, folders / other / CERTIFICATE), calls)

    def server(name: str) -> Known:
        if name not in made:
            model = ["--model", str(pair.private)]
            match name:
                case "serve":
                    command = start_shared("serve", *model, *options("owner", "user"))
                    made[name] = known("user", "owner", command.until_listening(), True)
                case "vault serve":
                    command = start_shared("vault", "serve", *model, *options("owner", "vault"))
                    made[name] = known("vault", "owner", command.until_listening())
                case "vault open":
                    command = start_shared(
                        "vault",
                        "open",
                        "--server",
                        f"{HERE}:{server('vault serve').port}",
                        *options("vault", "owner"),
                        "--trust-user",
                        str(folders / "user" / CERTIFICATE),
                    )
                    made[name] = known("user", "vault", command.until_listening())
        return made[name]

    yield server


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("name", ["serve", "vault serve", "vault open"])
def test_strangers_keep_nobody_out(servers: Callable[[str], Known], name: str, said: str) -> None:
    server = servers(name)
    server.ask(HERE)
    with Strangers(server.port, SAID[said]()) as strangers:
        before, failed = strangers.made, []
        for i in range(ATTEMPTS):
            source = ELSEWHERE if i % 4 == 3 else HERE
            started = time.monotonic()
            try:
                server.ask(source)
            except Exception as exc:
                failed.append(f"{source}: {exc}")
            if time.monotonic() - started > KNOWN_S:
                failed.append(f"{source}: late")
        assert strangers.made > before, "nobody came in between"
    assert not failed, f"{len(failed)} of {ATTEMPTS} were kept out: {failed}"


@pytest.mark.parametrize("name", ["vault serve", "vault open"])
def test_whoever_is_known_and_stops_keeps_nobody_out(
    servers: Callable[[str], Known], name: str
) -> None:
    server = servers(name)
    stopped = [server.begin(HERE) for _ in range(3)]
    server.ask(HERE)
    for messages in stopped:
        messages.close()
