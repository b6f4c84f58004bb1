"""A model as secure functions: prompt and drafts are the client's, folded weights the provider's.

Each function is a forward (`models.family`) with a judge of its logits on top, as verification of
drafts is (`protocols.verification.variants`). Which parts become SPU segments, which the client's
or the provider's own plaintext work, follows from the owners of the inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.cache import HIDDEN, Block, Rows, lengthened, packed, rows_after, see
from models.family import ModelConfig, Params, check_ranges, family_of, weight_shapes
from protocols.functions.in_range import when_in_range
from protocols.verification.variants import Verifier
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.values import PROVIDER, Owner
from spu_llm.runtime.session import Session, private_tree


@dataclass(frozen=True)
class Layout:
    """Public sizes of a decoding session.

    prompts: tokens of every lane. sizes: rows that the shared block has, one after the other; it
    starts with the first of them. live_rows: that hold the text at most. hidden: whether only the
    client knows which they are; packs: whether the block may be full then before the text ends, and
    is packed. scale: what logits are multiplied by.
    """

    config: ModelConfig
    prompts: tuple[int, ...]
    sizes: tuple[int, ...]
    live_rows: int = 0
    hidden: bool = False
    packs: bool = False
    scale: float = 1.0

    @property
    def lanes(self) -> int:
        return len(self.prompts)


class Place(NamedTuple):
    """Where a step's rows stand: public, or the client's secret."""

    positions: Any  # int32 [lane, n]: in the text
    visible: Any  # bool [lane, n, row of the cache]


class SecureModel(NamedTuple):
    """The programs of one decoding session. `client` and `provider` are the parties' inputs to the
    judge, lane first, as its outcomes are. Before anything else is opened, both learn whether an
    activation left the range that functions on shares hold for; if so, prefill and decode end with
    a RangeError.

    prefix(weights, tokens [n], public)
        -> the public tokens' block, the provider's own plaintext work.
    prefill(weights, tokens [lane, n], client, provider, prefix)
        -> outcome to the client, accepted counts (0), shared block. The last row of every lane is
        judged.
    decode(weights, tokens [lane, n], place, client, provider, shared, at, prefix)
        -> outcome to the client, accepted counts, shared block with the rows written from `at` on.
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
    """(kept [lane, m], shared) -> a shared block of `positions` rows that begins with the rows
    `kept`, the client's secret (`models.cache.packed`).
    """

    def work(kept: Array, shared: Block) -> Block:
        return packed(shared, kept, positions)

    return SecureFunction(work, (Owner.CLIENT, Owner.JOINT), f"pack into {positions} rows")


@functools.lru_cache(maxsize=8)
def build(layout: Layout, judge: Verifier) -> SecureModel:
    """Secure programs for sessions of this layout; the same ones, with their plans, when asked
    again.
    """
    config, family = layout.config, family_of(layout.config)

    def embed(weights: Any, tokens: Array, positions: Array, hidden: bool = False) -> Array:
        with jax.named_scope("embedding"):
            one_hot = jax.nn.one_hot(tokens.reshape(-1), config.vocab_size, dtype=jnp.float32)
            return family.embed(weights, config, one_hot, positions.reshape(-1), hidden=hidden)

    def prefix(weights: Any, tokens: Array) -> Block:
        n = tokens.shape[0]
        x = family.embed(weights, config, tokens, jnp.arange(n))
        cache = config.empty_cache(n)
        return family.forward(weights, config, x, rows_after(0, n, n), cache)[1]

    def prefill(
        weights: Any, tokens: Array, client: Any, provider: Any, prefix: Block | None
    ) -> tuple[Any, Any, Block]:
        lanes, n = tokens.shape
        capacity = layout.sizes[0]
        # Padding comes last, so that no row of the text sees it.
        visible = jnp.broadcast_to(see(0, n, capacity), (lanes, n, capacity))
        start = prefix.positions if prefix is not None else 0
        positions = jnp.broadcast_to(start + jnp.arange(n, dtype=jnp.int32), (lanes, n))
        x = embed(weights, tokens, positions)
        cache = config.empty_cache(capacity, lanes)
        rows, shared, outside = family.forward(
            weights, config, x, Rows(positions, visible, 0), cache, prefix, layout.scale
        )
        ends = [lane * n + length - 1 for lane, length in enumerate(layout.prompts)]
        last = jnp.concatenate([rows[end : end + 1] for end in ends])
        return *judged(weights, last, outside, client, provider), shared

    def decode(
        weights: Any, tokens: Array, place: Place, client: Any, provider: Any,
        shared: Block, at: Array, prefix: Block | None,
    ) -> tuple[Any, Any, Block]:  # fmt: skip
        start = prefix.positions if prefix is not None else 0
        positions, visible = place.positions + start, place.visible
        if layout.hidden:
            visible = jnp.where(visible, 0.0, HIDDEN)
        x = embed(weights, tokens, positions, layout.hidden)
        rows, shared, outside = family.forward(
            weights, config, x, Rows(positions, visible, at), shared, prefix, layout.scale
        )
        return *judged(weights, rows, outside, client, provider), shared

    def judged(
        weights: Any, rows: Array, outside: Array, client: Any, provider: Any
    ) -> tuple[Any, Any]:
        logits = when_in_range(outside, family.head(weights, rows, layout.scale))
        by_lane = logits.reshape(layout.lanes, -1, config.vocab_size)
        with jax.named_scope("verification"):
            return judge.verify(by_lane, client, provider)

    C, P, J, X = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT, Owner.PUBLIC  # noqa: N806
    placed = C if layout.hidden else X
    return SecureModel(
        SecureFunction(prefix, (P, X), "prefix"),
        SecureFunction(prefill, (P, C, C, P, P), "prefill"),
        SecureFunction(decode, (P, C, placed, C, P, J, X, P), "decode"),
    )


def share_weights(session: Session, config: ModelConfig, params: Params | None) -> Any:
    """The provider's weights, folded, as private values; the client, who has none, passes None.
    InputError at the provider when activations may leave their ranges.
    """
    return private_tree(session, PROVIDER, _folded, weight_shapes(config), params, config)


def _folded(params: Params, config: ModelConfig) -> Any:
    weights = family_of(config).fold(params, config)
    check_ranges(weights, config)
    return weights
