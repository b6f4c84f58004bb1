"""Products of shared matrices with factors that the client knows, which serve many products.

x = x_0 + x_1 [k, m] is shared, y [n, k] is the client's, and so is x_0: of y x = y x_0 + y x_1 only
the second term needs the other party. y stays the same from product to product, so it is opened
once, and one unit serves `uses` products, with m columns of it each:

    known factors    a [n, k] the client's, b [k, uses m] the provider's; result a b [n, uses m]

known_factors   Factors of the client's with what products with them keep from call to call. Nothing
                is sent.
times_factors   y x, for a batch of both.
                  1. For fresh units the client sends e = y - a, which the provider keeps. The
                     provider sends f = x_1 - b, with the next m columns of b. Nothing that depends
                     on x_0 is sent.
                  2. y x_1 = y f + e b + a b: the client has the first term, as it has y x_0, the
                     provider the second one, and the third is shared.

Rotary positions are such factors, the same in every block of a model: columns [2, 1] of a cosine
and a sine. Units made for all blocks fill ciphertexts; a block's own columns would leave almost all
of one empty.

Security. The provider sees e, under an `a` that is uniform, the client's alone, and hides one
content, y; a later unit hides it again under an `a` of its own, so the copies are uniform given
each other. The client sees f, under columns of b that are uniform, the provider's alone, and used
for one product: columns are counted, and the count only moves forward. Every entry of a result
takes one entry of a b that is used once, so its shares are as fresh as the prepared ones. Which
units are taken, and when, follows from the sizes of the products, which are public.

Prepared products are off by some 2^11 of 2^36 (`offline.packed.products`): words are fixed-point,
and 18 bits are truncated before anything is opened.

The masks are bound to one party's randomness (`lasting`): factors of another session are refused. A
fork, for a dry run, keeps the count without masks and factors: it sends zeros and computes zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocols.arithmetic.lasting import Lasting, lasting, lasting_op
from protocols.arithmetic.product import correct_product, meaning, rescaled, rescaled_cost, shared
from protocols.bits.convert import arith_cost, as_arith, known_words
from spu_llm.core.correlation import Correlation, Form, Part
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, uniform_messages
from spu_llm.core.values import CLIENT, Arith, Owner, Value, frac_bits_of

NAME = "known factors"
_CHUNK = 32  # units made at once: one row of rotary positions has some tens
_WORDS = 1 << 18  # of masks and products made at once, but for a unit that is larger


@functools.cache
def factor_products(n: int, k: int, columns: int) -> Correlation:
    return Correlation(
        name=f"{NAME} {n} {k} {columns}",
        masks=(
            Part((n, k), Owner.CLIENT, Form.PRIVATE),
            Part((k, columns), Owner.PROVIDER, Form.PRIVATE),
        ),
        results=(shared(n, columns),),
        secure=lambda a, b: [a @ b],
        matrices=lambda a, b: (a, b),
        chunk=max(1, min(_CHUNK, _WORDS // ((n + k) * columns))),
    )


# ---- the value


@dataclass
class _Unit:
    """The units in use, a batch, at one party. `factors` [batch, n, k]: the client's a; the
    provider's e, which is what is open. `columns` [batch, k, uses m]: the provider's b.
    """

    factors: np.ndarray
    columns: np.ndarray
    product: np.ndarray


known_factors = lasting_op("known_factors", Owner.CLIENT, "factors")
"""The client's `factors` [..., n, k], unchanged; what products with them open serves later ones."""


# ---- products


def _sizes(x: Value, y: Value, uses: int) -> tuple[int, int, int, int]:
    """Return the size of the batch, n, k and m. ValueError for shapes that do not fit."""
    if min(len(x.shape), len(y.shape)) < 2 or (*y.shape[:-2], y.shape[-1]) != x.shape[:-1]:
        raise ValueError(f"factors {y.shape} do not fit {x.shape}")
    if uses < 1:
        raise ValueError(f"factors serve one product or more, not {uses}")
    n, k = y.shape[-2:]
    return math.prod(x.shape[:-2]), n, k, x.shape[-1]


def _is_empty(x: Value, y: Value) -> bool:
    return not math.prod((*x.shape, *y.shape))


def _times_factors(
    party: Party, x: Value, y: Value, *, uses: int, shift: int | None = None
) -> Arith:
    batch, n, k, m = _sizes(x, y, uses)
    known, share = lasting(y, Owner.CLIENT, "factors"), as_arith(party, x)
    words = np.zeros((batch, n, m), np.uint64)
    if not _is_empty(x, y):
        correlation = factor_products(n, k, uses * m)
        half = known.masks.begin(party, correlation)
        columns = _next(half.used, m, uses * m)
        if not columns.start:
            taken = party.take(correlation, batch)
            half.unit = _Unit(*taken.masks, *taken.results)
        mine = share.words.reshape(batch, k, m)
        if known.masks.dry:
            _exchange(party, mine, n, fresh=not columns.start)
        else:
            words += _multiply(party, mine, known, half.unit, columns)
        half.used = columns.stop
        half.busy = False
    return rescaled(party, words.reshape(*x.shape[:-2], n, m), share, shift)


def _next(used: int, m: int, columns: int) -> slice:
    """Return the m columns of a product, of units of which `used` columns are used; the first ones
    of fresh units where no m are left.
    """
    start = used if used + m <= columns else 0
    return slice(start, start + m)


def _multiply(
    party: Party, x: np.ndarray, known: Lasting, unit: _Unit, columns: slice
) -> np.ndarray:
    """Return this party's share [batch, n, m] of y x, by these columns of the units."""
    fresh, product = not columns.start, unit.product[:, :, columns]
    if party.rank == CLIENT:
        y = known_words(party, known, frac_bits_of(known.dtype, party.frac_bits))
        y = y.reshape(unit.factors.shape)
        # 1.
        if fresh:
            party.send(y - unit.factors)
        f = party.recv(x.shape)
        # 2.
        return y @ (x + f) + product
    b = unit.columns[:, :, columns]
    # 1.
    party.send(x - b)
    if fresh:
        unit.factors = party.recv(unit.factors.shape)
    # 2.
    return unit.factors @ b + product


def _exchange(party: Party, x: np.ndarray, n: int, *, fresh: bool) -> None:
    """Send zeros in place of what a product sends, and forget what comes."""
    e, f = (len(x), n, x.shape[1]), x.shape
    if party.rank == CLIENT:
        if fresh:
            party.send(np.zeros(e, np.uint64))
        party.recv(f)
        return
    party.send(np.zeros(f, np.uint64))
    if fresh:
        party.recv(e)


def _cost(x: Value, y: Value, *, uses: int, shift: int | None = None) -> Cost:
    """Return the cost of the next call, which depends on what is open now."""
    batch, n, k, m = _sizes(x, y, uses)
    total = arith_cost(x) + rescaled_cost(x, (batch, n, m), shift)
    if _is_empty(x, y):
        return total
    used = y.masks.used(factor_products(n, k, uses * m)) if isinstance(y, Lasting) else 0
    fresh = not _next(used, m, uses * m).start
    return total + Cost(1 + fresh, 1, 8 * batch * n * k * fresh, 8 * batch * k * m)


def _correct(x: Value, y: Value, *, uses: int, shift: int | None = None) -> Correct:
    """Return the function that brings a simulated result of a first call to the wanted one."""
    batch, n, _, m = _sizes(x, y, uses)

    def enter(drawn: Sequence[np.ndarray], difference: np.ndarray) -> None:
        drawn[-1][:, :, :m] += difference.reshape(batch, n, m)

    return correct_product(x, shift, enter)


times_factors = protocol_op(
    "times_factors",
    reference=lambda x, y, uses, shift=None: meaning(y @ x, shift),
    two_party=_times_factors,
    cost=_cost,
    simulate=uniform_messages(_times_factors, _correct),
)
"""y [..., n, k] @ x [..., k, m], with factors y that are private to the client, of any number of
calls, of which a unit serves `uses`. Fixed-point, off by some 2^11 before the truncation; with a
`shift` of 0 whoever calls truncates before anything is opened."""
