"""What a request is refused with: an HTTP status, a sentence, and the field that it is about."""

from __future__ import annotations

from spu_llm.core.errors import (
    BusyError,
    InputError,
    LimitError,
    ManifestMismatch,
    PeerError,
    SpuLlmError,
)


class Refused(SpuLlmError):
    """A request that gets no answer."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.field = status, field


def refused(error: SpuLlmError) -> Refused:
    """Return what a request is refused with whose session ended with an error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InputError):
        return Refused(400, str(error))
    statuses: dict[type[SpuLlmError], int] = {
        BusyError: 503,
        LimitError: 429,
        ManifestMismatch: 502,
        PeerError: 502,
    }
    for kind, status in statuses.items():
        if isinstance(error, kind):
            return Refused(status, str(error))
    return Refused(500, str(error))
