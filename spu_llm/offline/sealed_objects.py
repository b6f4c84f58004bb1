"""Results of batches as objects in storage that nobody has to trust.

An object is sealed under a key of its own, which stays in the pool. What the storage keeps too
long, gives twice or shows to others is of no use to anybody without that key; what it loses or
changes is a batch less, never another one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

OBJECT_NAME = re.compile(r"[0-9a-f]{32}")
MAX_OBJECT_BYTES = 64 << 20
KEY_BYTES = 32
AT_ONCE = 16  # objects that are fetched beside one another, of MAX_OBJECT_BYTES in all
# A key seals one object, so that one nonce serves them all.
_NONCE = bytes(12)


class ObjectStore(Protocol):
    """Objects of one peer's folder, by name (OBJECT_NAME). All methods raise PoolError when the
    storage fails, or does not answer in time.
    """

    def put(self, name: str, data: bytes) -> None:
        """Store an object."""

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """Return objects by their names and sizes, AT_ONCE of them at most; None for each that is
        not there, and other bytes for one of another size.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, AT_ONCE of them at most, if they are there."""


@dataclass(frozen=True)
class Opener:
    """Key of an object (AES-256-GCM), which sealed it alone, with the object's name and size."""

    name: str
    nbytes: int
    key: bytes = field(repr=False)


def seal(data: bytes) -> tuple[Opener, bytes]:
    """Seal data under a fresh key: return what opens the object, and the object."""
    name, key = secrets.token_hex(16), AESGCM.generate_key(8 * KEY_BYTES)
    sealed = AESGCM(key).encrypt(_NONCE, data, name.encode())
    return Opener(name, len(sealed), key), sealed


def unseal(opener: Opener, data: bytes | None) -> bytes | None:
    """Return what is in an object; None where there is none, or it is not what was sealed."""
    if data is None:
        return None
    try:
        return AESGCM(opener.key).decrypt(_NONCE, data, opener.name.encode())
    except InvalidTag:
        return None


def in_groups(openers: Iterable[Opener]) -> Iterator[list[Opener]]:
    """Yield what is fetched at once: AT_ONCE objects at most, and MAX_OBJECT_BYTES or one."""
    group: list[Opener] = []
    for opener in openers:
        size = sum(one.nbytes for one in group) + opener.nbytes
        if group and (len(group) == AT_ONCE or size > MAX_OBJECT_BYTES):
            yield group
            group = []
        group.append(opener)
    if group:
        yield group
