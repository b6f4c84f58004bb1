"""Results of batches as objects in storage that nobody has to trust.

An object is sealed under a key of its own, which stays in the pool. What the storage keeps too
long, gives twice or shows to others is of no use to anybody without that key; what it loses or
changes is a batch less, never another one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

OBJECT_NAME = re.compile(r"[0-9a-f]{32}")
MAX_OBJECT_BYTES = (32 << 20) + 16  # a batch's largest file, sealed
KEY_BYTES = 32
AT_ONCE = 16  # objects that are fetched beside one another
# A key seals one object, so that one nonce serves them all.
_NONCE = bytes(12)


class ObjectStore(Protocol):
    """Objects of one peer's folder, by name (OBJECT_NAME). All methods raise PoolError when the
    storage fails, or does not answer in time.
    """

    def put(self, name: str, data: bytes) -> None:
        """Store an object."""

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Return objects, AT_ONCE of them at most; None for each that is not there."""

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""


@dataclass(frozen=True)
class Opener:
    """What opens an object: its name, and the key (AES-256-GCM) that sealed it alone."""

    name: str
    key: bytes = field(repr=False)


def seal(data: bytes) -> tuple[Opener, bytes]:
    """Seal data under a fresh key: return what opens the object, and the object."""
    opener = Opener(secrets.token_hex(16), AESGCM.generate_key(8 * KEY_BYTES))
    return opener, AESGCM(opener.key).encrypt(_NONCE, data, opener.name.encode())


def unseal(opener: Opener, data: bytes | None) -> bytes | None:
    """Return what is in an object; None where there is none, or it is not what was sealed."""
    if data is None:
        return None
    try:
        return AESGCM(opener.key).decrypt(_NONCE, data, opener.name.encode())
    except InvalidTag:
        return None
