"""Randomness that neither party controls or knows, from secrets of both.

Each party brings uniform words of its own; their exclusive-or (or sum) is uniform as long as one of
the two is. Semi-honest parties bring what their streams give. Nothing is sent for bits and words: a
party's secret *is* its share. A fraction needs its bits in arithmetic form
(protocols.bits.convert).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from protocols.bits.convert import arith_from_bool, correct_bits, swap_cost
from spu_llm.core.op import Cost, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Bool,
    Owner,
    Private,
    Value,
    as_words,
    low_bits,
)

_WHOSE = "joint randomness takes a secret of the client and one of the provider"


def _own_words(party: Party, client: Value, provider: Value) -> np.ndarray:
    for value, owner in ((client, CLIENT), (provider, PROVIDER)):
        if not isinstance(value, Private) or value.owner != owner:
            raise ValueError(_WHOSE)
    own = (client, provider)[party.rank]
    assert isinstance(own, Private) and own.value is not None
    return as_words(np.asarray(own.value))


def _owners(client: Owner, provider: Owner, **static: Any) -> list[Owner]:
    if (client, provider) != (Owner.CLIENT, Owner.PROVIDER):
        raise ValueError(_WHOSE)
    return [Owner.JOINT]


def _nothing_seen(*args: Any, **static: Any) -> View:
    return View([], [])


def _bits_reference(client: Any, provider: Any, *, bits: int = 64) -> Any:
    word = client ^ provider
    return word if bits >= 8 * word.dtype.itemsize else word & word.dtype.type((1 << bits) - 1)


def _bits_two_party(party: Party, client: Value, provider: Value, *, bits: int = 64) -> Bool:
    bits = 1 if client.dtype == np.bool_ else bits
    words = low_bits(_own_words(party, client, provider), bits)
    return Bool(words, client.dtype, 0, bits)


joint_bits = protocol_op(
    "joint_bits",
    reference=_bits_reference,
    two_party=_bits_two_party,
    owners=_owners,
    cost=lambda client, provider, bits=64: Cost(),
    simulate=_nothing_seen,
)
"""The low `bits` bits of client ^ provider, of bits or integers: a boolean share; no message."""


def _words_two_party(party: Party, client: Value, provider: Value) -> Arith:
    return Arith(_own_words(party, client, provider), client.dtype, 0)


joint_words = protocol_op(
    "joint_words",
    reference=lambda client, provider: client + provider,
    two_party=_words_two_party,
    owners=_owners,
    cost=lambda client, provider: Cost(),
    simulate=_nothing_seen,
)
"""client + provider mod 2^64, of integers: a uniform ring value; no message."""


def _fraction_reference(client: Any, provider: Any, *, bits: int) -> Any:
    return ((client ^ provider) & ((1 << bits) - 1)).astype(np.float32) / 2.0**bits


def _fraction_two_party(party: Party, client: Value, provider: Value, *, bits: int) -> Arith:
    """Share a joint fraction. 1. The exclusive-or's low bits, as they are. 2. Their arithmetic
    form.
    """
    if not 1 <= bits <= party.frac_bits:
        raise ValueError(f"a fraction of {bits} bits; the ring has {party.frac_bits}")
    # 1.
    words = low_bits(_own_words(party, client, provider), bits)
    shared = Bool(words, np.dtype(np.int64), 0, bits)
    # 2.
    integer = arith_from_bool(party, shared)
    scale = np.uint64(party.frac_bits - bits)
    return Arith(integer.words << scale, np.dtype(np.float32), party.frac_bits)


def _fraction_correct(client: Value, provider: Value, *, bits: int) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        scale = np.uint64(party.frac_bits - bits)
        correct_bits(party, bits, made.words >> scale, wanted.words >> scale)

    return correct


joint_fraction = protocol_op(
    "joint_fraction",
    reference=_fraction_reference,
    two_party=_fraction_two_party,
    owners=_owners,
    cost=lambda client, provider, bits: swap_cost(math.prod(client.shape) * bits),
    simulate=uniform_messages(_fraction_two_party, _fraction_correct),
)
"""The low `bits` bits of client ^ provider as a fraction in [0, 1): float32, a multiple of
2^-bits."""
