"""How a relay reaches its worker: in a namespace of its own, or on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spu_llm.net import worker_side
from spu_llm.net.frames import StreamType
from spu_llm.net.worker_side import Apart, Loopback
from tests.kit.patience import SOON_S

# A worker that answers on its port, says what it has of a network, and calls its peer when told to.
WORKER = """
import os, socket, sys, threading
from spu_llm.net.frames import StreamType
from spu_llm.net.worker_side import hand_over, leave_network
left = leave_network()
hand_over(socket.socket(fileno=int(sys.argv[1])))
with open("/proc/net/dev") as file:
    devices = [line.split(":")[0].strip() for line in file if ":" in line]
print(left, os.getuid(), *devices, flush=True)

def serve():
    with socket.create_server(("127.0.0.1", 9003)) as listener:
        while True:
            sock, _ = listener.accept()
            sock.sendall(b"worker:" + sock.recv(100))
            sock.close()

for line in sys.stdin:
    if line.strip() == "listen":
        threading.Thread(target=serve, daemon=True).start()
    else:
        with socket.create_connection(("127.0.0.1", 9004)) as sock:
            sock.sendall(line.encode())
            print(sock.recv(100).decode(), flush=True)
"""


class Worker:
    def __init__(self) -> None:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[theirs.fileno()],
            )
        self.channel = own

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def worker() -> Iterator[Worker]:
    actual = Worker()
    yield actual
    actual.end()


def test_a_worker_apart_is_reached_and_reaches_its_peer_alone(worker: Worker) -> None:
    left, user, *devices = worker.hear().split()
    if left == "False":
        pytest.skip("no network namespaces here")
    assert int(user) == os.getuid() and devices == ["lo"]
    side = Apart(worker.channel)
    with pytest.raises(ConnectionRefusedError):
        side.connect(StreamType.MESSAGES)
    worker.say("listen")
    sock = _connected(side)
    sock.sendall(b"hello")
    assert sock.recv(100) == b"worker:hello"
    sock.close()
    worker.say("to my peer")
    accepted = _accepted(side)
    assert accepted.recv(100) == b"to my peer\n"
    accepted.sendall(b"from it")
    assert worker.hear() == "from it"
    accepted.close()
    # Outside nobody listens there.
    for port in (port for ports in side.ports.values() for port in ports):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1.0)
    side.close()
    with pytest.raises(OSError):
        _accepted(side)


def test_what_fails_halfway_changes_nothing() -> None:
    """A namespace whose loopback interface does not come up is not entered at all."""
    work = (
        "import os; from spu_llm.net import worker_side\n"
        "before = os.readlink('/proc/self/ns/net')\n"
        "worker_side.fcntl = None\n"
        "print(worker_side.leave_network(), before == os.readlink('/proc/self/ns/net'))"
    )
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.parametrize("kind", [worker_side._CONNECTED, worker_side._ACCEPTED])
def test_a_worker_cannot_use_up_descriptors(kind: bytes) -> None:
    """It is no longer listened to when it hands out sockets that nobody has asked for, or takes."""
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Apart(channel)
    before = len(os.listdir("/proc/self/fd"))
    with theirs, socket.socket() as sock:
        theirs.settimeout(5.0)
        with pytest.raises(OSError, match="Broken pipe|reset"):
            for _ in range(500):
                socket.send_fds(theirs, [kind + bytes([StreamType.MESSAGES])], [sock.fileno()])
        assert len(os.listdir("/proc/self/fd")) <= before + 2 * worker_side._BACKLOG


def test_a_worker_that_dies_ends_the_waiting(worker: Worker) -> None:
    if worker.hear().startswith("False"):
        pytest.skip("no network namespaces here")
    side = Apart(worker.channel)
    worker.process.kill()
    with pytest.raises(OSError, match="the worker has gone"):
        _accepted(side)
    with pytest.raises(OSError):
        side.connect(StreamType.MESSAGES)


def test_many_connections_at_once(worker: Worker) -> None:
    if worker.hear().startswith("False"):
        pytest.skip("no network namespaces here")
    side = Apart(worker.channel)
    worker.say("listen")
    _connected(side).close()
    heard: list[bytes] = []

    def ask(i: int) -> None:
        with side.connect(StreamType.MESSAGES) as sock:
            sock.sendall(b"%d" % i)
            heard.append(sock.recv(100))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert sorted(heard) == sorted(b"worker:%d" % i for i in range(20))
    side.close()


def _connected(side: Apart) -> socket.socket:
    for _ in range(100):
        try:
            return side.connect(StreamType.MESSAGES)
        except ConnectionRefusedError:
            threading.Event().wait(0.02)
    raise AssertionError("never")


def _accepted(side: Apart | Loopback) -> socket.socket:
    for _ in range(20):
        if (sock := side.accept(StreamType.MESSAGES)) is not None:
            return sock
    raise AssertionError("never")


def test_on_loopback_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Loopback(dict.fromkeys(StreamType, 1))
    with socket.create_connection(("127.0.0.1", side.ports[StreamType.MESSAGES][1])) as sock:
        accepted = _accepted(side)
        sock.sendall(b"mine")
        assert accepted.recv(10) == b"mine"
        accepted.close()
    monkeypatch.setattr(worker_side.os, "getuid", lambda: os.geteuid() + 1)
    with socket.create_connection(("127.0.0.1", side.ports[StreamType.MESSAGES][1])) as sock:
        assert side.accept(StreamType.MESSAGES) is None
        assert sock.recv(10) == b""
    side.close()
    with pytest.raises(OSError):
        side.accept(StreamType.MESSAGES)


def test_the_owner_of_a_connection_is_read_from_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as sock:
            own = sock.getsockname()[1]
            assert worker_side.owner_of(own, port) == os.getuid()
            assert worker_side.owner_of(1, port) is None
            assert Path("/proc/net/tcp").exists()
