"""exp(x) of shared x <= 0, and with it the weights of a softmax over a wide vocabulary.

Words are fixed-point numbers of FRAC_BITS fraction bits ("units" of 2^-18) whatever their dtype.
Let M = 2^22 units, which is 16 nats, and n = -x with 0 <= n < M. Each party takes its share of n
mod 2 M and splits it into n_i = y_i + t_i M with y_i < M. Bit 22 of n = n_0 + n_1 mod 2 M is 0, so
the carry out of y_0 + y_1 is t_0 ^ t_1 and n = y_0 + y_1 - M (t_0 ^ t_1). Hence, in nats,

    exp(x) = a b_{t_0},    a = exp(-y_0),    b_j = exp(M (t_1 ^ j) - y_1):

the client knows a and t_0, the provider b_0 and b_1. Each takes its exponentials in the clear, and
what is left is one product with one of two words. (Exponentials of shares, multiplied: Kelkar, Le,
Raykova and Seth, "Secure Poisson Regression", USENIX Security'22.)

Error. a <= 1 is rounded to 42 fraction bits, b_j <= e^16 to 19. Since a b = exp(x) <= 1, the
product is below 2^62 and wrong by less than 2^-43 e^16 + 2^-20, which is 0.52 units. An unbiased
truncation (`protocols.arithmetic.truncate`) then rounds to a unit up or down.

Where n >= M the product means nothing; a comparison n < M and `protocols.bits.mux` make it zero. It
looks at a second word, `top`, which may be a coarser one with a wider reach
(`protocols.arithmetic.narrow`): then it is cheap, and right for any n that the coarse word holds,
while of n itself the low 23 bits count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.arithmetic.narrow import narrow
from protocols.arithmetic.truncate import share_of, truncate
from protocols.bits.compare import sign_cost, sign_words
from protocols.bits.convert import arith_cost, as_arith, public_share
from protocols.bits.mux import correct_mux, mux_cost, mux_words, width_of
from protocols.bits.planes import bytes_for, pack, unpack
from protocols.bits.slices import by_rows
from protocols.functions.maximum import maximum
from spu_llm.core.correlation import Correlation, Correlations, Form, Part
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Arith, Owner, Value, low_bits, sign_extended

FRAC_BITS = SpuConfig().frac_bits
REACH = 16  # nats: exp(x) is zero from -REACH on
SCALE_BITS = 61  # fraction bits of the product
BITS = 26  # of a signed difference of logits below 128 nats
COARSE = 14  # low bits that comparisons of exponents leave out: units of 1/16
FINE_BITS = 30  # of exponents in units: what exponentials look at, and more

_CLIENT_BITS = 42  # fraction bits of a; the rest of SCALE_BITS are those of b
_REACH_BITS = FRAC_BITS + REACH.bit_length() - 1
_REACH = np.uint64(1 << _REACH_BITS)  # M
_0, _1 = np.uint64(0), np.uint64(1)

WORD_TIMES_CHOSEN = Correlation(
    name="word times one of two",
    masks=(
        Part((), Owner.CLIENT, Form.BIT),
        Part((), Owner.CLIENT, Form.PRIVATE),
        Part((2,), Owner.PROVIDER, Form.ARITH),
    ),
    # For bit c and words u, (v_0, v_1): v_c and u v_c.
    results=(Part((), Owner.JOINT, Form.ARITH), Part((), Owner.JOINT, Form.ARITH)),
    # As additive shares, the provider's words cost SPU one correlated OT for the choice and a
    # product that is encrypted in one direction only.
    derive=lambda c, u, v: [c, u, v[:, 0], v[:, 1] - v[:, 0]],
    inputs=(
        Part((), Owner.CLIENT, Form.BIT),
        Part((), Owner.CLIENT, Form.PRIVATE),
        Part((), Owner.PROVIDER, Form.ARITH),
        Part((), Owner.PROVIDER, Form.ARITH),
    ),
    secure=lambda c, u, first, step: _chosen(first + c.astype(first.dtype) * step, u),
    chunk=1 << 14,
)


def _chosen(word: Any, factor: Any) -> list[Any]:
    return [word, factor * word]


# ---- what a party computes alone, from its share of n = -x


def _split(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return y in nats and the bit t of a share of n."""
    nats = low_bits(share, _REACH_BITS).astype(np.float64) * 2.0**-FRAC_BITS
    return nats, (share >> np.uint64(_REACH_BITS)) & _1


def client_factor(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a as a word of 42 fraction bits, and the choice t_0."""
    nats, top = _split(share)
    return _rounded(np.exp(-nats), _CLIENT_BITS), top


def provider_factors(share: np.ndarray) -> np.ndarray:
    """Return (b_0, b_1) as words of 19 fraction bits, [n, 2]."""
    nats, top = _split(share)
    exponents = REACH * np.stack([top, top ^ _1], axis=-1).astype(np.float64) - nats[:, None]
    return _rounded(np.exp(exponents), SCALE_BITS - _CLIENT_BITS)


def _rounded(x: np.ndarray, frac_bits: int) -> np.ndarray:
    return np.round(x * 2.0**frac_bits).astype(np.uint64)


# ---- the product, in two messages
#
# 1. The client sends d = t_0 ^ c and e = a - u under its prepared bit c and word u.
# 2. The provider sends f_j = b_{j ^ d} - v_j under its prepared words: b_{t_0} = f_c + v_c.
#
# Then a b_{t_0} = a f_c + e v_c + u v_c: the client knows a f_c, the rest is linear in what was
# prepared.


def _ask(
    party: Party, correlations: Correlations, share: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Send message 1 and return d and e, which both parties then know. share: this party's of n."""
    bit, word, _ = correlations.masks
    size = bytes_for(share.size)
    if party.rank == CLIENT:
        a, top = client_factor(share)
        flip, masked = top ^ bit, a - word
        party.send_bytes(np.concatenate([pack(flip), masked.view(np.uint8)]))
        return flip, masked
    data = party.recv_bytes((size + 8 * share.size,))
    return unpack(data, share.size), data[size:].copy().view(np.uint64)


def _answer(
    party: Party,
    correlations: Correlations,
    share: np.ndarray,
    flip: np.ndarray,
    masked: np.ndarray,
) -> np.ndarray:
    """Send message 2 and return this party's share of a b_{t_0} at SCALE_BITS."""
    (bit, word, words), (chosen, product) = correlations.masks, correlations.results
    product = masked * chosen + product
    if party.rank == CLIENT:
        known = _pick(party.recv((share.size, 2)), bit)
        return product + (masked + word) * known
    b = provider_factors(share)
    party.send(np.where((flip == _1)[:, None], b[:, ::-1], b) - words)
    return product


def _pick(pairs: np.ndarray, bit: np.ndarray) -> np.ndarray:
    return np.where(bit == _1, pairs[:, 1], pairs[:, 0])


# ---- the op


def _two_party(party: Party, x: Value, top: Value, *, bits: int, drop: int = 0) -> Arith:
    """Compute exp(x) in words of SCALE_BITS fraction bits.

    1. n = -x. 2. The product's first message. 3. Whether n < M, from a sign.
    4. The product's second message, after the comparison, so that neither waits for the first one.
    5. Zero unless n < M.
    """
    least = _REACH_BITS + 2 - drop
    if not least <= bits <= width_of(top) or width_of(x) <= _REACH_BITS:
        raise ValueError(f"exponents of {bits} bits; give {least} to {width_of(top)}")
    share, coarse = (as_arith(party, v, narrow=True) for v in (x, top))
    # What counts units becomes a float as well.
    dtype = share.dtype if share.dtype.kind == "f" else np.dtype(np.float32)
    if not share.words.size:
        return Arith(share.words, dtype, party.frac_bits)
    # 1.
    n, over = _0 - share.words.reshape(-1), _0 - coarse.words.reshape(-1)
    # 2.
    correlations = party.take(WORD_TIMES_CHOSEN, n.size)
    flip, masked = _ask(party, correlations, n)
    # 3.
    inside = sign_words(party, over - public_share(party, int(_REACH) >> drop), bits)
    # 4.
    product = _answer(party, correlations, n, flip, masked)
    # 5.
    words = mux_words(party, inside, product)
    return Arith(words.reshape(x.shape), dtype, party.frac_bits)


def _reference(x: Any, top: Any, *, bits: int, drop: int = 0) -> Any:
    outside = top <= -REACH
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(np.float32) * np.float32(2.0**-FRAC_BITS)
        outside = top <= -(int(_REACH) >> drop)
    return jnp.where(outside | (x <= -REACH), 0, jnp.exp(x)) * 2.0 ** (SCALE_BITS - FRAC_BITS)


def _cost(x: Value, top: Value, *, bits: int, drop: int = 0) -> Cost:
    count = math.prod(x.shape)
    # One round: the first message travels with the comparison's.
    product = Cost(2, 1, bytes_for(count) + 8 * count, 16 * count)
    own = product + sign_cost(count, bits) + mux_cost(count)
    return arith_cost(x) + arith_cost(top) + (own if count else Cost())


def _correct(x: Value, top: Value, *, bits: int, drop: int = 0) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        if made.words.size:
            correct_mux(party, wanted.words - made.words)

    return correct


def model(
    inputs: Sequence[Sequence[Value]], common: Prg, *, bits: int, drop: int = 0
) -> Sequence[np.ndarray]:
    """Compute exact results: the rounding of a and b depends on how x is shared."""
    n_0, n_1 = (_0 - share_of(values[0]) for values in inputs)
    a, choice = client_factor(n_0.reshape(-1))
    b = provider_factors(n_1.reshape(-1))
    product = a * _pick(b, choice)
    top = _0 - share_of(inputs[0][1]) - share_of(inputs[1][1])
    inside = sign_extended(top, bits).view(np.int64) < int(_REACH) >> drop
    return [np.where(inside, product.reshape(n_0.shape), _0)]


scaled_exponential = protocol_op(
    "scaled_exponential",
    reference=_reference,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
    model=model,
)
"""exp(x) 2^(SCALE_BITS - FRAC_BITS) for x <= 0, and exactly 0 for x <= -REACH: words of SCALE_BITS
fraction bits, of which a truncation by the difference makes exp(x). An integer x counts units; a
narrow share of 23 bits or more will do. `top` tells whether x > -REACH: x itself, or words of
`bits` signed bits from floor(x / 2^drop) - 1 to floor((x + 1) / 2^drop). A float in either case."""


def exponential(x: Any, *, bits: int = BITS) -> Any:
    """Compute exp(x) for float x in (-2^(bits-1), 0] units, exactly 0 for x <= -REACH.

    Results are within 1.52 units, and unbiased but for the rounding of the factors. 24 bits and
    more; 26 reach to 128 nats.
    """
    scaled = scaled_exponential(x, x, bits=bits)
    return truncate(scaled, shift=SCALE_BITS - FRAC_BITS, how="unbiased", bits=64)


def exponentials_below(fine: Any, coarse: Any, *, bits: int) -> Any:
    """Compute exp(x) of narrow x <= 0 in units, and in coarse units of `bits` signed bits, one too
    low at most; from 0 to 1 and a unit.
    """
    scaled = scaled_exponential(fine, coarse, bits=bits, drop=COARSE)
    return truncate(scaled, shift=SCALE_BITS - FRAC_BITS, how="unbiased", bits=64)


def bound_of(coarse: Any, *, bits: int) -> Any:
    """Return an upper bound of every row of narrow words in coarse units, 3 of them above the
    largest number at most.
    """
    # Either narrow word may be one too low: coarse ones count for two more.
    return maximum(coarse, bits=bits) + 2


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
    coarse_bits = bits - COARSE + 1  # with room for the bound

    def weights(rows: Any) -> Any:
        fine = narrow(rows, drop=0, bits=FINE_BITS)
        coarse = narrow(rows, drop=COARSE, bits=coarse_bits)
        bound = jnp.broadcast_to(bound_of(coarse, bits=coarse_bits)[:, None], rows.shape)
        return exponentials_below(fine - bound * (1 << COARSE), coarse - bound, bits=coarse_bits)

    return by_rows(weights, logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)
