"""A model as secure functions: prompt and drafts are the client's, folded weights the provider's.

Each function is a forward (`models.family`) with a judge of its logits on top, as verification of
drafts is (`protocols.verification.variants`). Which parts become SPU segments, which the client's
or the provider's own plaintext work, follows from the owners of the inputs.

Which part of the model a forward is, `session_shape.ModelPart` says: all of it, or blocks between
rows that the client brings and rows that it gets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import HIDDEN, Block, Prefix, Rows, begun, lengthened, packed, padding, see
from models.family import ModelConfig, Outside, Params, family_of
from protocols.arithmetic.known_rows import known_rows
from protocols.functions.in_range import when_in_range
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.reveal import reveal
from spu_llm.core.settings import OWN
from spu_llm.core.values import PROVIDER, Owner
from spu_llm.runtime.session import Session, private_tree
from spu_llm.systems.decoding.judges import Judge, RowsJudge
from spu_llm.systems.decoding.session_shape import ModelPart, Place, SessionShape, Text, WholeModel


class SecureModel(NamedTuple):
    """The programs of one decoding session. `client` and `provider` are the parties' inputs to the
    judge, lane first, or branch by branch within a lane, as its outcomes are. Before anything else
    is opened, both learn whether an activation left the range that functions on shares hold for; if
    so, prefill and decode end with a RangeError. Where SPU computes forwards, nothing is checked.

    prefix(weights, tokens [n], hidden [m])
        -> keys and values of text that the provider knows, its own plaintext work, and its own they
        stay: rows that are opened under masks once for so many queries
        (`protocols.arithmetic.known_rows`); few rows go into the shared block, as shares of which
        the client's are zero. tokens: int32, of all rows; hidden: int32, of the first m, HIDDEN
        where they hold no text.
    empty(zero [], prefix)
        -> a shared block without rows of its own: the provider's zeros, and its prefix's rows.
    public(weights)
        -> those weights by name that both parties know where progress is hidden
        (`Family.public`), which it opens.
    prefill(weights, tokens [lane, n], client, provider, prefix, hidden)
        -> outcome to the client, accepted counts (0), shared block, and the prefix, which is opened
        by now. The last row of every lane is judged.
    decode(weights, tokens [lane, n], place, client, provider, shared, at, prefix, hidden, public)
        -> outcome to the client, accepted counts, shared block with the rows written from `at` on,
        and the prefix.
    extend: as decode, but the last row of every lane alone is judged: text that is there already.

    A `RowsJudge` takes rows [lane, n, width] in place of logits.
    """

    prefix: SecureFunction
    empty: SecureFunction
    public: SecureFunction
    prefill: SecureFunction
    decode: SecureFunction
    extend: SecureFunction


@functools.cache
def lengthen(positions: int, backend: str = OWN) -> SecureFunction:
    """Return the function (shared) -> the shared block with room for `positions` rows."""

    def work(shared: Block) -> Block:
        return lengthened(shared, positions)

    return SecureFunction(work, (Owner.JOINT,), f"room for {positions} rows", backend)


@functools.cache
def pack(positions: int, inside: int = 0, backend: str = OWN) -> SecureFunction:
    """Return the function (kept [lane, m], shared) -> a shared block of `positions` own rows that
    begins with the rows `kept`, the client's secret (`models.cache.packed`).
    """

    def work(kept: Array, shared: Block) -> Block:
        return packed(shared, kept, positions, inside)

    name = f"pack into {positions} rows"
    return SecureFunction(work, (Owner.CLIENT, Owner.JOINT), name, backend)


@functools.lru_cache(maxsize=8)
def build(layout: SessionShape, judge: Judge) -> SecureModel:
    """Return the secure programs for sessions of this layout. They are cached with their plans, for
    when they are asked for again.
    """
    if layout.part.opens_rows != (isinstance(judge, RowsJudge) and judge.opens_rows):
        raise ValueError("rows are opened where the client goes on behind a part, and nowhere else")
    config, family, part = layout.config, family_of(layout.config), layout.part

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

    def public(weights: Any) -> Params:
        return {
            name: reveal(weights[name], to=Owner.PUBLIC, label=label)
            for name, label in family.public.items()
        }

    def after(prefix: Block | None, hidden: Array | None) -> Prefix | None:
        if prefix is None or hidden is None:
            return None
        return Prefix(None if layout.inside else prefix, layout.prefix, hidden)

    def empty(prefix: Block | None) -> Block:
        cache = part.held(config).empty_cache(layout.inside + layout.sizes[0], layout.lanes)
        return begun(cache, prefix) if prefix is not None and layout.inside else cache

    def of_provider(zero: Array, prefix: Block | None) -> Block:
        # What is public stands in for no share.
        block: Block = jax.tree.map(lambda rows: rows + zero, empty(prefix))
        return block

    def prefill(
        weights: Any,
        given: Array,
        client: Any,
        provider: Any,
        prefix: Block | None,
        hidden: Array | None,
    ) -> tuple[Any, Any, Block, Block | None]:
        lanes, n, capacity = layout.lanes, max(layout.begun), layout.sizes[0]
        # Padding comes last, so that no row of the text sees it.
        visible = jnp.broadcast_to(see(0, n, capacity), (lanes, n, capacity))
        positions = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (lanes, n))
        cache = empty(prefix)
        at, before = Rows(positions, visible, 0, causal=True), after(prefix, hidden)
        ends = part.prompt_ends(layout.begun)
        rows, shared, outside = part.forward(layout, weights, given, at, cache, before, ends)
        return *judged(weights, rows, outside, client, provider), shared, prefix

    def decode(
        weights: Any,
        given: Array,
        place: Place,
        client: Any,
        provider: Any,
        shared: Block,
        at: Array,
        prefix: Block | None,
        hidden: Array | None,
        public: Params,
    ) -> tuple[Any, Any, Block, Block | None]:
        known = {**weights, **public} if public else weights
        rows, shared, outside = after_shared(known, given, place, shared, at, prefix, hidden)
        return *judged(weights, rows, outside, client, provider), shared, prefix

    def extend(
        weights: Any,
        given: Array,
        place: Place,
        client: Any,
        provider: Any,
        shared: Block,
        at: Array,
        prefix: Block | None,
        hidden: Array | None,
        public: Params,
    ) -> tuple[Any, Any, Block, Block | None]:
        known = {**weights, **public} if public else weights
        last = (given.shape[1] - 1,) * layout.lanes
        rows, shared, outside = after_shared(known, given, place, shared, at, prefix, hidden, last)
        return *judged(weights, rows, outside, client, provider), shared, prefix

    def after_shared(
        weights: Any,
        given: Array,
        place: Place,
        shared: Block,
        at: Array,
        prefix: Block | None,
        hidden: Array | None,
        ends: tuple[int, ...] | None = None,
    ) -> tuple[Array, Block, Outside]:
        (positions, visible), before = place, after(prefix, hidden)
        if layout.hidden:
            visible = jnp.where(visible, 0, HIDDEN)
        rows = Rows(positions, visible, at)
        return part.forward(layout, weights, given, rows, shared, before, ends)

    def judged(
        weights: Any, rows: Array, outside: Outside, client: Any, provider: Any
    ) -> tuple[Any, Any]:
        if isinstance(judge, RowsJudge):
            return judge.take(rows.reshape(layout.lanes, -1, config.width), outside)
        logits = family.head(weights, rows, layout.scale)
        if layout.backend == OWN:  # SPU's functions have no ranges
            logits = when_in_range(outside, logits)
        by_lane = logits.reshape(layout.lanes, -1, config.vocab_size)
        with jax.named_scope("verification"):
            return judge.verify(by_branch(by_lane, layout.branches), client, provider)

    C, P, J, X = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT, Owner.PUBLIC  # noqa: N806
    placed = C if layout.hidden else X
    function = functools.partial(SecureFunction, backend=layout.backend)
    return SecureModel(
        function(prefix, (P, P, P), "prefix"),
        function(of_provider, (P, P), "empty block"),
        function(public, (P,), "public weights"),
        function(prefill, (P, C, C, P, P, P), "prefill"),
        function(decode, (P, C, placed, C, P, J, X, P, P, X), "decode"),
        function(extend, (P, C, placed, C, P, J, X, P, P, X), "extend"),
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
    session: Session, config: ModelConfig, params: Params | None, part: ModelPart = WholeModel()
) -> Any:
    """Return the provider's weights of a part, folded, as private values; the client, who has none,
    passes None. Raise InputError at the provider when activations may leave their ranges.
    """
    shapes = part.shapes(config)
    return private_tree(session, PROVIDER, _folded, shapes, params, config, part)


def share_text(session: Session, layout: SessionShape, tokens: Sequence[int]) -> Text | None:
    """Return `tokens`, which stand before every prompt, the public ones first, as private values;
    only the provider has to bring them. None where the layout has no rows for them.
    """
    if not layout.prefix:
        return None
    shape = jax.ShapeDtypeStruct
    shapes = Text(shape((layout.prefix,), np.int32), shape((layout.told_rows,), np.int32))
    text: Text = private_tree(session, PROVIDER, _padded, shapes, layout, tokens)
    return text


def _padded(layout: SessionShape, tokens: Sequence[int]) -> Text:
    empty, public = layout.prefix - len(tokens), layout.public
    if not 0 <= empty <= layout.padded:
        raise ValueError(f"{len(tokens)} tokens do not fill {layout.prefix} rows of a prefix")
    of_own = np.arange(layout.told_rows) - public
    hidden = np.where((of_own >= 0) & (of_own < empty), HIDDEN, 0)
    filled = [*tokens[:public], *[0] * empty, *tokens[public:]]
    return Text(np.array(filled, np.int32), hidden.astype(np.int32))


def _folded(params: Params, config: ModelConfig, part: ModelPart) -> Any:
    weights = part.of_whole(family_of(config).fold(params, config))
    part.check(weights, config)
    return weights
