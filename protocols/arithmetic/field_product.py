"""Products of shared words by way of the field: where they are small, at a fraction of the price.

Products modulo p are prepared many to a ciphertext (`spu_llm.offline.slots`), which products modulo
2^64 are not. So both factors cross into the field, where their product is computed as ever, and
the product crosses back, which is its truncation too (`protocols.arithmetic.field`):

1. Both factors, less `cut` bits each, become shares modulo p. One round.
2. Beaver, CRYPTO'91, modulo p: e = x - a and f = y - b are opened, and x y is
   e b + a f + a b + e f. One round, six bytes an element. A square opens e alone: (e + u + v)^2 is
   e^2 + 2 e (u + v) + u^2 + v^2 + 2 u v for a mask u of the client and v of the provider.
3. Back to shares modulo 2^64, truncated. One round.

All that is sent is masked by a fresh element or bit, so neither party learns anything: e and f are
uniform modulo p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from protocols.arithmetic.field import (
    LIMIT_BITS,
    correct_ring,
    crossing_cost,
    into_field,
    into_ring,
    opening_cost,
)
from protocols.arithmetic.product import cut_bits, meaning
from protocols.bits.convert import arith_cost, as_arith
from spu_llm.core import field
from spu_llm.core.correlation import Correlation, Correlations, Form, Part
from spu_llm.core.op import Cost, ProtocolOp, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.slots import Slots
from spu_llm.core.values import CLIENT, Arith, Owner, Value

__all__ = ["LIMIT_BITS", "field_multiply", "field_scale_rows", "field_square"]

_SLOTS_AT_ONCE = 1 << 15  # a ciphertext of each party for 8192 of half of them

_SHARED = Part((), Owner.JOINT, Form.FIELD)


def _triples(slots: Slots, units: int) -> Correlations:
    a, b, crossed = slots.crossed(units)
    return Correlations([a, b], [field.added(field.multiplied(a, b), crossed)])


def _squares(slots: Slots, units: int) -> Correlations:
    own, product = slots.products(units)
    masks = [np.zeros(units, np.uint64), np.zeros(units, np.uint64)]
    masks[slots.rank] = own
    return Correlations(masks, [field.added(product, product)])


def _twice(u: Any, v: Any) -> Any:
    product = field.multiplied(u, v)
    return field.added(product, product)


FIELD_TRIPLE = Correlation(
    name="field triple",
    masks=(_SHARED, _SHARED),
    results=(_SHARED,),
    secure=lambda a, b: [field.multiplied(a, b)],
    by_slots=_triples,
    chunk=_SLOTS_AT_ONCE,
)

FIELD_SQUARE = Correlation(
    name="field square",
    masks=(Part((), Owner.CLIENT, Form.FIELD), Part((), Owner.PROVIDER, Form.FIELD)),
    results=(_SHARED,),
    secure=lambda u, v: [_twice(u, v)],
    by_slots=_squares,
    chunk=_SLOTS_AT_ONCE,
)


def _opened(party: Party, masked: np.ndarray) -> np.ndarray:
    """Open masked elements: both shares added up, uniform, so both parties may know the sum."""
    party.send_field(masked)
    return field.added(masked, party.recv_field(masked.shape))


def _multiplied(party: Party, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compute shares of x y of shared elements of one shape (step 2)."""
    correlations = party.take(FIELD_TRIPLE, x.size)
    a, b, ab = (w.reshape(x.shape) for w in (*correlations.masks, *correlations.results))
    e, f = _opened(party, np.stack([field.subtracted(x, a), field.subtracted(y, b)]))
    product = field.added(field.multiplied(e, b), field.multiplied(a, f))
    if party.rank == CLIENT:
        product = field.added(product, field.multiplied(e, f))
    return field.added(product, ab)


def _squared(party: Party, x: np.ndarray) -> np.ndarray:
    """Compute shares of x^2 of shared elements (step 2)."""
    correlations = party.take(FIELD_SQUARE, x.size)
    a, cross = (w.reshape(x.shape) for w in (correlations.masks[party.rank], *correlations.results))
    e = _opened(party, field.subtracted(x, a))
    factor = field.added(field.added(e, e), a)
    square = field.multiplied(factor, a)
    if party.rank == CLIENT:
        square = field.added(square, field.multiplied(e, e))
    return field.added(square, cross)


def _rest(x: Value, shift: int | None, cuts: Sequence[int], frac_bits: int) -> int:
    """Return by how many bits a product is still to be truncated; less than 0, to be shifted up."""
    return cut_bits(x.dtype, shift, frac_bits) - sum(cuts)


def _field_op(
    name: str,
    reference: Callable[..., Any],
    product: Callable[..., np.ndarray],
    opened: Callable[..., int],
    cuts_of: Callable[[Sequence[int]], Sequence[int]],
    takes_narrow: bool = False,
) -> ProtocolOp:
    """Return an op whose result has the shape of its first input; cuts_of(cuts): how many bits the
    product lacks, factor by factor. takes_narrow: whether narrow shares will do.
    """

    def two_party(
        party: Party, *inputs: Value, cuts: tuple[int, ...], shift: int | None = None
    ) -> Arith:
        shares = [as_arith(party, v, narrow=takes_narrow) for v in inputs]
        first = shares[0]
        if any(share.dtype != first.dtype for share in shares):
            raise ValueError(f"factors of {name} must be of one type")
        if not first.words.size:
            return Arith(first.words, first.dtype, first.frac_bits)
        # 1.
        elements = into_field(party, list(zip(shares, cuts, strict=True)))
        # 2.
        z = product(party, *elements)
        # 3.
        rest = _rest(first, shift, cuts_of(cuts), party.frac_bits)
        words = into_ring(party, z, max(0, rest)) << np.uint64(max(0, -rest))
        return Arith(words, first.dtype, first.frac_bits)

    def cost(*inputs: Value, cuts: tuple[int, ...], shift: int | None = None) -> Cost:
        count = math.prod(inputs[0].shape)
        if not count:
            return arith_cost(*inputs)
        into = sum(math.prod(x.shape) for x in inputs)
        return arith_cost(*inputs) + crossing_cost(into, count) + opening_cost(opened(count))

    def correct(*inputs: Value, cuts: tuple[int, ...], shift: int | None = None) -> Correct:
        def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
            rest = _rest(inputs[0], shift, cuts_of(cuts), party.frac_bits)
            difference = (wanted.words - made.words) >> np.uint64(max(0, -rest))
            # The way back draws two bits and a word after the product.
            correct_ring(party, difference, max(0, rest), party.drawn[-4])

        return correct

    return protocol_op(
        name,
        reference=lambda *inputs, cuts, shift=None: meaning(reference(*inputs), shift),
        two_party=two_party,
        cost=cost,
        simulate=uniform_messages(two_party, correct),
    )


def _scaled(party: Party, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    return _multiplied(party, y, np.broadcast_to(x[:, None], y.shape))


field_multiply = _field_op(
    "field_multiply",
    lambda x, y: x * y,
    _multiplied,
    lambda count: 2 * count,
    lambda cuts: cuts,
    takes_narrow=True,
)
"""x * y of equal shapes and types, less `cuts` = (of x, of y) bits each before: |x y| is below
2^(46 + cuts) words, and each of them below 2^62, or 2^(bits-2) of a narrow share. `shift`: of the
whole product, as of `multiply`; 20 bits more than the cuts at most."""

field_square = _field_op(
    "field_square", lambda x: x * x, _squared, lambda count: count, lambda cuts: (*cuts, *cuts)
)
"""x * x, as `field_multiply` with one cut."""

field_scale_rows = _field_op(
    "field_scale_rows",
    lambda y, x: y * x[:, None],
    _scaled,
    lambda count: 2 * count,
    lambda cuts: cuts,
)
"""Row i of y [rows, d] times x_i of x [rows], as `field_multiply`."""
