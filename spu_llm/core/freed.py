"""Memory that this process has freed and the allocator keeps."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return freed memory to the system, where the C library can (glibc): after large arrays have
    passed through, this memory is as large as they were, and still holds what they held.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
