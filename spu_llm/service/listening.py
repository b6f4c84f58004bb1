"""Waiting for connections."""

from __future__ import annotations

import select
import socket
import time

from spu_llm.core.errors import PeerError
from spu_llm.net.stream import TcpStream, accept

_LOOK_S = 0.25
_AGAIN_S = 0.1


def accepted(listener: socket.socket, exit_with_parent: bool) -> TcpStream | None:
    """The next connection; None when there was none for a moment. PeerError when the process that
    started this one has gone, of which it holds a pipe as standard input.
    """
    try:
        return accept(listener, _LOOK_S)
    except TimeoutError:
        if exit_with_parent and select.select([0], [], [], 0)[0]:
            raise PeerError("the process that started this one has gone") from None
    except OSError:  # a caller that has gone, or as many files as this process may have
        time.sleep(_AGAIN_S)
    return None
