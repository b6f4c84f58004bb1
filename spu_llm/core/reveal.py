"""The op that opens a value: identity in plaintext, one recorded opening between two parties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spu_llm.core.ledger import element_bits, learners, opening_bytes, openings, pack_opening
from spu_llm.core.op import Cost, Functionality, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Bool,
    Owner,
    Private,
    Public,
    Value,
    as_words,
    low_bits,
)


def _reference(x: Any, *, to: Owner, label: str) -> Any:
    return x


def _two_party(party: Party, x: Value, *, to: Owner, label: str) -> Public | Private:
    """Open x to `to`.

    1. The party that does not learn x (both, when `to` is PUBLIC) sends its share.
    2. A learner adds (xors) its own share.
    """
    return party.open(x, to, label)


def _owners(x: Owner, *, to: Owner, label: str) -> Sequence[Owner]:
    if to is Owner.JOINT:
        raise ValueError("a value is revealed to CLIENT, PROVIDER or PUBLIC (both)")
    return [to]


def _cost(x: Value, *, to: Owner, label: str) -> Cost:
    size, learn = opening_bytes(math.prod(x.shape), element_bits(x)), learners(x, to)
    return Cost(
        messages=len(learn),
        rounds=min(len(learn), 1),
        client_to_provider=size if PROVIDER in learn else 0,
        provider_to_client=size if CLIENT in learn else 0,
    )


def _simulate(
    rank: int,
    prg: Prg,
    common: Prg,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    **static: Any,
) -> View:
    """Make the view of an opening: a learner's missing share is the opened word minus its own
    share; a private value arrives as it is; others see nothing.

    The opened *ring words* are part of the declared output, so the caller passes an output whose
    value carries them (the contract test opens integers, where words and values are the same).
    """
    x, (opened,) = inputs[0], outputs
    value = opened.value if isinstance(opened, Public | Private) else None
    if value is None or isinstance(x, Public) or (isinstance(x, Private) and x.owner == rank):
        return View([], [])
    words = as_words(np.asarray(value))
    if isinstance(x, Arith):
        words = low_bits(words - x.words, x.bits)
    elif isinstance(x, Bool):
        words = low_bits(words ^ x.words, x.bits)
    return View([], [np.frombuffer(pack_opening(words, element_bits(x)), np.uint8)])


reveal = protocol_op(
    "reveal",
    reference=_reference,
    two_party=_two_party,
    owners=_owners,
    cost=_cost,
    functionality=Functionality(client="the value, when `to` says so", provider="likewise"),
    simulate=_simulate,
    opens=openings,
)
