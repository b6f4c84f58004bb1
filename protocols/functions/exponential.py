"""exp(x) of shared x <= 0, and with it the weights of a softmax over a wide vocabulary.

Words are fixed-point numbers of FRAC_BITS fraction bits ("units" of 2^-18) whatever their dtype.
Let M = 2^26 / 19 units, which is 13.47 nats: exp(-M) is 0.37 units. Of n = -x with 0 <= n < M, each
party takes its share of 19 n mod 2^27 and splits it into y_i + t_i 2^26 with y_i < 2^26. Bit 26 of
19 n is 0, so the carry out of y_0 + y_1 is t_0 ^ t_1 and 19 n = y_0 + y_1 - 2^26 (t_0 ^ t_1).
Hence, in nats,

    exp(x) = a b_{t_0},    a = exp(-y_0 / 19),    b_j = exp(M (t_1 ^ j) - y_1 / 19):

the client knows a and t_0, the provider b_0 and b_1. Each takes its exponentials in the clear, and
what is left is one product with one of two numbers. (Exponentials of shares, multiplied: Kelkar,
Le, Raykova and Seth, "Secure Poisson Regression", USENIX Security'22.)

The product. Since a b <= 1, it fits the field (`spu_llm.core.field`), where products are cheap; but
a <= 1 needs 38 fraction bits, because b reaches e^M < 2^19.5. So a is split, and

    2^38 a = 2^19 a_1 + a_0,    2^38 a b = a_1 (2^19 b) + a_0 b,

all factors rounded to integers, is two products in the field, of words below 2^39 and 2^20. A field
triple has both: of shared u, v with shares u_i, v_i it says u_0 v_1 + v_0 u_1.

Error, in units. 2^38 a is rounded, which b multiplies: 0.35. 2^19 b is, which 2^-19 a_1 <= 1
multiplies: 1/4; and b, which a_0 2^-19 < 1 does: 1/4. These 0.85 depend on how x is shared. The
product comes back from the field less 20 bits (`protocols.arithmetic.field.into_ring`), up or down
without a bias: 1.85 in all.

Where n >= M the product means nothing; a comparison n < EDGE, which is 13.4375 nats, and
`protocols.bits.mux` make it zero: what is 0.39 units at most. The comparison looks at a second
word, `top`, which may be a coarser one with a wider reach (`protocols.arithmetic.narrow`). Then it
is cheap, and right for any n that the coarse word holds, while of n itself the low 27 bits count;
but two coarse units before EDGE may be zero, too, which is 0.44 units at most where one is 2^14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.arithmetic.field import FIELD_TRANSFER, crossing_cost, into_ring
from protocols.arithmetic.field_product import FIELD_TRIPLE
from protocols.arithmetic.narrow import narrow
from protocols.arithmetic.truncate import share_of
from protocols.bits.compare import sign_cost, sign_words
from protocols.bits.convert import arith_cost, as_arith, public_share
from protocols.bits.mux import correct_mux, mux_cost, mux_words, width_of
from protocols.bits.planes import bytes_for, pack, unpack
from protocols.bits.slices import by_rows
from protocols.functions.maximum import maximum
from spu_llm.core import field
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Arith, Value, low_bits, sign_extended, to_bytes

FRAC_BITS = SpuConfig().frac_bits
SCALE_BITS = 38  # fraction bits of the product
BITS = 26  # of a signed difference of logits below 128 nats
COARSE = 14  # low bits that comparisons of exponents leave out: units of 1/16
FINE_BITS = 30  # of exponents in units: what exponentials look at, and more
TOO_LOW = 2  # coarse units: of two narrow words, each may be one too low

_FACTOR = 19  # of n, so that M is little more than what matters
_SPLIT_BITS = 26  # 2^26 is 19 M
LEAST_COARSE_BITS = _SPLIT_BITS + 1 - COARSE  # of a bound that exponents are taken below of
SHIFT = SCALE_BITS - FRAC_BITS  # by which a product is truncated, to be exp(x) itself
_HALF_BITS = SCALE_BITS // 2  # of a_0; fraction bits of the larger form of b
# Units: exp(x) is zero from -EDGE on, little more than -M.
EDGE = (1 << _SPLIT_BITS) // _FACTOR >> COARSE << COARSE
REACH = EDGE / 2**FRAC_BITS  # nats
_0, _1 = np.uint64(0), np.uint64(1)


# ---- what a party computes alone, from its share of n = -x


def _split(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return y / 19 in nats and the bit t of a share of n."""
    words = share * np.uint64(_FACTOR)
    nats = low_bits(words, _SPLIT_BITS).astype(np.float64) * (2.0**-FRAC_BITS / _FACTOR)
    return nats, (words >> np.uint64(_SPLIT_BITS)) & _1


def client_factors(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a_1 and a_0, [2, n], and the choice t_0."""
    nats, top = _split(share)
    a = _rounded(np.exp(-nats), SCALE_BITS)
    return np.stack([a >> np.uint64(_HALF_BITS), low_bits(a, _HALF_BITS)]), top


def provider_factors(share: np.ndarray) -> np.ndarray:
    """Return 2^19 b_j and b_j as integers, [2, n, j]."""
    nats, top = _split(share)
    most = 2.0**_SPLIT_BITS * (2.0**-FRAC_BITS / _FACTOR)
    exponents = most * np.stack([top, top ^ _1], axis=-1).astype(np.float64) - nats[:, None]
    b = np.exp(exponents)
    return np.stack([_rounded(b, _HALF_BITS), _rounded(b, 0)])


def _rounded(x: np.ndarray, frac_bits: int) -> np.ndarray:
    return np.round(x * 2.0**frac_bits).astype(np.uint64)


# ---- the product, in two messages
#
# Prepared, for each of the two products: a bit c and an element k_c of the client's, k_0 and k_1 of
# the provider's; elements u of the client's and r of the provider's, and shares of the sum of both
# u r.
#
# 1. The client sends d = t_0 ^ c and e = a - u.
# 2. The provider sends f_j = b_{j ^ d} - k_j - r, so that the client has g = f_c + k_c, which is
#    b_{t_0} - r, and of the other one nothing.
#
# Then a b_{t_0} = a g + e r + u r: the client knows a g, the provider e r.


class _Product:
    """This party's half of a product with one of two numbers."""

    def __init__(self, party: Party, share: np.ndarray) -> None:
        """Send message 1. share: this party's of n, words [n]."""
        self._party, self._share, shape = party, share, (2, share.size)
        transfers = party.take(FIELD_TRANSFER, 2 * share.size)
        triples = party.take(FIELD_TRIPLE, share.size)
        self._bits, self._apart = (mask.reshape(shape) for mask in transfers.masks)
        self._keys = transfers.results[0].reshape(shape)
        (u, v), (product,) = triples.masks, triples.results
        # u_0 v_1 + v_0 u_1 is wanted: the provider's elements the other way around.
        self._elements = np.stack([u, v] if party.rank == CLIENT else [v, u])
        self._crossed = field.subtracted(product, field.multiplied(u, v))
        # 1.
        bits = self._bits.size
        if party.rank == CLIENT:
            factors, top = client_factors(share)
            self._flip, self._masked = top ^ self._bits, field.subtracted(factors, self._elements)
            masked = to_bytes(self._masked, field.BITS)
            party.send_bytes(np.concatenate([pack(self._flip), masked]))
        else:
            flips, self._masked = party.recv_bytes_and_field(bytes_for(bits), shape)
            self._flip = unpack(flips, bits).reshape(shape)

    def answer(self) -> np.ndarray:
        """Send message 2 and return this party's share of the product, elements [n]."""
        if self._party.rank == CLIENT:
            pairs = self._party.recv_field((*self._bits.shape, 2))
            one = field.added(_pick(pairs, self._bits), self._keys)
            other = field.added(self._masked, self._elements)  # a itself
        else:
            factors, flip = provider_factors(self._share), self._flip[..., None] == _1
            zero = field.subtracted(np.zeros_like(self._keys), self._keys)
            keys = np.stack([zero, field.added(zero, self._apart)], axis=-1)
            hidden = field.added(keys, self._elements[..., None])
            self._party.send_field(
                field.subtracted(np.where(flip, factors[..., ::-1], factors), hidden)
            )
            one, other = self._elements, self._masked
        first, second = field.multiplied(one, other)
        return field.added(field.added(first, second), self._crossed)


def _pick(pairs: np.ndarray, bit: np.ndarray) -> np.ndarray:
    return np.where(bit == _1, pairs[..., 1], pairs[..., 0])


# ---- the op


def _two_party(
    party: Party, x: Value, top: Value, *, bits: int, drop: int = 0, shift: int = SHIFT
) -> Arith:
    """Compute exp(x) in words of SCALE_BITS - shift fraction bits.

    1. n = -x. 2. The product's first message. 3. Whether n < EDGE, from a sign.
    4. The product's second message, after the comparison, so that neither waits for the first one.
    5. Out of the field, truncated. 6. Zero unless n < EDGE.
    """
    least = (EDGE >> drop).bit_length() + 2
    if not least <= bits <= width_of(top):
        raise ValueError(f"exponents of {bits} bits; give {least} to {width_of(top)}")
    if width_of(x) <= _SPLIT_BITS:
        raise ValueError(f"a share of {width_of(x)} bits; give {_SPLIT_BITS + 1} or more")
    share, coarse = (as_arith(party, v, narrow=True) for v in (x, top))
    # What counts units becomes a float as well.
    dtype = share.dtype if share.dtype.kind == "f" else np.dtype(np.float32)
    if not share.words.size:
        return Arith(share.words, dtype, party.frac_bits)
    # 1.
    n, over = _0 - share.words.reshape(-1), _0 - coarse.words.reshape(-1)
    # 2.
    product = _Product(party, n)
    # 3.
    inside = sign_words(party, over - public_share(party, EDGE >> drop), bits)
    # 4.
    element = product.answer()
    # 5.
    words = into_ring(party, element, shift)
    # 6.
    words = mux_words(party, inside, words)
    return Arith(words.reshape(x.shape), dtype, party.frac_bits)


def _reference(x: Any, top: Any, *, bits: int, drop: int = 0, shift: int = SHIFT) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        outside = top <= -(EDGE >> drop) * 2.0 ** (drop - FRAC_BITS)
    else:
        outside = top <= -(EDGE >> drop)
        x = x.astype(np.float32) * np.float32(2.0**-FRAC_BITS)
    return jnp.where(outside | (x <= -REACH), 0, jnp.exp(x)) * 2.0 ** (SHIFT - shift)


def _cost(x: Value, top: Value, *, bits: int, drop: int = 0, shift: int = SHIFT) -> Cost:
    count, size = math.prod(x.shape), field.BITS // 8
    # One round: the first message travels with the comparison's.
    product = Cost(2, 1, bytes_for(2 * count) + 2 * size * count, 4 * size * count)
    own = product + sign_cost(count, bits) + crossing_cost(0, count) + mux_cost(count)
    return arith_cost(x) + arith_cost(top) + (own if count else Cost())


def _correct(x: Value, top: Value, *, bits: int, drop: int = 0, shift: int = SHIFT) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        if made.words.size:
            correct_mux(party, wanted.words - made.words)

    return correct


def model(
    inputs: Sequence[Sequence[Value]], common: Prg, *, bits: int, drop: int = 0, shift: int
) -> Sequence[np.ndarray]:
    """Compute exact results without a truncation: the rounding of a and b depends on how x is
    shared.
    """
    assert not shift, "what a truncation rounds up depends on prepared elements"
    n_0, n_1 = (_0 - share_of(values[0]) for values in inputs)
    a, choice = client_factors(n_0.reshape(-1))
    chosen = _pick(provider_factors(n_1.reshape(-1)), choice)
    product = (a * chosen).sum(axis=0, dtype=np.uint64)
    top = _0 - share_of(inputs[0][1]) - share_of(inputs[1][1])
    inside = sign_extended(top, bits).view(np.int64) < EDGE >> drop
    return [np.where(inside, product.reshape(n_0.shape), _0)]


cut_exponential = protocol_op(
    "cut_exponential",
    reference=_reference,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
    model=model,
)
"""exp(x) for x <= 0, and exactly 0 for x <= -EDGE units: words of SCALE_BITS - shift fraction bits,
`shift` 20 at most, rounded up or down without a bias. An integer x counts units; a narrow share of
27 bits or more will do. `top` tells whether x > -EDGE: x itself, or words of `bits` signed bits
from floor(x / 2^drop) - 1 to floor((x + 1) / 2^drop). A float in either case."""


def exponential(x: Any, *, bits: int = BITS) -> Any:
    """Compute exp(x) for float x in (-2^(bits-1), 0] units, exactly 0 for x <= -REACH.

    Results are within 1.85 units, and unbiased but for the rounding of the factors. 24 bits and
    more; 26 reach to 128 nats.
    """
    return cut_exponential(x, x, bits=bits)


def exponentials_below(fine: Any, coarse: Any, *, bits: int) -> Any:
    """Compute exp(x) of narrow x <= 0 in units, and in coarse units of `bits` signed bits, one too
    low at most; from 0 to 1 and a unit.
    """
    return cut_exponential(fine, coarse, bits=bits, drop=COARSE)


def bound_of(coarse: Any, *, bits: int) -> Any:
    """Return an upper bound of every row of narrow words in coarse units, 3 of them above the
    largest number at most.
    """
    return maximum(coarse, bits=bits) + TOO_LOW


def softmax_weights(logits: Any, *, bits: int = BITS) -> Any:
    """Compute exp(z - max z) of every row z of float logits [..., n], shared, from 0 to 1 and a
    unit.

    bits: the differences in a row fit so many, signed and fraction bits included. Rounding to units
    is what a row is off by: for 32,000 normal logits of deviation 3, a total variation of 0.001 to
    0.006, the more the further the maximum stands out.
    """

    def weights(rows: Any) -> Any:
        return exponential(rows - maximum(rows, bits=bits)[:, None], bits=bits)

    return by_rows(weights, logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)


def hidden_weights(logits: Any, *, bits: int = BITS) -> Any:
    """Compute `softmax_weights` times a factor from exp(-3/16) to 1 of the row's, for half the
    price: comparisons look at coarse logits alone, and the shift is an upper bound of the row. The
    weights must stay shared: the factor would tell where the largest logit lies between two coarse
    units.
    """
    coarse_bits = max(bits - COARSE + 1, LEAST_COARSE_BITS)  # with room for the bound

    def weights(rows: Any) -> Any:
        fine = narrow(rows, drop=0, bits=FINE_BITS)
        coarse = narrow(rows, drop=COARSE, bits=coarse_bits)
        bound = jnp.broadcast_to(bound_of(coarse, bits=coarse_bits)[:, None], rows.shape)
        return exponentials_below(fine - bound * (1 << COARSE), coarse - bound, bits=coarse_bits)

    return by_rows(weights, logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)
