"""The framing of SPU's link, looked at before SPU gets it.

brpc, which SPU's link speaks ("baidu_std"), sends 12 bytes ahead of every message: "PRPC", the
length of what follows and how much of that is its header, both big-endian. SPU's port takes other
protocols as well, HTTP among them, and trusts what lengths say; nothing of that kind passes here.
"""

from __future__ import annotations

import struct

from spu_llm.core.errors import WireError

MAX_BODY = 64 << 20  # of a message; SPU cuts what is longer into several

_HEADER = struct.Struct(">4sII")
_MAGIC = b"PRPC"


class LinkFrames:
    """Follows one direction of one connection."""

    def __init__(self) -> None:
        self._left = 0  # of the message at hand
        self._header = b""

    def look(self, data: bytes) -> None:
        """Take notice of the next bytes, cut anywhere; WireError on what is not the link's."""
        at = 0
        while at < len(data):
            if self._left:
                passed = min(self._left, len(data) - at)
                self._left -= passed
                at += passed
                continue
            needed = _HEADER.size - len(self._header)
            self._header += data[at : at + needed]
            at += needed
            if not self._header.startswith(_MAGIC[: len(self._header)]):
                raise WireError(f"not a message of SPU's link: {self._header[:4]!r}")
            if len(self._header) == _HEADER.size:
                _, body, header = _HEADER.unpack(self._header)
                if not 0 < header <= body <= MAX_BODY:
                    raise WireError(
                        f"a message of SPU's link with {body} bytes, {header} of them its header"
                    )
                self._left, self._header = body, b""
