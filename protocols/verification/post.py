"""POST: secure verification of drafted tokens, as published, and the baseline it is measured by.

Li et al., "An Efficient Private GPT Never Autoregressively Decodes". Both variants open to the
client, each step, every rejection bit and one whole row of the private distribution, and compare
with thresholds r q of the client's own choice.

post   Algorithms 1 and 2: the weight of each draft is selected by masked oblivious transfer, then
       d comparisons, then an oblivious transfer of the row.
naive  The paper's baseline: every token of the vocabulary is compared, then the client selects d of
       d V results.

In the division-free form: weights W with the total Z stand for p = W / Z, and a draft d stays when
(r q(d)) Z < W_d. The comparison is strict (the paper's tie rule accepts tokens whose encoded
probability is zero). Thresholds are integers, as in `protocols.verification.sampling`.

Simulation. All messages but the openings are those of ops that give nothing. The client's openings
are the d rejection bits and row k, from which its view follows; nothing follows from its tokens
alone, which is the leak. A row's words are opened as they are, rounding included. The provider gets
no opening here; the driver tells it k.

Top-k and top-p (`Sampling.truncated`). Where the row's total after truncation is not known, accept
by p, and ask besides whether d is among the tokens T that truncation leaves: fewer than `top_k`
tokens are likelier than d, and they hold less than `top_p` of the mass. A draft outside T ends the
step, too. The client sees the row of that place and draws again from p restricted to T. A token
drawn from p and, outside T, drawn anew from p given T has the distribution p given T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from protocols.bits.compare import sign
from protocols.bits.convert import to_arith
from protocols.bits.logic import prefix_or
from protocols.bits.mux import mux
from protocols.functions.exponential import softmax_weights
from protocols.ot.select import select
from protocols.verification.distribution import Sampling, Streams, draft, draw, residual
from protocols.verification.sampling import Widths, reject
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import Owner

# Signed bits of a weight of at most one and a few units, and of a difference of two.
_WEIGHT_BITS = SpuConfig().frac_bits + 3


class ClientInput(NamedTuple):
    drafts: Any  # int32 [drafts]
    q: Any  # int32: multiples of 2^-draft, of every draft [drafts], or (naive) rows [drafts, vocab]
    r: Any  # int32 [drafts]: r = (2 r' + 1) / 2^(accept + 1)


class PostOutcome(NamedTuple):
    rejected: Any  # bool [lane, drafts]
    outside: Any  # bool, too: not among the tokens that top-k and top-p leave; or None
    row: Any  # float32 [lane, vocab]: weights of the first place that ended the step


@dataclass(frozen=True)
class Post:
    """`post`, or the baseline `naive`."""

    sampling: Sampling
    naive: bool = False

    @property
    def name(self) -> str:
        return "naive" if self.naive else "post"

    @property
    def hide_progress(self) -> bool:
        return False

    def client_shapes(self, drafts: int, vocab: int) -> ClientInput:
        each = jax.ShapeDtypeStruct((drafts,), np.int32)
        rows = jax.ShapeDtypeStruct((drafts, vocab), np.int32)
        return ClientInput(each, rows if self.naive else each, each)

    def provider_shapes(self, drafts: int, vocab: int) -> None:
        return None

    def propose(
        self, logits: np.ndarray, position: int, streams: Streams
    ) -> tuple[int, np.ndarray]:
        return draft(self.sampling, logits, lambda: float(streams.drafting.uniform(())))

    def client_input(
        self, drafts: Sequence[int], q: np.ndarray, position: int, streams: Streams
    ) -> ClientInput:
        """Make the client's input, with fresh uniform r (Algorithm 2, line 1)."""
        count, vocab = q.shape
        distributions = (q * 2.0**Widths.draft).astype(np.int32)
        of_drafts = distributions if self.naive else distributions[np.arange(count), list(drafts)]
        accept = Widths.of_weights(vocab).accept
        r = streams.sampling.uniform((count,)) * 2**accept
        return ClientInput(np.array(drafts, np.int32), of_drafts, r.astype(np.int32))

    def provider_input(self, drafts: int, vocab: int, stream: Prg) -> None:
        return None

    def verify(
        self, logits: Array, client: ClientInput, provider: None
    ) -> tuple[PostOutcome, Array]:
        weights = softmax_weights(logits, bits=self.sampling.difference_bits)
        return verify(weights, client, self.sampling, naive=self.naive)

    def resolve(
        self,
        outcome: PostOutcome,
        drafts: Sequence[int],
        q: np.ndarray,
        uniform: Callable[[], float],
    ) -> tuple[int, int]:
        """Draw from max(0, p - q), or from p when nothing was rejected (Algorithm 1, line 8)."""
        stops = np.asarray(outcome.rejected)
        if outcome.outside is not None:
            stops = stops | np.asarray(outcome.outside)
        k = int(first_rejection(stops))
        weights = np.maximum(np.asarray(outcome.row, np.float64), 0.0)
        kept = self.sampling.restricted(weights)
        if k == len(drafts) or not outcome.rejected[k]:
            return k, draw(kept, uniform())
        token = draw(residual(weights / weights.sum(), q[k]), uniform())
        if not kept[token]:
            token = draw(kept, uniform())
        return k, token


def first_rejection(rejected: Any) -> Array:
    """Return the first rejection k, or the number of drafts: int32 [...] of bool [..., d]."""
    return jnp.sum(jnp.cumprod(1 - jnp.asarray(rejected, jnp.int32), axis=-1), axis=-1)


def verify(
    weights: Array,
    client: ClientInput,
    sampling: Sampling,
    *,
    naive: bool = False,
    widths: Widths | None = None,
) -> tuple[PostOutcome, Array]:
    """Verify drafts by shared weights [lane, drafts + 1, vocab] of at most one.

    Return the client's outcome and the accepted counts, which are the client's, too. `widths`: of
    other weights.
    """
    lanes, places, vocab = weights.shape
    count = places - 1
    widths = widths or Widths.of_weights(vocab)
    if not count:  # standard decoding: nothing to verify, one row to open
        row = _open_row(weights[:, 0])
        return PostOutcome(client.drafts.astype(bool), None, row), jnp.zeros(lanes, jnp.int32)
    rows = weights[:, :count].reshape(lanes * count, vocab)
    totals = jnp.sum(rows, axis=-1)
    drafts, r = client.drafts.reshape(-1), client.r.reshape(-1)
    # Select, then compare; or compare everything, then select.
    if naive:
        everywhere = jnp.broadcast_to(totals[:, None], rows.shape)
        r = jnp.broadcast_to(r[:, None], rows.shape)
        q = client.q.reshape(rows.shape)
        bits = select(reject(rows, everywhere, q, r, widths=widths), drafts)
    else:
        chosen = select(rows, drafts, bits=widths.chosen)
        bits = reject(chosen, totals, client.q.reshape(-1), r, widths=widths)
    rejected = reveal(bits, to=Owner.CLIENT, label="rejection bits").reshape(lanes, count)
    outside = None
    stops = rejected
    if sampling.truncated:
        outside = _outside(rows, totals, drafts, sampling, widths).reshape(lanes, count)
        stops = rejected | outside
    # Carry: the client picks row k obliviously and learns all of it.
    k = first_rejection(stops)
    row = select(weights, k, bits=_WEIGHT_BITS)
    return PostOutcome(rejected, outside, _open_row(row)), k


def _outside(
    rows: Array, totals: Array, drafts: Array, sampling: Sampling, widths: Widths
) -> Array:
    """Open to the client which drafts top-k or top-p cut off; see `Sampling.keeps` for ties."""
    vocab = rows.shape[1]
    of_draft = select(rows, drafts)
    likelier = sign(of_draft[:, None] - rows, bits=_WEIGHT_BITS)
    cuts = []
    if sampling.top_k:
        # At most top_k - 1 are likelier.
        rank = jnp.sum(to_arith(likelier), axis=-1)
        most = jnp.int32(min(sampling.top_k, vocab) - 1)
        cuts.append(sign(most - rank, bits=vocab.bit_length() + 1))
    if sampling.top_p < 1:
        # The likelier ones hold more than top_p of the mass.
        mass = jnp.sum(mux(likelier, rows), axis=-1)
        cuts.append(sign(sampling.top_p * totals - mass, bits=widths.total + 1))
    cut = cuts[0] if len(cuts) == 1 else prefix_or(jnp.stack(cuts, axis=-1))[:, -1]
    return reveal(cut, to=Owner.CLIENT, label="drafts outside top-k or top-p")


def _open_row(row: Array) -> Array:
    return reveal(row, to=Owner.CLIENT, label="row of the distribution")
