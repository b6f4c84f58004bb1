"""A model as secure functions: prompt and drafts are the client's, folded weights the provider's.

Each function is a forward (`models.family`) with a judge of its logits on top, as verification of
drafts is (`protocols.verification.variants`). Which parts become SPU segments, which the client's
or the provider's own plaintext work, follows from the owners of the inputs.

Of a split model (`models.split`) the forward is the middle alone: the client puts in rows of the
residual stream instead of tokens, and gets those that the middle makes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import (
    FEW,
    HIDDEN,
    Block,
    Prefix,
    Rows,
    begun,
    lengthened,
    packed,
    padding,
    see,
)
from models.family import (
    ModelConfig,
    Outside,
    Params,
    check_ranges,
    family_of,
    one_row,
    weight_shapes,
)
from models.split import Split, check_middle
from protocols.arithmetic.known_rows import known_rows
from protocols.functions.in_range import when_in_range
from protocols.verification.variants import Verifier
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.reveal import reveal
from spu_llm.core.values import PROVIDER, Owner
from spu_llm.runtime.session import Session, private_tree


@dataclass(frozen=True)
class Layout:
    """Public sizes of a decoding session.

    prompts: tokens of every lane. sizes: own rows that the shared block has, one after the other;
    it starts with the first of them. live_rows: that hold the text at most. hidden: whether only
    the client knows which they are; packs: whether the block may be full then before the text ends,
    and is packed. branches: of a step's rows after the first one, as `text_rows.tree` has them;
    each is judged by itself. scale: what logits are multiplied by. prefix: rows before every lane's
    prompt that the provider knows in the clear; of them, public: how many, the first ones, hold
    tokens that the client knows, too; padded: how many, the first after these, may hold no text.
    split: where the model is split, if the client computes its ends; then nothing comes before a
    prompt, and logits are the client's.
    """

    config: ModelConfig
    prompts: tuple[int, ...]
    sizes: tuple[int, ...]
    live_rows: int = 0
    hidden: bool = False
    packs: bool = False
    branches: int = 1
    scale: float = 1.0
    prefix: int = 0
    padded: int = 0
    public: int = 0
    split: Split | None = None

    @property
    def lanes(self) -> int:
        return len(self.prompts)

    @property
    def judged(self) -> int:
        """Return how many sequences the judge decides on: every branch of every lane."""
        return self.lanes * self.branches

    def drafts(self, count: int) -> int:
        """Return how many drafts a branch has, in `count` rows of a lane."""
        return (count - 1) // self.branches

    @property
    def held(self) -> ModelConfig:
        """Return the shape of what the provider holds, and of the cache: with the middle's blocks
        alone where the model is split.
        """
        return self.config if self.split is None else self.split.held(self.config)

    def rows_in(self, count: int) -> jax.ShapeDtypeStruct:
        """Return the shape of what the client puts in for `count` rows of every lane: tokens, int32
        [lane, count], or rows of the residual stream, float32 [lane, count, d].
        """
        if self.split is None:
            return jax.ShapeDtypeStruct((self.lanes, count), np.int32)
        return jax.ShapeDtypeStruct((self.lanes, count, self.config.width), np.float32)

    @property
    def inside(self) -> int:
        """Return how many rows of the prefix stand in the shared block, before its own: all, or
        none.
        """
        return self.prefix if self.prefix <= FEW else 0

    @property
    def told_rows(self) -> int:
        """Return for how many first rows of the prefix the provider says whether they hold text."""
        return self.public + self.padded if self.padded else 0


class Text(NamedTuple):
    """What stands before every lane's prompt: private values of the provider."""

    tokens: Any  # int32 [n], of all rows, text last
    hidden: Any  # int32 [m], of the first rows: HIDDEN where there is no text


class Place(NamedTuple):
    """Where a step's rows stand: public, or the client's secret."""

    positions: Any  # int32 [lane, n]: in the text
    visible: Any  # bool [lane, n, row of the cache]


@dataclass(frozen=True)
class KeepRows:
    """Stands for a judge where the last rows of a forward, before the head, are wanted as shares
    for a function of their own. Nothing at all is opened, not even whether activations left their
    ranges: that function must hold for every word of the ring (`protocols.dp.clip`).
    """

    name: str = "rows"
    hide_progress: bool = False

    def client_shapes(self, drafts: int, vocab: int) -> None:
        return None

    def provider_shapes(self, drafts: int, vocab: int) -> None:
        return None


@dataclass(frozen=True)
class OpenRows:
    """Stands for a judge of a split model: rows behind the provider's blocks, which the client
    learns; it decides by itself. float32 [lane, n, d], of all rows of a forward, or where the back
    has no blocks of the prompts' last ones alone.
    """

    hide_progress: bool = False
    name: str = "split"

    def client_shapes(self, drafts: int, vocab: int) -> None:
        return None

    def provider_shapes(self, drafts: int, vocab: int) -> None:
        return None

    def verify(self, rows: Array, client: None, provider: None) -> tuple[Array, None]:
        """Open the rows to the client, as its outcome; nothing becomes public."""
        label = "rows behind the provider's blocks"
        return reveal(rows, to=Owner.CLIENT, label=label), None


Judge = Verifier | KeepRows | OpenRows


class SecureModel(NamedTuple):
    """The programs of one decoding session. `client` and `provider` are the parties' inputs to the
    judge, lane first, or branch by branch within a lane, as its outcomes are. Before anything else
    is opened, both learn whether an activation left the range that functions on shares hold for; if
    so, prefill and decode end with a RangeError.

    prefix(weights, tokens [n], hidden [m])
        -> keys and values of text that the provider knows, its own plaintext work, and its own they
        stay: rows that are opened under masks once for so many queries
        (`protocols.arithmetic.known_rows`); few rows go into the shared block, as shares of which
        the client's are zero. tokens: int32, of all rows; hidden: int32, of the first m, HIDDEN
        where they hold no text.
    prefill(weights, tokens [lane, n], client, provider, prefix, hidden)
        -> outcome to the client, accepted counts (0), shared block, and the prefix, which is opened
        by now. The last row of every lane is judged.
    decode(weights, tokens [lane, n], place, client, provider, shared, at, prefix, hidden)
        -> outcome to the client, accepted counts, shared block with the rows written from `at` on,
        and the prefix.
    extend: as decode, but the last row of every lane alone is judged: text that is there already.

    With `KeepRows` the outcome is shared rows [lane, n, width] for the head, and nothing is opened.
    """

    prefix: SecureFunction
    prefill: SecureFunction
    decode: SecureFunction
    extend: SecureFunction


@functools.cache
def lengthen(positions: int) -> SecureFunction:
    """Return the function (shared) -> the shared block with room for `positions` rows."""

    def work(shared: Block) -> Block:
        return lengthened(shared, positions)

    return SecureFunction(work, (Owner.JOINT,), f"room for {positions} rows")


@functools.cache
def pack(positions: int, inside: int = 0) -> SecureFunction:
    """Return the function (kept [lane, m], shared) -> a shared block of `positions` own rows that
    begins with the rows `kept`, the client's secret (`models.cache.packed`).
    """

    def work(kept: Array, shared: Block) -> Block:
        return packed(shared, kept, positions, inside)

    return SecureFunction(work, (Owner.CLIENT, Owner.JOINT), f"pack into {positions} rows")


@functools.lru_cache(maxsize=8)
def build(layout: Layout, judge: Judge) -> SecureModel:
    """Return the secure programs for sessions of this layout. They are cached with their plans, for
    when they are asked for again.
    """
    if (layout.split is None) == isinstance(judge, OpenRows):
        raise ValueError("rows are opened where the model is split, and nowhere else")
    config, family = layout.config, family_of(layout.config)

    def forward(
        weights: Any, given: Array, at: Rows, cache: Block, before: Prefix | None,
        ends: tuple[int, ...] | None = None,
    ) -> tuple[Array, Block, Outside]:  # fmt: skip
        """Return a forward's rows [L n, d], or [L, d] where `ends` names one row of each lane, the
        cache, and what left its range (`models.family.Family`).
        """
        if layout.split is not None:
            x = given.reshape(-1, config.width)
            rows, shared, outside = family.through(
                weights, layout.held, x, at, cache, first=layout.split.front
            )
            if ends is not None:
                rows = one_row(rows.reshape(layout.lanes, -1, config.width), ends)[:, 0]
            return rows, shared, outside
        x = embed(weights, given, at.positions, before, at.hidden)
        at = at._replace(positions=moved(at.positions, layout.prefix))
        return family.forward(
            weights, config, x, at, cache, before, layout.scale, ends=ends
        )

    def embed(
        weights: Any, tokens: Array, positions: Array, before: Prefix | None, hidden: bool
    ) -> Array:
        # A table of positions that is the provider's secret has a hint of its own: it may follow
        # from that secret alone, not from what the client chooses.
        own: Any = layout.prefix - layout.public
        if before is not None and layout.padded:
            own = own - padding(before.hidden)
        with jax.named_scope("embedding"):
            one_hot = jax.nn.one_hot(tokens.reshape(-1), config.vocab_size, dtype=jnp.float32)
            at = moved(positions, layout.public).reshape(-1)
            return family.embed(weights, config, one_hot, at, start=own, hidden=hidden)

    def prefix(weights: Any, tokens: Array, hidden: Array) -> Block:
        n, m = len(tokens), len(hidden)
        rows, empty_rows = jnp.arange(n, dtype=jnp.int32), padding(hidden)
        # All text next to each other, as far from what comes after it as its last row is.
        rows = jnp.where(rows < layout.public, rows + empty_rows, rows)
        x = family.embed(weights, config, tokens, jnp.maximum(rows - empty_rows, 0))
        # Rows without text see each other, so that their keys and values are numbers, too.
        empty = jnp.concatenate([hidden < 0, jnp.zeros(n - m, bool)])
        visible = see(0, n, n) & (~empty[None, :] | empty[:, None])
        at = Rows(rows[None], visible[None], 0)
        block = family.forward(weights, config, x, at, config.empty_cache(n))[1]
        return jax.tree.map(lambda rows: known_rows(jnp.tile(rows, (layout.lanes, 1, 1))), block)

    def moved(positions: Array, by: int) -> Array:
        return positions + by if by else positions

    def after(prefix: Block | None, hidden: Array | None) -> Prefix | None:
        if prefix is None or hidden is None:
            return None
        return Prefix(None if layout.inside else prefix, layout.prefix, hidden)

    def prefill(
        weights: Any, given: Array, client: Any, provider: Any, prefix: Block | None,
        hidden: Array | None,
    ) -> tuple[Any, Any, Block, Block | None]:  # fmt: skip
        lanes, n = given.shape[:2]
        capacity = layout.sizes[0]
        # Padding comes last, so that no row of the text sees it.
        visible = jnp.broadcast_to(see(0, n, capacity), (lanes, n, capacity))
        positions = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (lanes, n))
        cache = layout.held.empty_cache(layout.inside + capacity, lanes)
        if prefix is not None and layout.inside:
            cache = begun(cache, prefix)
        at, before = Rows(positions, visible, 0), after(prefix, hidden)
        ends: tuple[int, ...] | None = tuple(length - 1 for length in layout.prompts)
        if layout.split is not None and layout.split.back:
            ends = None  # they go through the client's last blocks, all of them
        rows, shared, outside = forward(weights, given, at, cache, before, ends)
        return *judged(weights, rows, outside, client, provider), shared, prefix

    def decode(
        weights: Any, given: Array, place: Place, client: Any, provider: Any,
        shared: Block, at: Array, prefix: Block | None, hidden: Array | None,
    ) -> tuple[Any, Any, Block, Block | None]:  # fmt: skip
        rows, shared, outside = after_shared(weights, given, place, shared, at, prefix, hidden)
        return *judged(weights, rows, outside, client, provider), shared, prefix

    def extend(
        weights: Any, given: Array, place: Place, client: Any, provider: Any,
        shared: Block, at: Array, prefix: Block | None, hidden: Array | None,
    ) -> tuple[Any, Any, Block, Block | None]:  # fmt: skip
        last = (given.shape[1] - 1,) * layout.lanes
        rows, shared, outside = after_shared(
            weights, given, place, shared, at, prefix, hidden, last
        )
        return *judged(weights, rows, outside, client, provider), shared, prefix

    def after_shared(
        weights: Any, given: Array, place: Place, shared: Block, at: Array, prefix: Block | None,
        hidden: Array | None, ends: tuple[int, ...] | None = None,
    ) -> tuple[Array, Block, Outside]:  # fmt: skip
        (positions, visible), before = place, after(prefix, hidden)
        if layout.hidden:
            visible = jnp.where(visible, 0, HIDDEN)
        return forward(weights, given, Rows(positions, visible, at), shared, before, ends)

    def judged(
        weights: Any, rows: Array, outside: Outside, client: Any, provider: Any
    ) -> tuple[Any, Any]:
        if isinstance(judge, KeepRows):
            return rows.reshape(layout.lanes, -1, config.width), None
        if isinstance(judge, OpenRows):
            # No norm follows that would see the last block's own rows: they are sums of rows that
            # one saw and of what weights bound (`models.ranges.Bounds.added`).
            known = when_in_range(outside, rows)
            return judge.verify(known.reshape(layout.lanes, -1, config.width), client, provider)
        logits = when_in_range(outside, family.head(weights, rows, layout.scale))
        by_lane = logits.reshape(layout.lanes, -1, config.vocab_size)
        with jax.named_scope("verification"):
            return judge.verify(by_branch(by_lane, layout.branches), client, provider)

    C, P, J, X = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT, Owner.PUBLIC  # noqa: N806
    placed = C if layout.hidden else X
    return SecureModel(
        SecureFunction(prefix, (P, P, P), "prefix"),
        SecureFunction(prefill, (P, C, C, P, P, P), "prefill"),
        SecureFunction(decode, (P, C, placed, C, P, J, X, P, P), "decode"),
        SecureFunction(extend, (P, C, placed, C, P, J, X, P, P), "extend"),
    )


def by_branch(rows: Array, branches: int) -> Array:
    """Return the rows [lane, 1 + branch * d, ...] of a step's tree as what each branch is judged
    by, [lane * branch, 1 + d, ...]: the first row, and the branch's own. Copies of shares cost
    nothing.
    """
    if branches == 1:
        return rows
    lanes, n, *rest = rows.shape
    drafts = (n - 1) // branches
    first = jnp.expand_dims(rows[:, :1], 1)
    parts = [jnp.broadcast_to(first, (lanes, branches, 1, *rest))]
    if drafts:
        parts.append(rows[:, 1:].reshape(lanes, branches, drafts, *rest))
    return jnp.concatenate(parts, axis=2).reshape(lanes * branches, 1 + drafts, *rest)


def share_weights(
    session: Session, config: ModelConfig, params: Params | None, split: Split | None = None
) -> Any:
    """Return the provider's weights, folded, as private values; the client, who has none, passes
    None. Of a split model they are the middle's blocks. Raise InputError at the provider when
    activations may leave their ranges.
    """
    shapes = held_shapes(config, split)
    return private_tree(session, PROVIDER, _folded, shapes, params, config, split)


def held_shapes(config: ModelConfig, split: Split | None = None) -> Any:
    """Return shapes and dtypes of what a provider holds: folded weights, or the middle's blocks."""
    whole = weight_shapes(config)
    return whole if split is None else split.parts(whole)[1]


def share_text(session: Session, layout: Layout, tokens: Sequence[int]) -> Text | None:
    """Return `tokens`, which stand before every prompt, the public ones first, as private values;
    only the provider has to bring them. None where the layout has no rows for them.
    """
    if not layout.prefix:
        return None
    shape = jax.ShapeDtypeStruct
    shapes = Text(shape((layout.prefix,), np.int32), shape((layout.told_rows,), np.int32))
    text: Text = private_tree(session, PROVIDER, _padded, shapes, layout, tokens)
    return text


def _padded(layout: Layout, tokens: Sequence[int]) -> Text:
    empty, public = layout.prefix - len(tokens), layout.public
    if not 0 <= empty <= layout.padded:
        raise ValueError(f"{len(tokens)} tokens do not fill {layout.prefix} rows of a prefix")
    of_own = np.arange(layout.told_rows) - public
    hidden = np.where((of_own >= 0) & (of_own < empty), HIDDEN, 0)
    filled = [*tokens[:public], *[0] * empty, *tokens[public:]]
    return Text(np.array(filled, np.int32), hidden.astype(np.int32))


def _folded(params: Params, config: ModelConfig, split: Split | None) -> Any:
    weights = family_of(config).fold(params, config)
    if split is None:
        check_ranges(weights, config)
        return weights
    middle = split.parts(weights)[1]
    check_middle(middle, config, split)
    return middle
