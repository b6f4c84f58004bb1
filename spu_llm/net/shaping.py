"""Emulated networks: when a byte sent now would arrive at the other end."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_MBPS, MOST_MS = 100_000, 10_000
_NAME = re.compile(r"([1-9][0-9]{0,5})mbps-(0|[1-9][0-9]{0,4})ms")


@dataclass(frozen=True)
class NetworkShape:
    """One direction of a link: its rate in bits per second (None: unlimited), its delay in s."""

    name: str
    bits_per_s: float | None
    delay_s: float

    @property
    def direct(self) -> bool:
        """Return whether bytes may go out as they come."""
        return self.bits_per_s is None and self.delay_s == 0.0


NETWORKS = {
    shape.name: shape
    for shape in (
        NetworkShape("local", None, 0.0),
        NetworkShape("lan", 1e9, 0.010),
        NetworkShape("wan", 400e6, 0.040),
    )
}


def name_of(mbps: int, delay_ms: int) -> str:
    """Return the name of a network of so many Mbps, and ms one way, which `shape_of` knows.
    ValueError for what is not emulated.
    """
    if not (1 <= mbps <= MOST_MBPS and 0 <= delay_ms <= MOST_MS):
        raise ValueError(
            f"a network has 1 to {MOST_MBPS} Mbps and a delay of 0 to {MOST_MS} ms, found {mbps} "
            f"and {delay_ms}"
        )
    return f"{mbps}mbps-{delay_ms}ms"


def shape_of(name: str) -> NetworkShape:
    """Return the network of this name: one of `NETWORKS`, or what `name_of` names. ValueError when
    there is none.
    """
    if name in NETWORKS:
        return NETWORKS[name]
    if (parts := _NAME.fullmatch(name)) is None:
        known = ", ".join(NETWORKS)
        raise ValueError(f"unknown network {name!r}; choose from {known}, or as 3000mbps-1ms")
    mbps, delay_ms = map(int, parts.groups())
    return NetworkShape(name_of(mbps, delay_ms), mbps * 1e6, delay_ms / 1000)


class Shaper:
    """The clock of one direction of a link, shared by all that is sent on it. Not locked."""

    def __init__(self, shape: NetworkShape) -> None:
        self._s_per_byte = 0.0 if shape.bits_per_s is None else 8.0 / shape.bits_per_s
        self._delay_s = shape.delay_s
        self._free = 0.0

    def due(self, nbytes: int, now: float) -> float:
        """Take the link for `nbytes` behind all before them; return when the last one arrives."""
        self._free = max(self._free, now) + nbytes * self._s_per_byte
        return self._free + self._delay_s

    def express(self, nbytes: int, now: float) -> float:
        """Take the link for `nbytes` ahead of what waits, which moves back; return when the last
        one arrives.
        """
        cost_s = nbytes * self._s_per_byte
        self._free = max(self._free, now) + cost_s
        return now + cost_s + self._delay_s
