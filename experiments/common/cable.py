"""A cable between two ports of this machine, with the delay and the rate of an emulated network.

Unlike a relay's emulation, a cable does not depend on the protocol that it carries, so two ways of
connecting can be compared on the same network. It runs in a separate process.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from spu_llm.net.shaping import Shaper, shape_of
from spu_llm.service.supervisor import python_command

_CHUNK_BYTES = 256 << 10
_HELD = 256  # chunks on their way, in each direction of a connection
_CALL_S, _RETRY_S = 20.0, 0.02  # for whoever is at the other end to listen

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def cable(network: str, targets: Sequence[int]) -> Iterator[list[int]]:
    """Yield a port for each of `targets`. A connection to it is forwarded to the target port of
    this machine, both directions at the network's rate and delay. All connections share the rate,
    separately for each direction. On a network without rate and delay, yield the targets
    themselves.
    """
    if shape_of(network).direct:
        yield list(targets)
        return
    command = [*python_command(__name__), network, *map(str, targets)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def main() -> None:
    """Run the cable with the network and target ports of the command line. Print its own ports, and
    end when standard input does.
    """
    network, *targets = sys.argv[1:]
    listeners = [socket.create_server((_LOOPBACK, 0)) for _ in targets]
    there, back = (_Way(Shaper(shape_of(network))) for _ in range(2))
    for i, (listener, target) in enumerate(zip(listeners, targets, strict=True)):
        # Two ports are of the two parties: what goes to one is what comes from the other.
        ways = (there, back) if i % 2 == 0 else (back, there)
        threading.Thread(target=_accept, args=(listener, int(target), *ways), daemon=True).start()
    print(json.dumps([listener.getsockname()[1] for listener in listeners]), flush=True)
    sys.stdin.read()


class _Way:
    """One direction of the cable, shared by all connections."""

    def __init__(self, shaper: Shaper) -> None:
        self._shaper, self._lock = shaper, threading.Lock()

    def due(self, nbytes: int) -> float:
        with self._lock:
            return self._shaper.due(nbytes, time.monotonic())


def _accept(listener: socket.socket, target: int, there: _Way, back: _Way) -> None:
    while True:
        near = listener.accept()[0]
        try:
            far = _called(target)
        except OSError:
            near.close()
            continue
        for source, sink, way in ((near, far, there), (far, near, back)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(_HELD)
            for work, end in ((_read, source), (_write, sink)):
                threading.Thread(target=work, args=(end, way, waiting), daemon=True).start()


def _called(port: int) -> socket.socket:
    deadline = time.monotonic() + _CALL_S
    while True:
        try:
            return socket.create_connection((_LOOPBACK, port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def _read(source: socket.socket, way: _Way, waiting: queue.Queue[tuple[float, bytes]]) -> None:
    data = b"?"
    while data:
        try:
            data = source.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        waiting.put((way.due(len(data)), data))


def _write(sink: socket.socket, way: _Way, waiting: queue.Queue[tuple[float, bytes]]) -> None:
    with contextlib.suppress(OSError):
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
