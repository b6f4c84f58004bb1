"""Products of shared values, from correlations made offline.

Ring products mod 2^64: integer inputs give integers. Fixed-point inputs are truncated by their
fraction bits afterwards (protocols.arithmetic.truncate, unbiased), one more round. `shift` says
otherwise: the number of bits to truncate, 0 for none. A float's meaning follows: it is the product
times 2^(fraction bits - shift), so with 0 the words are the raw product's.

multiply   Beaver, CRYPTO'91, section 3. Triple: shared a, b and a * b.
             1. Open e = x - a and f = y - b: one message and 16 bytes per value each way.
             2. x * y = e f + e b + f a + a b, linear in what is shared.
square     With y = x one opening will do: 8 bytes per value each way. Pair: the client's u, the
           provider's v and shares of 2 u v, so a = u + v is a mask of which a^2 costs one cross
           term, u^2 and v^2 being each owner's own.
             1. Open e = x - a. 2. x^2 = e^2 + 2 e a + a^2.
sum_squares  The sum of a row's squares, with pairs of rows: u, v and shares of 2 u . v.
scale_rows   Rows y [d] times a number x each, with a [1] and b [d]: d + 1 words a row each way.
             Both are made by `spu_llm.offline.packed.products` and off by its noise.
times_whole  x times public whole numbers: each share by itself, nothing is sent.
matmul     As `multiply`, with matrices: a [m, k], b [k, n], per batch element.
linear     x [rows, k] shared times w [k, m] of the provider (Delphi, USENIX Security'20,
           section 4): masks r [k] of the client and shares of r w, by
           `spu_llm.offline.silent.products`.
             1. Both parties lift their shares: x = 2^lift x.
             2. The client sends x_0 - r: one message, 8 k bytes per row.
             3. x w = (x_0 - r) w + r w + x_1 w; the provider knows both factors of the outer terms.
             4. The truncation takes the lift away, too, and with it the noise of r w.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.arithmetic.truncate import truncate_cost, truncate_unbiased
from protocols.bits.convert import arith_cost, as_arith, correct_wrap
from spu_llm.core.correlation import Correlation, Form, Part
from spu_llm.core.integers import factor_of, times_factor
from spu_llm.core.op import Cost, ProtocolOp, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.settings import SpuConfig
from spu_llm.core.simulated import Correct, SimulatedParty, nothing_to_correct, uniform_messages
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Owner,
    Private,
    Public,
    Value,
    as_words,
    frac_bits_of,
    low_bits,
)
from spu_llm.offline.packed.ring import N as SLOTS
from spu_llm.offline.silent.ring import SPARE_BITS

_TRIPLES = 1 << 12  # made at once: few are taken, so few are left over
_WORDS = 1 << 15  # of squares made at once: SPU packs them in batches of 2^14
_WINDOW = 1 << 21  # words of masks and products that are made at once, at most
# Positions of a matrix that are made at once. Its whole hint is read for any number of them: larger
# batches take less time for each, and a short text leaves more of them unused.
_POSITIONS = 64
LIFT = 12  # bits that inputs of `linear` are lifted by


def shared(*shape: int) -> Part:
    """Return the `Part` of a correlation that is additively shared words."""
    return Part(shape, Owner.JOINT, Form.ARITH)


TRIPLE = Correlation(
    name="product triple",
    masks=(shared(), shared()),
    results=(shared(),),
    secure=lambda a, b: [a * b],
    chunk=_TRIPLES,
)

SQUARE = Correlation(
    name="square pair of own words",
    masks=(Part((), Owner.CLIENT, Form.PRIVATE), Part((), Owner.PROVIDER, Form.ARITH)),
    results=(shared(),),
    # One party's words times a share of which the other has all: encrypted in one direction only.
    derive=lambda u, v: [u, v + v],
    inputs=(Part((), Owner.CLIENT, Form.PRIVATE), Part((), Owner.PROVIDER, Form.ARITH)),
    secure=lambda u, twice_v: [u * twice_v],
    chunk=_WORDS,
)


@functools.cache
def row_squares(d: int) -> Correlation:
    return Correlation(
        name=f"row squares {d}",
        masks=(Part((d,), Owner.CLIENT, Form.PRIVATE), Part((d,), Owner.PROVIDER, Form.PRIVATE)),
        results=(shared(),),
        secure=lambda u, v: [2 * (u * v).sum(axis=1)],
        matrices=lambda u, v: (u[:, None, :], (v + v)[:, :, None]),
        chunk=_rows(d),
    )


@functools.cache
def scaled_row(d: int) -> Correlation:
    return Correlation(
        name=f"scaled row {d}",
        masks=(shared(1), shared(d)),
        results=(shared(d),),
        secure=lambda a, b: [a * b],
        matrices=lambda a, b: (a[:, :, None], b[:, None, :]),
        chunk=_rows(d),
    )


def _rows(d: int) -> int:
    """Return how many rows are made at once: enough to fill ciphertexts, or not many more than one
    asks for.
    """
    return min(128, max(64, SLOTS // max(d, 1)))


@functools.cache
def matrix_triple(m: int, k: int, n: int) -> Correlation:
    return Correlation(
        name=f"matrix triple {m} {k} {n}",
        masks=(shared(m, k), shared(k, n)),
        results=(shared(m, n),),
        secure=lambda a, b: [a @ b],
        chunk=max(1, min(8, (1 << 18) // (m * k + k * n))),
    )


@functools.cache
def masked_product(label: str, k: int, m: int) -> Correlation:
    """Return the correlation of masks r [k] of the client times the provider's matrix [k, m] that
    `label` names, up to the noise of `spu_llm.offline.silent.products`, which makes the products.
    """
    rows = _POSITIONS
    while rows > 1 and rows * (k + m) > _WINDOW:
        rows //= 2
    return Correlation(
        name=f"masked product {label} {k} {m}",
        masks=(Part((k,), Owner.CLIENT, Form.PRIVATE),),
        results=(shared(m),),
        secure=lambda r, w: [r @ w],
        fixed=Part((k, m), Owner.PROVIDER, Form.PRIVATE),
        chunk=rows,
    )


# ---- shares of integer products


def open_masked(party: Party, words: np.ndarray) -> np.ndarray:
    """Open masked words: return both shares added up, uniform, so both parties may know the sum."""
    party.send(words)
    return words + party.recv(words.shape)


def side_by_side(
    parts: Sequence[np.ndarray],
) -> tuple[np.ndarray, Callable[[np.ndarray], list[np.ndarray]]]:
    """Return parts [batch, ...] as one array, batch element by batch element, and the function that
    takes such an array apart again.
    """
    flat = [part.reshape(len(part), -1) for part in parts]

    def apart(whole: np.ndarray) -> list[np.ndarray]:
        pieces = np.split(whole, np.cumsum([f.shape[1] for f in flat])[:-1], axis=1)
        return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    return np.concatenate(flat, axis=1), apart


def open_together(party: Party, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Open masked parts [batch, ...] in one message, by `open_masked`."""
    own, apart = side_by_side(parts)
    return apart(open_masked(party, own))


def multiply_words(party: Party, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compute shares of x * y mod 2^64, elementwise, of additively shared words of one shape."""
    correlations = party.take(TRIPLE, x.size)
    a, b, ab = (w.reshape(x.shape) for w in (*correlations.masks, *correlations.results))
    # 1.
    e, f = open_masked(party, np.stack([x - a, y - b]))
    # 2.
    return _opened_product(party, operator.mul, e, f, a, b) + ab


def _opened_product(
    party: Party,
    times: Callable[[np.ndarray, np.ndarray], np.ndarray],
    e: np.ndarray,
    f: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
) -> np.ndarray:
    """Compute this party's share of (e + a)(f + b) - a b for opened e, f and its shares of a, b."""
    product = times(e, b) + times(a, f)
    return product + times(e, f) if party.rank == CLIENT else product


def multiply_cost(count: int) -> Cost:
    """Return the cost of `multiply_words` for `count` products."""
    return _both_ways(2 * count)


def _square(party: Party, x: np.ndarray) -> np.ndarray:
    correlations = party.take(SQUARE, x.size)
    a, cross = (w.reshape(x.shape) for w in (correlations.masks[party.rank], *correlations.results))
    # 1.
    e = open_masked(party, x - a)
    # 2.
    return _opened_square(party, e, a) + cross


def _opened_square(party: Party, e: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Compute this party's share of (e + u + v)^2 - 2 u v for opened e; a is its own of u and v."""
    square = np.uint64(2) * e * a + a * a
    return square + e * e if party.rank == CLIENT else square


def _sum_squares(party: Party, x: np.ndarray) -> np.ndarray:
    rows, d = x.shape
    correlations = party.take(row_squares(d), rows)
    a, (cross,) = correlations.masks[party.rank], correlations.results
    # 1.
    e = open_masked(party, x - a)
    # 2.
    return _opened_square(party, e, a).sum(axis=1) + cross


def _scale_rows(party: Party, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    rows, d = y.shape
    correlations = party.take(scaled_row(d), rows)
    (a, b), (ab,) = correlations.masks, correlations.results
    # 1.
    e, f = open_together(party, [x[:, None] - a, y - b])
    # 2.
    return _opened_product(party, operator.mul, e, f, a, b) + ab


def _matmul(party: Party, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    batch, m, k = x.shape
    correlations = party.take(matrix_triple(m, k, y.shape[2]), batch)
    (a, b), (ab,) = correlations.masks, correlations.results
    # 1.
    e, f = open_together(party, [x - a, y - b])
    # 2.
    return _opened_product(party, operator.matmul, e, f, a, b) + ab


# ---- the ops: forms in, truncation out


def cut_bits(dtype: Any, shift: int | None, frac_bits: int = SpuConfig().frac_bits) -> int:
    """Return how many bits of a product of `dtype` are truncated."""
    return frac_bits_of(np.dtype(dtype), frac_bits) if shift is None else shift


def rescaled(party: Party, words: np.ndarray, factor: Arith, shift: int | None) -> Arith:
    """Truncate the shares of a product; a round unless there is nothing to cut. The result has the
    dtype and fraction bits of the factor.
    """
    product = Arith(words, factor.dtype, factor.frac_bits)
    cut = cut_bits(factor.dtype, shift, party.frac_bits)
    return truncate_unbiased(party, product, cut) if cut and words.size else product


def rescaled_cost(x: Value, shape: tuple[int, ...], shift: int | None) -> Cost:
    """Return the cost of `rescaled`, for a product of this shape with the factor x."""
    count = math.prod(shape)
    return truncate_cost(count) if cut_bits(x.dtype, shift) and count else Cost()


def meaning(product: Any, shift: int | None) -> Any:
    """Return a plain product as its words stand after the truncation."""
    if shift is None:
        return product
    if jnp.issubdtype(product.dtype, jnp.floating):
        return product * 2.0 ** (SpuConfig().frac_bits - shift)
    return (product + (1 << shift >> 1)) >> shift


def _added(drawn: Sequence[np.ndarray], difference: np.ndarray) -> None:
    product = drawn[-1]
    product += difference.reshape(product.shape)


def correct_product(
    x: Value, shift: int | None, enter: Callable[[Sequence[np.ndarray], np.ndarray], None] = _added
) -> Correct:
    """Return the function that brings a simulated product to the wanted one. The share of the
    prepared product enters the result as it is, or shifted by the truncation; what the shift leaves
    of a word's top, the truncation's own prepared bit corrects.

    enter(drawn, difference): change the prepared product, the last of what is drawn before the
    truncation, in place, so that the result changes by `difference` before that.
    """
    cut = cut_bits(x.dtype, shift)

    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        difference = wanted.words - made.words
        if cut and not low_bits(difference, 63 - cut).any():
            correct_wrap(party, difference.reshape(-1), 64 - cut)
            return
        # The truncation draws two bits and a word after this one.
        enter(party.drawn[: -3 if cut else None], difference << np.uint64(cut))

    return correct


def _both_ways(words: int) -> Cost:
    return Cost(2, 1, 8 * words, 8 * words)


def _product_op(
    name: str,
    reference: Callable[..., Any],
    words: Callable[..., np.ndarray],
    opened: Callable[..., int],
    shape: Callable[..., tuple[int, ...]],
) -> ProtocolOp:
    def two_party(party: Party, *inputs: Value, shift: int | None = None) -> Arith:
        shares = [as_arith(party, v) for v in inputs]
        return rescaled(party, words(party, *(s.words for s in shares)), shares[0], shift)

    def cost(*inputs: Value, shift: int | None = None) -> Cost:
        own = arith_cost(*inputs) + _both_ways(opened(*inputs))
        return own + rescaled_cost(inputs[0], shape(*inputs), shift)

    def correct(*inputs: Value, shift: int | None = None) -> Correct:
        return correct_product(inputs[0], shift)

    return protocol_op(
        name,
        reference=lambda *inputs, shift=None: meaning(reference(*inputs), shift),
        two_party=two_party,
        cost=cost,
        simulate=uniform_messages(two_party, correct),
    )


def _size(x: Value) -> int:
    return math.prod(x.shape)


multiply = _product_op(
    "multiply", lambda x, y: x * y, multiply_words, lambda x, y: 2 * _size(x), lambda x, y: x.shape
)
"""x * y of equal shapes and types."""

square = _product_op("square", lambda x: x * x, _square, _size, lambda x: x.shape)
"""x * x."""


def _times_whole(party: Party, x: Value, whole: Value) -> Arith:
    if not isinstance(whole, Public) or whole.dtype.kind not in "iu":
        raise ValueError("`times_whole` takes whole numbers that both parties know")
    share = as_arith(party, x)
    return Arith(share.words * as_words(whole.value), share.dtype, share.frac_bits)


times_whole = protocol_op(
    "times_whole",
    reference=lambda x, whole: x * whole.astype(x.dtype),
    two_party=_times_whole,
    cost=lambda x, whole: arith_cost(x),
    simulate=uniform_messages(_times_whole, nothing_to_correct),
    non_interactive=True,
)
"""x times public integers of the same shape; a float keeps its fraction bits. With constants
of a program the compiler multiplies in this way by itself (`spu_llm.compiler.linear`)."""

matmul = _product_op(
    "matmul",
    lambda x, y: x @ y,
    _matmul,
    lambda x, y: _size(x) + _size(y),
    lambda x, y: (*x.shape[:2], y.shape[2]),
)
"""x [batch, m, k] @ y [batch, k, n]."""


sum_squares = _product_op(
    "sum_squares", lambda x: (x * x).sum(axis=1), _sum_squares, _size, lambda x: x.shape[:1]
)
"""Sums of squares [rows] of the rows of x [rows, d], fixed-point: words are off by 2^12 or so
before the truncation."""

scale_rows = _product_op(
    "scale_rows",
    lambda y, x: y * x[:, None],
    _scale_rows,
    lambda y, x: _size(y) + _size(x),
    lambda y, x: y.shape,
)
"""Row i of y [rows, d] times x_i of x [rows], fixed-point, off as `sum_squares`. d is 8,192 at
most."""


def _linear_two_party(
    party: Party, x: Value, w: Value, *, label: str, shift: int | None = None, lift: int = LIFT
) -> Arith:
    share, (rows, k) = as_arith(party, x), x.shape
    if not isinstance(w, Private) or w.owner != PROVIDER:
        raise ValueError("the matrix of `linear` is private to the provider")
    if lift < SPARE_BITS:
        raise ValueError(f"masks leave the lowest {SPARE_BITS} bits of a word open; lift {lift}")
    frac_bits = frac_bits_of(w.dtype, party.frac_bits)
    factor = factor_of(w, frac_bits) if w.value is not None else None
    correlations = party.take(masked_product(label, k, w.shape[1]), rows, factor)
    (r,), (rw,) = correlations.masks, correlations.results
    # 1.
    lifted = share.words << np.uint64(lift)
    # 2.
    if party.rank == CLIENT:
        party.send(lifted - r)
        product = rw
    # 3.
    else:
        assert factor is not None
        product = times_factor(party.recv(lifted.shape) + lifted, factor) + rw
    # 4.
    cut = cut_bits(share.dtype, shift, party.frac_bits) + lift
    return rescaled(party, product, share, cut)


def _correct_linear(
    x: Value, w: Value, *, label: str, shift: int | None = None, lift: int = LIFT
) -> Correct:
    return correct_product(x, cut_bits(x.dtype, shift) + lift)


def _linear_cost(x: Value, w: Value, **static: Any) -> Cost:
    online, count = arith_cost(x, w) + Cost(1, 1, 8 * _size(x), 0), x.shape[0] * w.shape[1]
    return online + truncate_cost(count) if count else online


linear = protocol_op(
    "linear",
    reference=lambda x, w, label, shift=None, lift=LIFT: meaning(x @ w, shift),
    two_party=_linear_two_party,
    cost=_linear_cost,
    simulate=uniform_messages(_linear_two_party, _correct_linear),
)
"""x [rows, k] @ w [k, m], w private to the provider and |x w| < 2^(26 - lift). `label` names w: its
prepared masks serve this matrix alone. Their noise is some 0.8 units of 2^-18 times the length of
w's column, half of that for each further bit of lift."""
