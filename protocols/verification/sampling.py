"""Speculative sampling on shares: integers throughout, no division, randomness of both parties.

A row of the private model is weights W_x >= 0 with the total Z = sum W_x < 2^total, so p = W / Z.
The client draws its drafts from q = Q / 2^draft with integers Q_x, sum Q_x = 2^draft.

reject    A draft d is accepted when r q(d) < p(d), with r = (2 r' + 1) / 2^(accept + 1) for a joint
          random integer r' of `accept` bits (Leviathan et al., ICML'23, Alg. 1; POST Alg. 2 lets
          the client choose r). On integers: (2 r' + 1) Q_d Z < W_d 2^(accept + 1 + draft).
          Where p >= q, acceptance is certain. A rejection says that W_d 2^draft < Q_d Z; then some
          other token has more weight than the client gave it, since both sides sum to 2^draft Z.
residual  max(0, W_x 2^draft - Q_x Z), proportional to max(0, p - q). It is zero at a rejected d.
locate    The place of t = u S in the prefix sums P_x of n weights with the total S, for a joint
          random fraction u of `draw` bits: bits [t < P_x], 0 .. 0 1 .. 1. The number of zeros is x
          with probability V_x / S, rounded to a multiple of 2^-draw. A weight of zero is never hit,
          and without any weight all bits are zero.

`Widths` fits all of it into 64 bits. Every op below gives shares, and nothing to anybody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from protocols.arithmetic.product import multiply_cost, multiply_words
from protocols.bits.compare import correct_sign, sign_cost, sign_words
from protocols.bits.convert import arith_cost, as_arith
from protocols.bits.mux import correct_mux, mux_cost, mux_words
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.settings import SpuConfig
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Arith, Bool, Private, Value

_RING = 62  # bits of a magnitude that no step exceeds


@dataclass(frozen=True)
class Widths:
    """Bits of every quantity, public.

    total: row totals are below 2^total. draft, accept, draw: see the module docstring.
    """

    total: int
    draft: int = 16
    draw: int = 20
    most_accept: int = 16

    @staticmethod
    def of_weights(vocab: int, frac_bits: int = SpuConfig().frac_bits) -> Widths:
        """Return widths for rows of `vocab` fixed-point weights up to one (and a few units)."""
        return Widths((vocab * ((1 << frac_bits) + 4)).bit_length())

    @property
    def accept(self) -> int:
        """Return the bits of r': all that the ring has room for, up to `most_accept`."""
        return min(self.most_accept, _RING - 1 - self.total - self.draft)

    @property
    def scale(self) -> int:
        """Return the exponent of the scale, 2^scale, at which a weight is compared."""
        return self.accept + 1 + self.draft

    @property
    def chosen(self) -> int:
        """Return the bits that a draft's own weight needs, mod 2^chosen."""
        return self.total + 1

    @property
    def threshold(self) -> int:
        """Return the bits of a weight less its threshold, signed."""
        return self.total + self.scale + 1

    @property
    def residual(self) -> int:
        """Return the bits of a signed residual."""
        return self.total + self.draft + 1

    def shift(self, excess: int) -> int:
        """Return the bits to drop from weights of `total + excess` bits so that `draw` bits fit."""
        return max(0, self.total + excess + self.draw - _RING)


# ---- reject


def _reject_two_party(
    party: Party, chosen: Value, totals: Value, q: Value, r: Value, *, widths: Widths
) -> Bool:
    """Compute whether drafts are rejected. 1. Q_d (2 r' + 1). 2. Times Z. 3. Rejected unless the
    difference is negative.
    """
    # Of the weight a narrow share will do.
    weight = chosen if isinstance(chosen, Arith) else as_arith(party, chosen)
    totals_, q_, r_ = (as_arith(party, v).words for v in (totals, q, r))
    if not totals_.size:
        return Bool(totals_, np.dtype(np.bool_), 0, 1)
    odd = r_ + r_ + (np.uint64(1) if party.rank == CLIENT else np.uint64(0))
    # 1. A client that chose r itself does this alone (the provider's words are zeros).
    threshold = q_ * odd if isinstance(r, Private) else multiply_words(party, q_, odd)
    # 2.
    threshold = multiply_words(party, threshold, totals_)
    # 3.
    difference = threshold - (weight.words << np.uint64(widths.scale))
    accepted = sign_words(party, difference, widths.threshold)
    flip = np.uint64(1) if party.rank == CLIENT else np.uint64(0)
    return Bool(accepted ^ flip, np.dtype(np.bool_), 0, 1)


def _reject_reference(chosen: Any, totals: Any, q: Any, r: Any, *, widths: Widths) -> Any:
    kind = totals.dtype
    threshold = (2 * r + 1).astype(kind) * q.astype(kind) * totals
    return threshold >= chosen * kind.type(2**widths.scale)


def _reject_cost(chosen: Value, totals: Value, q: Value, r: Value, *, widths: Widths) -> Cost:
    count = math.prod(totals.shape)
    own = multiply_cost(count) + sign_cost(count, widths.threshold)
    if not isinstance(r, Private):
        own += multiply_cost(count)
    return arith_cost(totals, q, r) + own if count else Cost()


def _correct_reject(*inputs: Value, widths: Widths) -> Correct:
    def correct(party: SimulatedParty, made: Bool, wanted: Bool) -> None:
        correct_sign(party, made, wanted, widths.threshold)

    return correct


reject = protocol_op(
    "reject",
    reference=_reject_reference,
    two_party=_reject_two_party,
    cost=_reject_cost,
    simulate=uniform_messages(_reject_two_party, _correct_reject),
)
"""Whether each draft is rejected: shared bits [drafts].

chosen, totals: the weights W_d (a share mod 2^widths.chosen will do) and Z; q: the client's
integers Q_d >= 1; r: random integers r', joint or the client's own. All of one shape."""


# ---- residual


def _residual_two_party(party: Party, weights: Value, q: Value, *, widths: Widths) -> Arith:
    """Compute the residual. 1. Q_x Z. 2. The sign of W_x 2^draft - Q_x Z. 3. Zero where
    negative.
    """
    share, q_ = as_arith(party, weights), as_arith(party, q).words
    totals = np.broadcast_to(share.words.sum(axis=-1, keepdims=True), share.shape)
    # 1.
    taken = multiply_words(party, q_, totals)
    # 2.
    rest = (share.words << np.uint64(widths.draft)) - taken
    flip = np.uint64(1) if party.rank == CLIENT else np.uint64(0)
    positive = sign_words(party, rest, widths.residual) ^ flip
    # 3.
    words = mux_words(party, positive.reshape(-1), rest.reshape(-1))
    return Arith(words.reshape(share.shape), share.dtype, share.frac_bits)


def _residual_reference(weights: Any, q: Any, *, widths: Widths) -> Any:
    kind = weights.dtype
    totals = weights.sum(axis=-1, keepdims=True)
    rest = weights * kind.type(2**widths.draft) - q.astype(kind) * totals
    return rest * (rest >= 0)


def _residual_cost(weights: Value, q: Value, *, widths: Widths) -> Cost:
    count = math.prod(weights.shape)
    own = multiply_cost(count) + sign_cost(count, widths.residual) + mux_cost(count)
    return arith_cost(weights, q) + own


def _correct_residual(weights: Value, q: Value, *, widths: Widths) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        correct_mux(party, wanted.words - made.words)

    return correct


residual = protocol_op(
    "residual",
    reference=_residual_reference,
    two_party=_residual_two_party,
    cost=_residual_cost,
    simulate=uniform_messages(_residual_two_party, _correct_residual),
)
"""Shares of max(0, W_x 2^draft - Q_x Z), of weights [rows, vocab] and the client's integers q (same
shape; a row of zeros gives W_x 2^draft)."""


# ---- locate


def _locate_two_party(party: Party, weights: Value, u: Value, *, draw: int, total: int) -> Bool:
    """Compute the bits [t < P_x]. 1. Prefix sums and the total, locally. 2. t = u S. 3. The sign of
    t - P_x 2^draw.
    """
    share, u_ = as_arith(party, weights), as_arith(party, u).words
    # 1.
    prefix = np.cumsum(share.words, axis=-1, dtype=np.uint64)
    # 2.
    t = multiply_words(party, u_, prefix[:, -1])
    # 3.
    above = sign_words(party, t[:, None] - (prefix << np.uint64(draw)), total + draw + 1)
    return Bool(above, np.dtype(np.bool_), 0, 1)


def _locate_reference(weights: Any, u: Any, *, draw: int, total: int) -> Any:
    xp = jnp if isinstance(weights, jax.Array) else np
    kind = weights.dtype
    prefix = xp.cumsum(weights, axis=-1)
    return u.astype(kind)[:, None] * prefix[:, -1:] < prefix * kind.type(2**draw)


def _locate_cost(weights: Value, u: Value, *, draw: int, total: int) -> Cost:
    rows, n = weights.shape
    return arith_cost(weights, u) + multiply_cost(rows) + sign_cost(rows * n, total + draw + 1)


def _correct_locate(weights: Value, u: Value, *, draw: int, total: int) -> Correct:
    def correct(party: SimulatedParty, made: Bool, wanted: Bool) -> None:
        correct_sign(party, made, wanted, total + draw + 1)

    return correct


locate = protocol_op(
    "locate",
    reference=_locate_reference,
    two_party=_locate_two_party,
    cost=_locate_cost,
    simulate=uniform_messages(_locate_two_party, _correct_locate),
)
"""Shared bits [u S < P_x 2^draw] of weights [rows, n] with prefix sums P and totals S below
2^total, and joint random integers u [rows] of `draw` bits; total + draw <= 62."""
