"""GPT-2 as secure functions: prompt and drafts belong to the client, weights to the provider.

Each function is `models.gpt2` with verification (`protocols.verification`) on top; which parts
become SPU segments, which the client's or the provider's own plaintext work, follows from the
owners of the inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.cache import Block, causal, empty_block, hidden_below, write_rows
from models.gpt2 import (
    GPT2Config,
    embed_one_hot,
    embed_one_hots,
    embed_tokens,
    head,
    hidden_states,
    past_blocks,
    step,
)
from protocols.verification import Verifier
from spu_llm.secure import SecureFunction
from spu_llm.values import Owner


class Place(NamedTuple):
    """Where a step's tokens stand, when that is the client's secret."""

    positions: Any  # int32 [d + 1]: in the text
    visible: Any  # bool [capacity]: the rows of the shared block that hold the text so far


class SecureGPT2(NamedTuple):
    """The programs of one decoding session. `mine` and `theirs` are the client's and the provider's
    input to the verifier; `place` is None where public `length` says all.

    prefix(params, tokens [n], public)
        -> the public tokens' block, the provider's own plaintext work.
    prefill(params, tokens [n], mine, theirs, inverse_temperature, prefix)
        -> outcome to the client, accepted count (0), shared block of `capacity` positions.
    decode(params, tokens [d + 1], place, mine, theirs, shared, length, inverse_temperature, prefix)
        -> outcome to the client, accepted count, shared block.
    """

    prefix: SecureFunction
    prefill: SecureFunction
    decode: SecureFunction


def build(config: GPT2Config, capacity: int, verifier: Verifier) -> SecureGPT2:
    """Secure programs for a model of this shape and a shared block of `capacity` positions."""

    def embed(params: Any, tokens: Array, start: Array | int) -> Array:
        one_hot = jax.nn.one_hot(tokens, config.vocab_size, dtype=jnp.float32)
        positions = jnp.minimum(start + jnp.arange(tokens.shape[0]), config.n_positions - 1)
        return embed_one_hot(params, one_hot, positions)

    def prefix(params: Any, tokens: Array) -> Block:
        n = tokens.shape[0]
        x = embed_tokens(params, tokens, jnp.arange(n))
        return hidden_states(params, config, x, [], causal(n))[1]

    def prefill(
        params: Any,
        tokens: Array,
        mine: Any,
        theirs: Any,
        inverse_temperature: Array,
        prefix: Block | None,
    ) -> tuple[Any, Array, Block]:
        n = tokens.shape[0]
        start = prefix.positions if prefix is not None else 0
        x = embed(params, tokens, start)
        past = past_blocks(prefix, None, None, n)
        rows, prompt = hidden_states(params, config, x, past, causal(n))
        logits = head(params, rows[-1:], inverse_temperature)
        outcome, accepted = verifier.verify(logits, mine, theirs)
        room = empty_block(config.n_layer, config.n_head, capacity, config.head_dim)
        return outcome, accepted, write_rows(room, prompt, jnp.int32(0))

    def decode(
        params: Any,
        tokens: Array,
        place: Place | None,
        mine: Any,
        theirs: Any,
        shared: Block,
        length: Array,
        inverse_temperature: Array,
        prefix: Block | None,
    ) -> tuple[Any, Array, Block]:
        if place is None:
            start = length + (prefix.positions if prefix is not None else 0)
            x, visible = embed(params, tokens, start), None
        else:
            one_hots = (
                jax.nn.one_hot(tokens, config.vocab_size, dtype=jnp.float32),
                jax.nn.one_hot(place.positions, config.n_positions, dtype=jnp.float32),
            )
            x = embed_one_hots(params, *one_hots)
            visible = hidden_below(place.visible, tokens.shape[0])
        logits, shared = step(
            params, config, x, prefix, shared, length, visible=visible, scale=inverse_temperature
        )
        outcome, accepted = verifier.verify(logits, mine, theirs)
        return outcome, accepted, shared

    C, P, J, X = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT, Owner.PUBLIC  # noqa: N806
    return SecureGPT2(
        SecureFunction(prefix, (P, X), "prefix"),
        SecureFunction(prefill, (P, C, C, P, X, P), "prefill"),
        SecureFunction(decode, (P, C, C, C, P, J, X, X, P), "decode"),
    )
