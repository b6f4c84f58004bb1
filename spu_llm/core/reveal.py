"""The op that opens a value: identity in plaintext, one recorded opening between two parties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spu_llm.core.ledger import Opening, opening_bytes
from spu_llm.core.op import Cost, Functionality, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    ROLES,
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
    """1. The party that does not learn x (both, when `to` is PUBLIC) sends its share.
    2. A learner adds (xors) its own share.
    """
    return party.open(x, to, label)


def _owners(x: Owner, *, to: Owner, label: str) -> Sequence[Owner]:
    if to is Owner.JOINT:
        raise ValueError("a value is revealed to CLIENT, PROVIDER or PUBLIC (both)")
    return [to]


def _learns(x: Value, to: Owner) -> list[int]:
    """Ranks that `x` is new to."""
    knows = x.owner if isinstance(x, Private) else None
    to_ranks = [CLIENT, PROVIDER] if to is Owner.PUBLIC else [to.rank]
    return [rank for rank in to_ranks if rank != knows]


def _bits(x: Value) -> int:
    """Bits an element opens: a share's own width, one for a private bit, else a word."""
    if isinstance(x, Arith | Bool):
        return x.bits
    return 1 if isinstance(x, Private) and x.dtype == np.bool_ else 64


def _cost(x: Value, *, to: Owner, label: str) -> Cost:
    count, learns = int(np.prod(x.shape, dtype=int)), _learns(x, to)
    size = opening_bytes(count, _bits(x))
    return Cost(
        messages=len(learns),
        rounds=min(len(learns), 1),
        client_to_provider=size if PROVIDER in learns else 0,
        provider_to_client=size if CLIENT in learns else 0,
    )


def _opens(x: Value, *, to: Owner, label: str) -> Sequence[Opening]:
    count = int(np.prod(x.shape, dtype=int))
    return [Opening(ROLES[rank], label, count, _bits(x)) for rank in _learns(x, to)]


def _simulate(
    rank: int,
    prg: Prg,
    common: Prg,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    **static: Any,
) -> View:
    """A learner's missing share is the opened word minus its own share; a private value arrives as
    it is; others see nothing.

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
    if _bits(x) == 1:
        return View([], [np.packbits(words.astype(np.uint8).ravel(), bitorder="little")])
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 8)[:, : (_bits(x) + 7) // 8]
    return View([], [raw.reshape(-1)])


reveal = protocol_op(
    "reveal",
    reference=_reference,
    two_party=_two_party,
    owners=_owners,
    cost=_cost,
    functionality=Functionality(client="the value, when `to` says so", provider="likewise"),
    simulate=_simulate,
    opens=_opens,
)
