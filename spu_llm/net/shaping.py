"""Emulated networks: when a byte sent now would arrive at the other end."""

from __future__ import annotations

from dataclasses import dataclass


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
