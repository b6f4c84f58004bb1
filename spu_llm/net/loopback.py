"""Connections on this machine's loopback interface, and who is at their other end."""

from __future__ import annotations

import socket
from pathlib import Path

HOST = "127.0.0.1"


def connect(port: int) -> socket.socket:
    """Connect to a port of this machine; `OSError` when nobody listens."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Bound first: a socket that the kernel gave the very port would connect to itself, and
        # keep whoever is to listen from ever binding it.
        sock.bind((HOST, 0))
        if sock.getsockname()[1] == port:
            raise ConnectionError(f"port {port} was taken by this connection")
        sock.connect((HOST, port))
    except OSError:
        sock.close()
        raise
    return sock


def owner_of(port: int, of_peer: int) -> int | None:
    """Return the user whose socket on loopback has `port` and is connected to `of_peer`; None when
    the kernel does not say.
    """
    wanted = [f"0100007F:{number:04X}" for number in (port, of_peer)]
    try:
        table = Path("/proc/net/tcp").read_text(encoding="ascii")
    except OSError:
        return None
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == wanted:
            return int(fields[7])
    return None
