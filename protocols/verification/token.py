"""Verification that gives the client its tokens and nothing else of the private model.

Speculative sampling (Leviathan et al., ICML'23) as POST verifies it, with the leaks of its two
algorithms closed (Li et al., Algorithms 1 and 2):

1. Both parties bring the randomness: r is not of the client's choice. (The distributions q are;
   what may be asked with false ones is in `protocols.verification.variants`.)
2. Select the weight of every draft obliviously; test it against r q(d) Z without a division.
3. Prefix-or: only the first rejection k is opened, not the bits after it.
4. The residual max(0, p_k - q_k) stays shared. The token comes out of a tree of two wide levels
   over its prefix sums: the client learns in which of ~sqrt(V) blocks it lies, takes that block by
   oblivious transfer, and learns where in it: together, the token.

Simulation. All messages but the openings are those of ops that give nothing (their simulators are
under test); three openings remain. The bits of step 3 are 0^k 1^(d-k): k is the number of emitted
tokens less one. The bits of step 4 are 0^j 1^.. twice: block and place, the token itself. So the
client's view follows from the emitted tokens, and the provider's from k. With hidden progress, as
is the default of a completion, the bits of step 3 are opened to the client alone, and row k is
taken by oblivious transfer: nothing is opened to the provider. (A provider that shifts its share in
step 2 reads an answer to a question of its choice from an opened stop, and nothing from a hidden
one: `protocols.verification.variants`.)

If all of the residual was rounded away (p_k and q_k agree to about 2^-20), no block is found, and
the draft is the token: then the bits of step 4 follow from the token being the rejected draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from protocols.arithmetic.joint import joint_bits
from protocols.arithmetic.truncate import truncate
from protocols.bits.convert import to_arith
from protocols.functions.exponential import hidden_weights
from protocols.ot.select import select
from protocols.verification.distribution import Sampling, Streams, draft
from protocols.verification.progress import open_stop, row_at
from protocols.verification.sampling import Widths, locate, reject, residual
from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.values import Owner


class Randomness(NamedTuple):
    """One party's secret part of a step's joint randomness, int32."""

    accept: Any  # [drafts]
    draw: Any  # [2]


class ClientInput(NamedTuple):
    drafts: Any  # int32 [drafts]
    q: Any  # int32 [drafts + 1, vocab]: in multiples of 2^-draft; the last row is zero
    randomness: Randomness


class TokenOutcome(NamedTuple):
    accepted: Any  # int32 [lane]
    token: Any  # int32 [lane]; -1: the draft that was rejected


@dataclass(frozen=True)
class Token:
    """The default variant. `hide_progress`: the provider does not learn how many drafts stay."""

    sampling: Sampling
    hide_progress: bool = False
    name: str = "token"

    def client_shapes(self, drafts: int, vocab: int) -> ClientInput:
        return ClientInput(
            jax.ShapeDtypeStruct((drafts,), np.int32),
            jax.ShapeDtypeStruct((drafts + 1, vocab), np.int32),
            self.provider_shapes(drafts, vocab),
        )

    def provider_shapes(self, drafts: int, vocab: int) -> Randomness:
        return Randomness(*(jax.ShapeDtypeStruct((n,), np.int32) for n in (drafts, 2)))

    def propose(
        self, logits: np.ndarray, position: int, streams: Streams
    ) -> tuple[int, np.ndarray]:
        return draft(self.sampling, logits, lambda: float(streams.drafting.uniform(())))

    def client_input(
        self, drafts: Sequence[int], q: np.ndarray, position: int, streams: Streams
    ) -> ClientInput:
        distributions = np.concatenate([q, np.zeros((1, q.shape[1]))]) * 2.0**Widths.draft
        secret = _secret(len(drafts), streams.sampling)
        return ClientInput(np.array(drafts, np.int32), distributions.astype(np.int32), secret)

    def provider_input(self, drafts: int, vocab: int, stream: Prg) -> Randomness:
        return _secret(drafts, stream)

    def verify(
        self, logits: Array, client: ClientInput, provider: Randomness
    ) -> tuple[TokenOutcome, Array]:
        weights = hidden_weights(logits, bits=self.sampling.difference_bits)
        return verify(weights, client, provider, hide_progress=self.hide_progress)

    def resolve(
        self,
        outcome: TokenOutcome,
        drafts: Sequence[int],
        q: np.ndarray,
        uniform: Callable[[], float],
    ) -> tuple[int, int]:
        """Return the number of accepted drafts and the token after them; raise WireError for a
        place where there is no token, which an honest provider opens at no time.
        """
        k, token = int(outcome.accepted), int(outcome.token)
        if token >= q.shape[-1]:
            raise WireError(f"the token stands at {token}, where there is no token")
        if token < 0 and k == len(drafts):
            raise WireError("the row that the token is drawn from has no weight at all")
        return k, token if token >= 0 else drafts[k]


def _secret(drafts: int, stream: Prg) -> Randomness:
    words = stream.words((drafts + 2,)).view(np.int64).astype(np.int32)
    return Randomness(words[:drafts], words[drafts:])


def verify(
    weights: Array,
    client: ClientInput,
    provider: Randomness,
    *,
    hide_progress: bool = False,
    widths: Widths | None = None,
) -> tuple[TokenOutcome, Array]:
    """Verify drafts by shared weights [lane, drafts + 1, vocab] of at most one (module docstring).

    Return the client's outcome and the accepted counts: public, or the client's with
    `hide_progress`. `widths`: of other weights.
    """
    lanes, rows, vocab = weights.shape
    count = rows - 1
    widths = widths or Widths.of_weights(vocab)
    of_client, of_provider = client.randomness, provider
    if count:
        # 2. W_d, Z and r; rejected unless r q(d) Z < W_d.
        drafted = weights[:, :count].reshape(lanes * count, vocab)
        chosen = select(drafted, client.drafts.reshape(-1), bits=widths.chosen)
        totals = jnp.sum(drafted, axis=-1)
        secrets = of_client.accept.reshape(-1), of_provider.accept.reshape(-1)
        r = to_arith(joint_bits(*secrets, bits=widths.accept))
        q_of_draft = jnp.take_along_axis(client.q[:, :count], client.drafts[..., None], axis=-1)
        rejected = reject(chosen, totals, q_of_draft.reshape(-1), r, widths=widths)
        # 3. The first rejection k, or `count`.
        k = open_stop(rejected.reshape(lanes, count), hide=hide_progress)
        row = row_at(weights, k, hide=hide_progress)
        # 4. max(0, W_k - q_k Z), with room for the fraction that draws from it.
        row = residual(row, client.q[jnp.arange(lanes), k], widths=widths)
        excess = widths.draft
    else:
        k, row, excess = jnp.zeros(lanes, jnp.int32), weights[:, 0], 0
    if shift := widths.shift(excess):
        row = truncate(row, shift=shift, how="unbiased", bits=64)
    total = widths.total + excess - shift
    u = to_arith(joint_bits(of_client.draw, of_provider.draw, bits=widths.draw))
    return TokenOutcome(k, _draw(row, u, draw=widths.draw, total=total)), k


def _draw(rows: Array, u: Array, *, draw: int, total: int) -> Array:
    """Draw the client's tokens [lane] from shared weights [lane, vocab] at joint fractions u
    [lane, 2]; -1 without weight.
    """
    lanes, vocab = rows.shape
    size = math.isqrt(vocab - 1) + 1
    blocks = -(-vocab // size)
    unused = jnp.zeros((lanes, blocks * size - vocab), rows.dtype)
    table = jnp.concatenate([rows, unused], axis=-1).reshape(lanes, blocks, size)

    def place(weights: Array, u: Array, label: str) -> Array:
        drawn = locate(weights, u, draw=draw, total=total)
        above = reveal(drawn, to=Owner.CLIENT, label=label)
        return weights.shape[-1] - jnp.sum(above.astype(jnp.int32), axis=-1)

    block = place(jnp.sum(table, axis=-1), u[:, 0], "block of the token")
    known = jnp.minimum(block, blocks - 1)
    inside = select(table, known)
    token = known * size + place(inside, u[:, 1], "place of the token")
    return jnp.where(block < blocks, token, -1)
