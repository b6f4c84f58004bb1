"""GPT-2 as secure functions: prompt and drafts are the client's, folded weights the provider's.

Each function is `models.gpt2` with verification (`protocols.verification.variants`) on top; which
parts become SPU segments, which the client's or the provider's own plaintext work, follows from the
owners of the inputs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.cache import Block, empty_block, lengthened, packed, see, see_hidden
from models.gpt2 import GPT2Config, embed_one_hot, embed_one_hots, embed_tokens, head, step
from protocols.functions.in_range import when_in_range
from protocols.verification.variants import Verifier
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.values import Owner


class Place(NamedTuple):
    """Where a step's tokens stand, when that is the client's secret."""

    positions: Any  # int32 [d + 1]: in the text
    visible: Any  # bool [positions]: the rows of the shared block that hold the text so far


class SecureGPT2(NamedTuple):
    """The programs of one decoding session. `mine` and `theirs` are the client's and the provider's
    input to the verifier; `place` is None where public `length` says all. Before anything else is
    opened, both learn whether an activation left the range that functions on shares hold for; if
    so, prefill and decode end with a RangeError.

    prefix(weights, tokens [n], public)
        -> the public tokens' block, the provider's own plaintext work.
    prefill(weights, tokens [n], mine, theirs, prefix)
        -> outcome to the client, accepted count (0), shared block of `capacity` positions.
    decode(weights, tokens [d + 1], place, mine, theirs, shared, length, prefix)
        -> outcome to the client, accepted count, shared block.
    """

    prefix: SecureFunction
    prefill: SecureFunction
    decode: SecureFunction


@functools.cache
def lengthen(positions: int) -> SecureFunction:
    """(shared) -> the shared block with room for `positions` rows."""

    def work(shared: Block) -> Block:
        return lengthened(shared, positions)

    return SecureFunction(work, (Owner.JOINT,), f"room for {positions} rows")


@functools.cache
def pack(positions: int) -> SecureFunction:
    """(kept [m], shared) -> a shared block of `positions` rows that begins with the rows `kept`,
    the client's secret (`models.cache.packed`).
    """

    def work(kept: Array, shared: Block) -> Block:
        return packed(shared, kept, positions)

    return SecureFunction(work, (Owner.CLIENT, Owner.JOINT), f"pack into {positions} rows")


def build(
    config: GPT2Config, capacity: int, verifier: Verifier, scale: float = 1.0
) -> SecureGPT2:
    """Secure programs for a model of this shape; the prefill makes a shared block of `capacity`
    positions. `scale` (an inverse temperature) multiplies the logits.
    """

    def room(positions: int) -> Block:
        return empty_block(config.n_layer, config.n_head, positions, config.head_dim)

    def embed(weights: Any, tokens: Array, start: Array | int) -> Array:
        one_hot = jax.nn.one_hot(tokens, config.vocab_size, dtype=jnp.float32)
        positions = jnp.minimum(start + jnp.arange(tokens.shape[0]), config.n_positions - 1)
        return embed_one_hot(weights, one_hot, positions)

    def prefix(weights: Any, tokens: Array) -> Block:
        n = tokens.shape[0]
        x = embed_tokens(weights, tokens, jnp.arange(n))
        return step(weights, config, x, room(n), 0, see(0, n, n))[1]

    def prefill(
        weights: Any, tokens: Array, mine: Any, theirs: Any, prefix: Block | None
    ) -> tuple[Any, Array, Block]:
        n = tokens.shape[0]
        with jax.named_scope("embedding"):
            x = embed(weights, tokens, prefix.positions if prefix is not None else 0)
        visible = see(0, n, capacity)
        rows, shared, outside = step(weights, config, x, room(capacity), 0, visible, prefix, scale)
        return *_judge(weights, rows[-1:], outside, mine, theirs), shared

    def decode(
        weights: Any,
        tokens: Array,
        place: Place | None,
        mine: Any,
        theirs: Any,
        shared: Block,
        length: Array,
        prefix: Block | None,
    ) -> tuple[Any, Array, Block]:
        n = tokens.shape[0]
        with jax.named_scope("embedding"):
            if place is None:
                start = length + (prefix.positions if prefix is not None else 0)
                x, visible = embed(weights, tokens, start), see(length, n, shared.positions)
            else:
                one_hots = (
                    jax.nn.one_hot(tokens, config.vocab_size, dtype=jnp.float32),
                    jax.nn.one_hot(place.positions, config.n_positions, dtype=jnp.float32),
                )
                x = embed_one_hots(weights, *one_hots)
                visible = see_hidden(place.visible, length, n)
        rows, shared, outside = step(weights, config, x, shared, length, visible, prefix, scale)
        return *_judge(weights, rows, outside, mine, theirs), shared

    def _judge(
        weights: Any, rows: Array, outside: Array, mine: Any, theirs: Any
    ) -> tuple[Any, Array]:
        logits = when_in_range(outside, head(weights, rows, scale))
        with jax.named_scope("verification"):
            return verifier.verify(logits, mine, theirs)

    C, P, J, X = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT, Owner.PUBLIC  # noqa: N806
    return SecureGPT2(
        SecureFunction(prefix, (P, X), "prefix"),
        SecureFunction(prefill, (P, C, C, P, P), "prefill"),
        SecureFunction(decode, (P, C, C, C, P, J, X, P), "decode"),
    )
