"""Words read anew without a message: their top bits as a narrow share, and integers as units.

narrow  Shares mod 2^64 of a word x, each shifted right by `drop` bits by its holder, add up to
            floor(x / 2^drop) - c    mod 2^(64 - drop),
        where c is 1 if the dropped bits of both shares add up to 2^drop or more, else 0. Any fewer
        `bits` of that are a share, too. A comparison of narrow words costs less, and a c that only
        moves the place where one piece of a function gives way to the next does no harm: both
        pieces must hold over that one unit. c depends on how x is shared, not on x alone.
units   The words of an integer as those of a float: k stands for k 2^-18.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.convert import arith_cost, as_arith
from protocols.simulated import uniform_messages
from protocols.truncate import share_of
from spu_llm.op import Functionality, protocol_op
from spu_llm.party import Party
from spu_llm.prg import Prg
from spu_llm.settings import SpuConfig
from spu_llm.values import Arith, Owner, Value, low_bits, sign_extended

MAX_BITS = 32  # what int32 holds
FRAC_BITS = SpuConfig().frac_bits


def _nothing_to_correct(*inputs: Value, **static: Any) -> Any:
    """A simulator's share follows from the party's input."""

    def correct(*_: Any) -> None:
        raise AssertionError

    return correct


# ---- narrow


def _check(drop: int, bits: int, available: int) -> None:
    if drop < 0 or not 1 <= bits <= min(MAX_BITS, available - drop):
        raise ValueError(
            f"{bits} bits above {drop} of a share of {available}; "
            f"give 1 to {min(MAX_BITS, available - drop)}"
        )


def _narrow_reference(x: Any, *, drop: int, bits: int) -> Any:
    """Without c; `model` has it."""
    xp = jnp if not isinstance(x, np.ndarray) else np
    if jnp.issubdtype(x.dtype, jnp.floating):
        # A multiple of 2^bits changes nothing, and int32 need not hold the whole.
        top = xp.floor(x * 2.0 ** (FRAC_BITS - drop))
        top = top - xp.floor(top * 2.0**-bits + 0.5) * 2.0**bits
        return top.astype(xp.int32)
    top = x >> drop
    half = 1 << (bits - 1)
    return (((top + half) & ((1 << bits) - 1)) - half).astype(xp.int32)


def _narrow_two_party(party: Party, x: Value, *, drop: int, bits: int) -> Arith:
    share = x if isinstance(x, Arith) else as_arith(party, x)
    _check(drop, bits, share.bits)
    words = low_bits(share.words, share.bits) >> np.uint64(drop)
    return Arith(low_bits(words, bits), np.dtype(np.int32), 0, bits)


def _narrow_model(
    inputs: Sequence[Sequence[Value]], common: Prg, *, drop: int, bits: int
) -> Sequence[np.ndarray]:
    x_0, x_1 = (share_of(values[0]) for values in inputs)
    floor = (x_0 + x_1) >> np.uint64(drop)
    carry = (low_bits(x_0, drop) + low_bits(x_1, drop)) >> np.uint64(drop)
    return [sign_extended(floor - carry, bits)]


narrow = protocol_op(
    "narrow",
    reference=_narrow_reference,
    two_party=_narrow_two_party,
    owners=lambda x, drop, bits: [Owner.JOINT],
    cost=lambda x, drop, bits: arith_cost(x),
    functionality=Functionality(),
    simulate=uniform_messages(_narrow_two_party, _nothing_to_correct),
    model=_narrow_model,
)
"""floor(x 2^18 / 2^drop) of a float x, or one less, as int32 reduced to `bits` signed bits (at most
32, and 64 - drop): a share mod 2^bits. An integer x is floor(x / 2^drop) or one less."""


# ---- units


def _units_reference(x: Any) -> Any:
    return x.astype(np.float32) * np.float32(2.0**-FRAC_BITS)


def _units_two_party(party: Party, x: Value) -> Arith:
    share = x if isinstance(x, Arith) else as_arith(party, x)
    return Arith(share.words, np.dtype(np.float32), party.frac_bits, share.bits)


def _units_model(inputs: Sequence[Sequence[Value]], common: Prg) -> Sequence[np.ndarray]:
    x_0, x_1 = (share_of(values[0]) for values in inputs)
    return [x_0 + x_1]


units = protocol_op(
    "units",
    reference=_units_reference,
    two_party=_units_two_party,
    owners=lambda x: [Owner.JOINT],
    cost=arith_cost,
    functionality=Functionality(),
    simulate=uniform_messages(_units_two_party, _nothing_to_correct),
    model=_units_model,
)
"""An integer k as the float k 2^-18: the same words. A narrow share stays narrow."""
