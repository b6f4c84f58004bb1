"""Clipping to [-K, K] on shares, so that no word whatever contributes more (InvisibleInk, algorithm
1, line 5, as its spec has it on shares: ReLU(d + K) - ReLU(d - K) - K).

With the bits low = [d + K < 0] and high = [d - K < 0], and the bit `live` of a row that its owner
alone knows (or both),

    clip d = K live + lo (-2 K) + mid (d - K),    lo = live low,  mid = live (1 - low) high:

two comparisons and two products with a bit for every number, each kind in one layer, and a gate of
three bits between them. Comparisons look at all bits of the share, mod 2^bits. Then lo, mid, or
neither is set, and where mid is, 0 <= d + K < 2 K mod 2^bits: the result is -K, d, K, or 0, within
[-K, K] for *every* word d, also where d + K or d - K wraps around (there it is -K).

That is all that differential privacy needs of d. Whatever a reference's forward made of it, its
truncations' coins, an activation that left its range, a garbled share: the term is K at most. A row
that is not live adds exact zeros, not a difference of two computed rows, so null in place of a
reference moves each sum by K at most, never by 2 K. Products must be exact for this, with no chance
of a unit more: a share has 33 bits or more (`protocols.bits.mux`). Nothing is truncated afterwards.

A row depends on its own words and bit alone: gates and products never mix rows.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.bits.compare import sign_cost, sign_words
from protocols.bits.convert import arith_cost, as_arith, known_words, public_share
from protocols.bits.gates import evaluate, gate_cost
from protocols.bits.mux import NARROW_BITS, correct_mux, mux_cost, mux_words, width_of
from protocols.bits.planes import from_planes, to_planes
from protocols.bits.polynomials import ONE, Gate, plus, times, variable
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import Arith, Private, Public, Value, low_bits

LEAST_BITS = NARROW_BITS + 1


@functools.cache
def _piece() -> Gate:
    """Return the gate of (low, high, live) that gives lo and mid."""
    low, high, live = map(variable, range(3))
    outputs = times(live, low), times(live, plus(ONE, low), high)
    return Gate("piece of clip", 0, 0, 3, outputs)


def _check(d: Value, live: Value, bound: int) -> None:
    bits = width_of(d)
    if bits < LEAST_BITS:
        raise ValueError(f"a share of {bits} bits; give {LEAST_BITS} or more, for exact products")
    if not 0 < bound < 1 << (bits - 2):
        raise ValueError(f"no bound of {bound} fits a share of {bits} bits")
    if not isinstance(live, Public | Private) or live.dtype != np.bool_:
        raise ValueError("which rows are live is a bit that somebody knows")
    if len(d.shape) != 2 or live.shape != d.shape[:1]:
        raise ValueError(f"expected rows [n, m] and bits [n], found {d.shape} and {live.shape}")


def _two_party(party: Party, d: Value, live: Value, *, bound: int) -> Arith:
    """Clip the live rows. 1. Compare d + K and d - K with zero. 2. Which piece. 3. The two
    products; K live is local.
    """
    _check(d, live, bound)
    assert isinstance(live, Public | Private)
    share = as_arith(party, d, narrow=True)
    bits, words = share.bits, share.words.reshape(-1)
    count, k = words.size, public_share(party, bound)
    known = np.broadcast_to(known_words(party, live)[:, None], share.shape).reshape(-1)
    if not count:
        return share
    # 1.
    signs = sign_words(party, np.stack([words + k, words - k]), bits)
    # 2.
    inputs = np.stack([to_planes(b, 1)[0] for b in (*signs, known)])[None]
    pieces = [from_planes(p[None], count) for p in evaluate(party, _piece(), count, 1, inputs)[0]]
    # 3.
    factors = np.concatenate([np.zeros(count, np.uint64) - k - k, words - k])
    lo, mid = mux_words(party, np.concatenate(pieces), factors, bits).reshape(2, count)
    clipped = low_bits(lo + mid + known * np.uint64(bound), bits)
    return Arith(clipped.reshape(share.shape), share.dtype, share.frac_bits, bits)


def _cost(d: Value, live: Value, *, bound: int) -> Cost:
    count, bits = math.prod(d.shape), width_of(d)
    if not count:
        return arith_cost(d)
    own = sign_cost(2 * count, bits) + gate_cost(_piece(), count, 1) + mux_cost(2 * count, bits)
    return arith_cost(d) + own


def _correct(d: Value, live: Value, *, bound: int) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        if made.words.size:
            difference = low_bits(wanted.words - made.words, made.bits).reshape(-1)
            both = np.concatenate([np.zeros_like(difference), difference])
            correct_mux(party, both, bits=made.bits)

    return correct


def _reference(d: Any, live: Any, *, bound: int) -> Any:
    xp = np if isinstance(d, np.ndarray) else jnp
    return xp.where(live[:, None], xp.clip(d, -bound, bound), 0).astype(d.dtype)


clip = protocol_op(
    "clip",
    reference=_reference,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)
"""Rows d [n, m] of integers clipped to [-bound, bound] where `live` (bool [n], known to both or to
one party) is set; zeros elsewhere. A share of 33 bits or more, which stays as wide."""
