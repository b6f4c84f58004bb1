"""Who may stay when there are more than there are places: no group keeps others out."""

from __future__ import annotations

import ipaddress
import threading
from typing import Generic, TypeVar

T = TypeVar("T")

_NETWORK = 64  # bits of an IPv6 address that one network has, with all addresses below it


class Crowd(Generic[T]):
    """So many at a time, each of a group. When all places are taken, whoever comes gets that of the
    first of the group that holds most. Any thread may call it.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._groups: dict[str, dict[T, None]] = {}  # in the order in which they came
        self._group_of: dict[T, str] = {}

    def enter(self, one: T, group: str) -> T | None:
        """Take a place; return whoever has lost it by that."""
        with self._lock:
            gone = None
            if len(self._group_of) >= self._places:
                most = max(self._groups, key=lambda name: len(self._groups[name]))
                gone = next(iter(self._groups[most]))
                self._remove(gone)
            self._groups.setdefault(group, {})[one] = None
            self._group_of[one] = group
        return gone

    def leave(self, one: T) -> bool:
        """Give a place back; return whether it was still held."""
        with self._lock:
            held = one in self._group_of
            if held:
                self._remove(one)
        return held

    def __len__(self) -> int:
        return len(self._group_of)

    def all(self) -> list[T]:
        """Return who is there."""
        with self._lock:
            return list(self._group_of)

    def _remove(self, one: T) -> None:
        group = self._group_of.pop(one)
        del self._groups[group][one]
        if not self._groups[group]:
            del self._groups[group]


def origin_of(address: str) -> str:
    """Return what counts as one origin of connections: an IPv4 address, or the /64 network of an
    IPv6 address, in which one host has as many addresses as it likes.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address  # of a connection that has gone
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed), _NETWORK), strict=False))
