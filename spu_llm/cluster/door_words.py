"""What a door and the front door say to each other, over connections of `bridge` that the door
makes, each of which begins with what it is for.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from spu_llm.cluster.bridge import UNHEARD_S
from spu_llm.core import errors
from spu_llm.core.errors import PeerError, SpuLlmError, WorkerError
from spu_llm.net.identity import Certificate

# What a connection is for: it lives as long as the door; it carries a client's calls, as bytes; it
# is for a session that the door supervises.
LIFE, CALLS, SESSION = "life", "calls", "session"
STRANGER = "stranger"  # from the door, of its life: why somebody was not let in
RENEW = "renew"  # to the door, of its life: whom it is to be, and to trust
GO = "go"  # to the door: the bytes of calls may come
# Of a session, to the door: its program, before there is room for it; it runs there; a batch is
# stored or is not; it is to end; nothing, as a sign of life.
ADMITTED, PLACED, STOP, ALIVE = "admitted", "placed", "stop", "alive"
STORED, NOT_STORED = "stored", "not stored"
# Of a session, from the door: what it uses, a batch, how it ended.
USAGE, PARCEL, ENDED = "usage", "parcel", "ended"

# Without a word of a session from the other end, after which that end counts as lost.
SILENT_S = 2 * UNHEARD_S

# Errors that the other end raises as they are; all others are this party's own machine's.
_KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SpuLlmError)
}


def words_of(certificate: Certificate | None) -> list[str] | None:
    """Return a certificate as words have it."""
    if certificate is None:
        return None
    return [certificate.fingerprint, certificate.name, certificate.until.isoformat()]


def certificate_of(words: Any) -> Certificate | None:
    """Return a certificate out of words; PeerError where they are none."""
    match words:
        case None:
            return None
        case [str(fingerprint), str(name), str(until)]:
            return Certificate(fingerprint, name, datetime.fromisoformat(until))
        case _:
            raise PeerError("words that are no certificate")


def error_of(kind: str, words: str) -> SpuLlmError:
    """Return an error that the other end has met."""
    return _KINDS.get(kind, WorkerError)(words)
