"""State of masks that last: units of a correlation that serve several products one after the other,
each product by rows or columns of its own.

A product makes its half busy before it sends anything, and is counted when it is through; the count
only moves forward. After a failure the half stays busy, and is refused. The state is bound to one
party's randomness. A fork, for a dry run, keeps the counts without masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spu_llm.core.correlation import Correlation
from spu_llm.core.party import Party
from spu_llm.core.values import State


@dataclass
class Half:
    """One kind of product. `used`: rows or columns so far, the last of which `unit` served. `busy`:
    from before a product sends anything until it is counted.
    """

    used: int = 0
    busy: bool = False
    unit: Any = None


class Masks(State):
    """The state that products with the same private value share: what is used of masks, and what is
    open.
    """

    def __init__(self) -> None:
        self._halves: dict[str, Half] = {}
        self._holder: bytes | None = None
        self.dry = False  # a fork, without masks

    def half(self, correlation: Correlation) -> Half:
        return self._halves.setdefault(correlation.name, Half())

    def used(self, correlation: Correlation) -> int:
        return self._halves.get(correlation.name, Half()).used

    def begin(self, party: Party, correlation: Correlation) -> Half:
        """Return the half of this party's next product, which is busy from now on. ValueError when
        the masks are another party's, or of another session, and after a product that failed.
        """
        holder = party.own.child("lasting masks").words((4,)).tobytes()
        if self._holder not in (None, holder):
            raise ValueError("a value of another session: its masks cannot be used here")
        self._holder = holder
        half = self.half(correlation)
        if half.busy:
            raise ValueError("an earlier product of this value has failed, or is not at its end")
        half.busy = True
        return half

    def fork(self) -> Masks:
        dry = Masks()
        dry.dry = True
        dry._halves = {name: Half(half.used) for name, half in self._halves.items()}
        return dry
