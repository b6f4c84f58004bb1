"""Truncation: x -> x / 2^shift on additive shares mod 2^64.

Let x = x_0 + x_1 mod 2^64. Both parties first shift a public random word from one share to the
other (it hides nothing), so that x_0 is uniform whatever the form of the input. Then

    floor(x_0 / 2^shift) + ceil(x_1 / 2^shift)
        = floor(x / 2^shift) + [x_0 mod 2^shift < x mod 2^shift] + 2^(64-shift) wrap,

where wrap says whether x_0 + x_1 >= 2^64. Rounding one share up makes the error unbiased: the
result is floor(x / 2^shift) plus one with probability frac(x / 2^shift), exactly, so a multiple of
2^shift (and zero) stays exact. SPU rounds both shares down, which is half a unit low on average and
turns zeros into -1.

unbiased  The wrap is removed. With 2^62 added, x is not negative (|x| < 2^62 is required), so
          wrap = 1 - (1 - top_0)(1 - top_1) for the top bits of the shares: one prepared bit
          (protocols.bits.convert). One round, one bit per value each way. (Cheetah, USENIX
          Security'22, section 5.1.2, opens the way: one known top bit saves the comparison.)
local     No message; the wrap is taken for granted: always 1 for x >= 0, 0 for x < 0, which fails
          with probability at most |x| / 2^64 per value (SecureML, S&P'17, Thm. 1) and is then
          wrong by 2^(64-shift). Only for |x| < 2^(bits-1) with bits <= 24: below 2^-41 each.
exact     floor(x / 2^shift): both shares rounded down, plus the carry of the low bits, a comparison
          (protocols.bits.compare).

Who rounds how depends on the shares (unbiased, local). While the result stays shared, that is
nothing to anybody. A party that later learns the result z narrows x / 2^shift down to an interval
of width one around z, where an ideal rounding would leave width two: within the last unit, it
learns where its own share's low bits put x. Many openings of one x, truncated again each time,
would narrow it further. Where even that must stay secret, use `exact`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from protocols.bits.compare import carry_words, less_cost
from protocols.bits.convert import (
    arith_cost,
    arith_from_bool,
    as_arith,
    correct_bits,
    correct_wrap,
    public_share,
    swap_cost,
    wrap_of,
)
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Arith, Bool, Private, Value, as_words, low_bits

How = Literal["unbiased", "local", "exact"]
MAX_LOCAL_BITS = 24

_0 = np.uint64(0)
_OFFSET = 1 << 62


def refresh(party: Party, words: np.ndarray) -> np.ndarray:
    """Make the client's share uniform without a change of the value, by a word that both parties
    know; mod 2^64, and so mod any smaller power.
    """
    shift = party.common.words(words.shape)
    return words + shift if party.rank == CLIENT else words - shift


def _round_up(words: np.ndarray, shift: int) -> np.ndarray:
    low = low_bits(words, shift) != 0
    return (words >> np.uint64(shift)) + low.astype(np.uint64)


def truncate_unbiased(party: Party, x: Arith, shift: int) -> Arith:
    """Truncate x by `shift` bits, unbiased (see the module docstring); |x| < 2^62.

    1. Add 2^62. 2. Shift both shares, the provider's upwards.
    3. Take the wrap out, and what was added.
    """
    # 1.
    words = refresh(party, x.words) + public_share(party, _OFFSET)
    # 2.
    shifted = words >> np.uint64(shift) if party.rank == CLIENT else _round_up(words, shift)
    # 3.
    return Arith(_without_wrap(party, shifted, words, shift), x.dtype, x.frac_bits)


def _without_wrap(party: Party, shifted: np.ndarray, words: np.ndarray, shift: int) -> np.ndarray:
    """Return `shifted`, the shares `words` of x + 2^62 shifted each by itself, less 2^(64-shift)
    times the wrap and less what the 2^62 have become.
    """
    wrapped = wrap_of(party, words, place=64 - shift)
    return shifted - wrapped - public_share(party, _OFFSET >> shift)


def truncate_local(party: Party, x: Arith, shift: int) -> Arith:
    words = refresh(party, x.words)
    if party.rank == CLIENT:
        return Arith(words >> np.uint64(shift), x.dtype, x.frac_bits)
    return Arith(_0 - ((_0 - words) >> np.uint64(shift)), x.dtype, x.frac_bits)


def _truncate_exact(party: Party, x: Arith, shift: int) -> Arith:
    """Compute floor(x / 2^shift).

    1. Add 2^62 and shift both shares down. 2. Take the wrap out. 3. Add the low bits' carry.
    """
    # 1.
    words = refresh(party, x.words) + public_share(party, _OFFSET)
    shifted = words >> np.uint64(shift)
    # 2.
    floor = _without_wrap(party, shifted, words, shift)
    # 3.
    carry = Bool(carry_words(party, words, shift), np.dtype(bool), 0, 1)
    return Arith(floor + arith_from_bool(party, carry).words, x.dtype, x.frac_bits)


# ---- the op


def _reference(x: Any, *, shift: int, how: How, bits: int) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x * 2.0**-shift
    if how == "exact":
        return x >> shift
    return (x + (1 << shift >> 1)) >> shift


def _check(shift: int, how: How, bits: int) -> None:
    if not 0 < shift < 63:
        raise ValueError(f"a truncation by {shift} bits; give 1 to 62")
    if how == "local" and bits > MAX_LOCAL_BITS:
        raise ValueError(
            f"local truncation of {bits} bits fails too often; at most {MAX_LOCAL_BITS}, "
            "or choose 'unbiased'"
        )


def _two_party(party: Party, x: Value, *, shift: int, how: How, bits: int) -> Arith:
    _check(shift, how, bits)
    share = as_arith(party, x)
    if not share.words.size:
        return share
    run = {"unbiased": truncate_unbiased, "local": truncate_local, "exact": _truncate_exact}
    return run[how](party, share, shift)


def truncate_cost(count: int) -> Cost:
    """Return the cost of `truncate_unbiased` for `count` values."""
    return swap_cost(count)


def _cost(x: Value, *, shift: int, how: How, bits: int) -> Cost:
    count = math.prod(x.shape)
    total = arith_cost(x)
    if how != "local" and count:
        total += truncate_cost(count)
    if how == "exact" and count:
        total += less_cost(count, shift) + truncate_cost(count)  # a carry's bit costs as a wrap's
    return total


def _correct(x: Value, *, shift: int, how: How, bits: int) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        difference = (wanted.words - made.words).reshape(-1)
        if how == "unbiased" and difference.size:
            # What depends on the share alone agrees; the rest is a multiple of 2^(63-shift).
            assert not low_bits(difference, 63 - shift).any()
            correct_wrap(party, difference, 64 - shift)
        elif how == "exact" and difference.size:
            correct_bits(party, 1, made.words, wanted.words)

    return correct


def model(
    inputs: Sequence[Sequence[Value]], common: Prg, *, shift: int, how: How, bits: int
) -> Sequence[np.ndarray]:
    """Compute exact results for arithmetic shares from the value and the client's refreshed
    share.
    """
    x_0, x_1 = (share_of(values[0]) for values in inputs)
    x = (x_0 + x_1).view(np.int64)
    floor = x >> np.int64(shift)
    if how == "exact":
        return [floor]
    drawn = x_0 + common.words(x.shape)
    if how == "unbiased":
        drawn = drawn + np.uint64(_OFFSET)
    return [floor + (low_bits(drawn, shift) < low_bits(x.view(np.uint64), shift))]


def share_of(value: Value) -> np.ndarray:
    """Return this party's words of an integer that is not a boolean share."""
    if isinstance(value, Arith):
        return value.words
    assert isinstance(value, Private)
    known = value.value if value.value is not None else np.zeros(value.shape, np.int64)
    return as_words(known)


truncate = protocol_op(
    "truncate",
    reference=_reference,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
    model=model,
)
"""x / 2^shift; `how` and the bounds on x as in the module docstring (`bits` counts for "local")."""
