"""Bytes that are almost what they were."""

from __future__ import annotations

import random

_ODD = (b"\0", b"\xff", b'"', b"{", b"}", b"[", b"]", b"\\", b"\n", b"-1", b"1e999", b"null")


def changed(data: bytes, source: random.Random) -> bytes:
    """Return `data` with up to four changes: a bit, a byte, a piece cut out, doubled or put
    elsewhere.
    """
    for _ in range(source.randrange(5)):
        at, to = sorted(source.randrange(len(data) + 1) for _ in range(2))
        match source.randrange(6):
            case 0 if at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << source.randrange(8)]) + data[at + 1 :]
            case 1:
                data = data[:at] + source.choice(_ODD) + data[at:]
            case 2:
                data = data[:at] + data[to:]
            case 3:
                data = data[:to] + data[at:]
            case 4:
                data = data[:at] + source.randbytes(source.randrange(9)) + data[to:]
            case _:
                data = data[to:] + data[at:to]
    return data
