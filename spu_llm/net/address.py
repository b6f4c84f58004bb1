"""HOST:PORT as people write it."""

from __future__ import annotations

from spu_llm.core.errors import InputError


def host_and_port(text: str, what: str, *, listens: bool = False) -> tuple[str, int]:
    """Return host and port of HOST:PORT; `what` names the text in the InputError when it is none.
    `listens`: port 0 lets a listener take any free one.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):  # an IPv6 address
        host = host[1:-1]
    try:
        valid = bool(host.encode("idna")) and port.isascii() and port.isdigit()
        valid = valid and len(port) <= 5
    except UnicodeError:
        valid = False
    if not valid or not (not listens) <= int(port) <= 65535:
        raise InputError(f"{what} must be HOST:PORT, found {text!r}")
    return host, int(port)
