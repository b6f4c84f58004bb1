"""The op that opens a value: identity in plaintext, one recorded opening between two parties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spu_llm.op import Cost, Functionality, View, protocol_op
from spu_llm.party import Party
from spu_llm.prg import Prg
from spu_llm.values import CLIENT, PROVIDER, Arith, Bool, Owner, Private, Public, Value


def _reference(x: Any, *, to: Owner, label: str) -> Any:
    return x


def _two_party(party: Party, x: Value, *, to: Owner, label: str) -> Public | Private:
    """1. The party that does not learn x (both, when `to` is PUBLIC) sends its share.
    2. A learner adds (xors) its own share.
    """
    return party.open(x, to, label)


def _owners(x: Owner, *, to: Owner, label: str) -> Sequence[Owner]:
    if to is Owner.JOINT:
        raise ValueError("a value is revealed to CLIENT, PROVIDER or PUBLIC (both)")
    return [to]


def _cost(x: Value, *, to: Owner, label: str) -> Cost:
    count = int(np.prod(x.shape, dtype=int))
    one_bit = (isinstance(x, Bool) and x.bits == 1) or (
        isinstance(x, Private) and x.dtype == np.bool_
    )
    size = (count + 7) // 8 if one_bit else 8 * count
    learns = {
        CLIENT: to is not Owner.PROVIDER and not (isinstance(x, Private) and x.owner == CLIENT),
        PROVIDER: to is not Owner.CLIENT and not (isinstance(x, Private) and x.owner == PROVIDER),
    }
    return Cost(
        messages=sum(learns.values()),
        rounds=1 if any(learns.values()) else 0,
        client_to_provider=size if learns[PROVIDER] else 0,
        provider_to_client=size if learns[CLIENT] else 0,
    )


def _simulate(
    rank: int, prg: Prg, inputs: Sequence[Value], outputs: Sequence[Value], **static: Any
) -> View:
    """A learner's missing share is the opened word minus its own share; others see nothing.

    The opened *ring words* are part of the declared output, so the caller passes an output whose
    value carries them (the contract test opens integers, where words and values are the same).
    """
    x, (opened,) = inputs[0], outputs
    value = opened.value if isinstance(opened, Public | Private) else None
    if value is None or isinstance(x, Public | Private):
        return View([], [])
    words = np.asarray(value).astype(np.int64).view(np.uint64)
    if isinstance(x, Arith):
        return View([], [words - x.words])
    return View([], [words ^ x.words])


reveal = protocol_op(
    "reveal",
    reference=_reference,
    two_party=_two_party,
    owners=_owners,
    cost=_cost,
    functionality=Functionality(client="the value, when `to` says so", provider="likewise"),
    simulate=_simulate,
)
