"""Benchmark of the emulated networks: round trips and throughput through two relays.

Each relay is in a separate process, together with its end of the link, which stands for the worker.
Round trips are of `SMALL` bytes. Throughput is that of a transfer of `LARGE` bytes: their bits,
divided by the seconds until the other end acknowledges them all, less the delay of both ways.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.common import commands, report
from spu_llm.app.printing import show_table
from spu_llm.core.errors import PeerError
from spu_llm.core.machine import machine
from spu_llm.net.frames import StreamType
from spu_llm.net.manifest import Role
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import shape_of
from spu_llm.net.stream import ByteStream, accept, connect, listen
from spu_llm.net.worker_side import Loopback

SMALL = 64
LARGE = 64_000_000
ROUND_TRIPS = 50
START_S = 30.0  # for the other process to begin, and to end

_HOST = "127.0.0.1"
_NOBODY = 1  # port of an own worker that the other end never calls


# ---- both ends


@contextmanager
def _relay(stream: ByteStream, network: str, role: Role) -> Iterator[Relay]:
    relay = Relay(stream, shape_of(network), role)
    relay.start(lambda payload: None, lambda: None)
    try:
        yield relay
    finally:
        relay.close()


def _answer(port: int, network: str) -> None:
    """Answer messages in the other process: the first bytes of a message give the number of bytes
    that follow it; the message is returned once these have arrived.
    """
    buffer = bytearray(1 << 20)
    with (
        _relay(connect(_HOST, port, START_S), network, "provider") as relay,
        socket.create_server((_HOST, 0)) as server,
    ):
        server.settimeout(START_S)
        relay.open_worker_side(Loopback({StreamType.MESSAGES: server.getsockname()[1]}))
        sock, _ = server.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while message := sock.recv(SMALL, socket.MSG_WAITALL):
                left = int.from_bytes(message[:8], "big")
                while left:
                    count = sock.recv_into(buffer, min(left, len(buffer)))
                    if not count:
                        return
                    left -= count
                sock.sendall(message)


def _exchange(sock: socket.socket, payload: bytes) -> float:
    """Send a message with `payload` behind it; return the seconds until it is answered."""
    started = time.perf_counter()
    sock.sendall(len(payload).to_bytes(8, "big").ljust(SMALL, b"\0"))
    sock.sendall(payload)
    if len(sock.recv(SMALL, socket.MSG_WAITALL)) < SMALL:
        raise PeerError("the other end of the link is gone")
    return time.perf_counter() - started


def measure(
    network: str, repeat: int, round_trips: int = ROUND_TRIPS, nbytes: int = LARGE
) -> dict[str, Any]:
    """Measure one network; return, as JSON fields, the seconds of every round trip, and of every
    transfer of `nbytes` until its answer.
    """
    with listen(_HOST, 0) as listener:
        port = listener.getsockname()[1]
        with subprocess.Popen([sys.executable, "-m", __name__, str(port), network]) as other:
            try:
                with _relay(accept(listener, START_S), network, "client") as relay:
                    side = Loopback({StreamType.MESSAGES: _NOBODY})
                    relay.open_worker_side(side)
                    with socket.create_connection(
                        (_HOST, side.ports[StreamType.MESSAGES][1])
                    ) as sock:
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        _exchange(sock, b"")  # opens the stream
                        small = [_exchange(sock, b"") for _ in range(round_trips)]
                        payload = bytes(nbytes)
                        large = [_exchange(sock, payload) for _ in range(repeat)]
                    relay.expect_end()
                    other.wait(START_S)
            except BaseException:
                other.kill()
                raise
    return {"network": network, "round_trip_seconds": small, "bytes": nbytes, "bulk_seconds": large}


# ---- the report


def throughput(row: Mapping[str, Any]) -> list[float]:
    """Return the bits per second of each transfer of a network's result."""
    delay_s = 2 * shape_of(row["network"]).delay_s
    return [8 * row["bytes"] / (seconds - delay_s) for seconds in row["bulk_seconds"]]


def table(result: Mapping[str, Any]) -> str:
    """Format medians, least and largest figures beside the emulated delay and rate, as Markdown."""
    heads = (
        "network",
        "delay there and back, ms",
        f"round trip of {SMALL} B, ms",
        "rate, Mbps",
        "throughput, Mbps",
    )
    rows = []
    for row in result["networks"]:
        shape = shape_of(row["network"])
        rate = "no limit" if shape.bits_per_s is None else f"{shape.bits_per_s / 1e6:,.0f}"
        rows.append(
            [
                shape.name,
                f"{2e3 * shape.delay_s:.0f}",
                _spread([1e3 * s for s in row["round_trip_seconds"]], "{:.2f}"),
                rate,
                _spread([bits / 1e6 for bits in throughput(row)], "{:,.0f}"),
            ]
        )
    return "\n".join(report.table(heads, rows))


def _spread(values: Sequence[float], style: str) -> str:
    middle, least, most = map(style.format, (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})"


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_network(parser, "local,lan,wan")
    commands.add_number(parser, "--repeat", 5, f"transfers of {LARGE // 10**6} MB on each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    commands.add_debug(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_range("--repeat", options.repeat, 1)
    commands.check_folders(options)
    networks = [measure(network, options.repeat) for network in options.network]
    result = {"machine": asdict(machine()), "networks": networks}
    commands.write(options, result)
    show_table(table(result))


if __name__ == "__main__":
    _answer(int(sys.argv[1]), sys.argv[2])
