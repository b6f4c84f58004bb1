"""Private values whose masks last: units of a correlation serve several products with such a value
one after the other, each product by rows or columns of its own.

A product makes its half busy before it sends anything, and is counted when it is through; the count
only moves forward. After a failure the half stays busy, and is refused. The state is bound to one
party's randomness. A fork, for a dry run, keeps the counts without masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spu_llm.core.correlation import Correlation
from spu_llm.core.op import Cost, ProtocolOp, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.values import ROLES, Owner, Private, State, Stateful, Value


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


@dataclass(frozen=True, eq=False)
class Lasting(Private, Stateful):
    """A private value, and the masks of products with it."""

    masks: Masks = field(default_factory=Masks, repr=False)

    @property
    def state(self) -> Masks:
        return self.masks

    def fork(self, state: State) -> Lasting:
        assert isinstance(state, Masks)
        value = None if self.value is None else np.zeros(self.shape, self.dtype)
        return Lasting(self.owner, self.shape, self.dtype, value, state)

    def plain(self) -> Private:
        return Private(self.owner, self.shape, self.dtype, self.value)


def lasting(value: Value, owner: Owner, what: str) -> Lasting:
    """Return the value with masks, its own if it has some; raise ValueError unless it is private to
    `owner`. `what`: its elements, in words.
    """
    if not isinstance(value, Private) or value.owner != owner.rank:
        role = ROLES[owner.rank]
        raise ValueError(f"only {what} that are private to the {role} are known ones")
    if isinstance(value, Lasting):
        return value
    return Lasting(value.owner, value.shape, value.dtype, value.value)


def lasting_op(name: str, owner: Owner, what: str) -> ProtocolOp:
    """Return the op that gives its one input, which is private to `owner`, unchanged, with masks:
    what products with it open serves later ones. Nothing is sent.
    """
    return protocol_op(
        name,
        reference=lambda value: value,
        two_party=lambda party, value: lasting(value, owner, what),
        cost=lambda value: Cost(),
        owners=lambda value: [owner],
        simulate=lambda *views, **static: View([], []),
        non_interactive=True,
        of_forward=True,
    )
