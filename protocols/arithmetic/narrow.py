"""Narrow shares: the top bits of words, and the way back; integers as units of floats.

narrow  Shares mod 2^64 of a word x, each shifted right by `drop` bits by its holder, add up to
            floor(x / 2^drop) - c    mod 2^(64 - drop),
        where c is 1 if the dropped bits of both shares add up to 2^drop or more, else 0. Any fewer
        `bits` of that are a share, too. A comparison of narrow words costs less, and a c that only
        moves the place where one piece of a function gives way to the next does no harm: both
        pieces must hold over that one unit. c depends on how x is shared, not on x alone:
        whoever learned the narrow word would learn a little of where the low bits of its own share
        put x, as after a truncation (`protocols.arithmetic.truncate`). While it stays shared,
        nobody does.
widen   A share of x mod 2^bits becomes one mod 2^64, where |x| < 2^(bits-2). With 2^(bits-2) added
        x is not negative and below 2^(bits-1), so the shares wrap around unless both have a zero
        for their top bit: one prepared bit, as in `protocols.arithmetic.truncate`.
units   The words of an integer as those of a float: k stands for k 2^-18. `in_units`: the way back,
        mod 2^bits.

`narrow`, `units` and `in_units` send nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from protocols.arithmetic.truncate import refresh, share_of, truncate_cost
from protocols.bits.convert import arith_cost, as_arith, correct_wrap, public_share, wrap_of
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.simulated import Correct, SimulatedParty, nothing_to_correct, uniform_messages
from spu_llm.core.values import Arith, Value, low_bits, sign_extended

MAX_BITS = 32  # what int32 holds
FRAC_BITS = SpuConfig().frac_bits


# ---- narrow


def _check(drop: int, bits: int, available: int) -> None:
    if drop < 0 or not 1 <= bits <= min(MAX_BITS, available - drop):
        raise ValueError(
            f"{bits} bits above {drop} of a share of {available}; "
            f"give 1 to {min(MAX_BITS, available - drop)}"
        )


def _narrow_reference(x: Any, *, drop: int, bits: int) -> Any:
    """Return narrow words without the carry c, which `model` has."""
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
    share = as_arith(party, x, narrow=True)
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


def _narrow_shapes(x: jax.ShapeDtypeStruct, *, drop: int, bits: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, np.int32)]


narrow = protocol_op(
    "narrow",
    reference=_narrow_reference,
    shapes=_narrow_shapes,
    two_party=_narrow_two_party,
    cost=lambda x, drop, bits: arith_cost(x),
    simulate=uniform_messages(_narrow_two_party, nothing_to_correct),
    model=_narrow_model,
    non_interactive=True,
)
"""floor(x 2^18 / 2^drop) of a float x, or one less, as int32 reduced to `bits` signed bits (at most
32, and 64 - drop): a share mod 2^bits. An integer x is floor(x / 2^drop) or one less."""


# ---- widen


def _widen_two_party(party: Party, x: Value) -> Arith:
    """Make a narrow share one mod 2^64. 1. Add 2^(bits-2), to a share that is uniform. 2. Take the
    wrap out, and what was added.
    """
    if not isinstance(x, Arith) or not 2 < x.bits < 64:
        raise ValueError("only a narrow share of 3 to 63 bits can be widened")
    if not x.words.size:
        return Arith(x.words, x.dtype, x.frac_bits)
    # 1.
    offset = public_share(party, 1 << (x.bits - 2))
    words = low_bits(refresh(party, x.words) + offset, x.bits)
    # 2.
    wrapped = wrap_of(party, words, x.bits, x.bits)
    return Arith(words - wrapped - offset, x.dtype, x.frac_bits)


def _widen_cost(x: Value) -> Cost:
    count = math.prod(x.shape)
    return truncate_cost(count) if count else Cost()


def _widen_correct(x: Value) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        # What depends on the share alone agrees; the rest is a multiple of 2^(bits-1).
        assert isinstance(x, Arith)
        difference = (wanted.words - made.words).reshape(-1)
        assert not low_bits(difference, x.bits - 1).any()
        correct_wrap(party, difference, x.bits)

    return correct


widen = protocol_op(
    "widen",
    reference=lambda x: x,
    two_party=_widen_two_party,
    cost=_widen_cost,
    simulate=uniform_messages(_widen_two_party, _widen_correct),
)
"""A narrow share mod 2^bits of x, |x| < 2^(bits-2), as a share mod 2^64: one message each way, one
bit per value."""


# ---- units


def _units_reference(x: Any) -> Any:
    return x.astype(np.float32) * np.float32(2.0**-FRAC_BITS)


def _units_two_party(party: Party, x: Value) -> Arith:
    share = as_arith(party, x, narrow=True)
    return Arith(share.words, np.dtype(np.float32), party.frac_bits, share.bits)


def _units_model(inputs: Sequence[Sequence[Value]], common: Prg) -> Sequence[np.ndarray]:
    x_0, x_1 = (share_of(values[0]) for values in inputs)
    return [x_0 + x_1]


units = protocol_op(
    "units",
    reference=_units_reference,
    two_party=_units_two_party,
    cost=arith_cost,
    simulate=uniform_messages(_units_two_party, nothing_to_correct),
    model=_units_model,
    non_interactive=True,
)
"""An integer k as the float k 2^-18: the same words. A narrow share stays narrow."""


def _in_units_reference(x: Any, *, bits: int) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(np.int32)
    xp = jnp if not isinstance(x, np.ndarray) else np
    return xp.round(x * np.float32(2.0**FRAC_BITS)).astype(np.int32)


def _in_units_two_party(party: Party, x: Value, *, bits: int) -> Arith:
    share = as_arith(party, x, narrow=True)
    if not 1 <= bits <= share.bits:
        raise ValueError(f"{bits} bits of a share of {share.bits}; give 1 to that")
    return Arith(low_bits(share.words, bits), np.dtype(np.int32), 0, bits)


def _in_units_model(
    inputs: Sequence[Sequence[Value]], common: Prg, *, bits: int
) -> Sequence[np.ndarray]:
    x_0, x_1 = (share_of(values[0]) for values in inputs)
    return [sign_extended(x_0 + x_1, bits)]


in_units = protocol_op(
    "in_units",
    reference=_in_units_reference,
    two_party=_in_units_two_party,
    cost=lambda x, bits: arith_cost(x),
    simulate=uniform_messages(_in_units_two_party, nothing_to_correct),
    model=_in_units_model,
    non_interactive=True,
)
"""A float x as the integer x 2^18, |x| < 2^13, or an int32 as it is: the low `bits` bits of its
words."""
