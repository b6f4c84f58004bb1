"""Products with a cache whose rows stay opened under lasting masks.

A matrix triple per product opens the whole cache again at every step. Here a row is opened once,
under a mask row that it keeps, and the masks of many queries and many rows are prepared together,
which is where homomorphic encryption packs well. One unit of a correlation, a *tile* of N slots,
serves one head for up to N rows and M queries (`slots.shape_for` has N and M):

    cached products    A [M, d], B [N, d], both shared; result A B^T [M, N]     for x K^T
    weighted rows      P [M, N], C [N, d], both shared; result P C [M, d]     for w V

times_rows     x [n, d] times the rows K [cap, d] of a cache.
                 1. Rows of K without a slot get one; each query gets a row of A (`slots`).
                 2. Open e = x - A for the queries, f = K - B for rows that are not open yet: one
                    message each way. f is kept.
                 3. x K^T = e f^T + e B^T + A f^T + A B^T, linear in what is shared.
times_columns  w [n, cap] times the rows V of a cache. As above, with P over all N columns of the
               tile: columns that hold no row of this cache are weighted 0, and opened as such. For
               such a row C stands in as its content (f = 0 when it was never opened): e C is then
               -P C, and takes out what it adds to the prepared product.
append         Writes rows. Nothing is sent; they are opened when they are first used.
lengthen       Adds rows that are not written. Nothing is sent.

Both products take several caches, too: side by side, or added up. Of one that the provider knows,
one direction will do (`known_rows`). What a party sends for all of them is one message, and sums
over caches are truncated once. Each cache has an allocation of its own, so that what is sent for
one of them is under masks that nothing else is under: a message is uniform as its parts are, and a
result is the sum, or the list, of shares that are each as fresh as the prepared ones.

A row that was never written is zero and stays out of every product; its scores are exact zeros. Of
a cache from elsewhere (plain shares) every row counts as written, of a public one every row that is
not zero. Rows and queries that exceed a tile go to several, in the same message.

What a party sees is e and f, words under a mask row that is uniform and used for one query, or one
row's content, alone:
- Slots and query rows are counters that only move forward (`slots.Slots`), in one allocation
  for all versions of a cache. A row that is written again, as after rejected drafts, is another row
  with another slot; versions that part ways from one cache have ids of their own for what they
  write.
- A row moved to another tile is opened again under an independent mask: two masked copies of one
  content, each uniform given the other.
- e has a mask row of its own per query, tile and head, so the entry (q, s) of A B^T enters one
  product alone, and the shares of a product are as fresh as the prepared ones.
- Of P, columns of weight 0 are given away (e = -P there). The row is not used again, and the
  result is hidden by the share of P C.
- Which rows are opened, and when tiles are taken, follows from positions and n, which are public.

Words are fixed-point: prepared products are off by some 2^10 of 2^36 (`offline.packed.products`).

Rows that move, and rejected drafts, take slots too.

An allocation is bound to one party's randomness: a cache of another session is refused. A fork, for
a dry run, keeps its counters without masks and words: it sends zeros and computes zeros, so that it
can neither use a mask again nor show a row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from protocols.arithmetic import known_rows
from protocols.arithmetic.known_rows import BY_COLUMNS, BY_ROWS, Known, Turn, exchange
from protocols.arithmetic.product import (
    correct_product,
    meaning,
    rescaled,
    rescaled_cost,
    shared,
    side_by_side,
)
from protocols.arithmetic.slots import Schedule, Slots, Use
from protocols.bits.convert import arith_cost, as_arith
from spu_llm.core.correlation import Correlation
from spu_llm.core.op import Cost, ProtocolOp, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, nothing_to_correct, uniform_messages
from spu_llm.core.values import CLIENT, Arith, Public, State, Stateful, Value

_CHUNK = 4  # units made at once


@functools.cache
def cached_products(queries: int, slots: int, d: int) -> Correlation:
    return Correlation(
        name=f"cached products {queries} {slots} {d}",
        masks=(shared(queries, d), shared(slots, d)),
        results=(shared(queries, slots),),
        secure=lambda a, b: [a @ b.swapaxes(1, 2)],
        matrices=lambda a, b: (a, b.swapaxes(1, 2)),
        chunk=_CHUNK,
    )


@functools.cache
def weighted_rows(queries: int, slots: int, d: int) -> Correlation:
    return Correlation(
        name=f"weighted cached rows {queries} {slots} {d}",
        masks=(shared(queries, slots), shared(slots, d)),
        results=(shared(queries, d),),
        secure=lambda p, c: [p @ c],
        matrices=lambda p, c: (p, c),
        chunk=_CHUNK,
    )


# ---- the value


@dataclass
class _Masks:
    """A tile's words at one party, all heads: [head, M or N, ...]. `opened`: f by slot, zero
    before.
    """

    queries: np.ndarray
    rows: np.ndarray
    product: np.ndarray
    opened: np.ndarray


@dataclass
class _Half:
    """One kind of product with one cache. `busy`: from when rows get slots until they are open."""

    slots: Slots = field(default_factory=Slots)
    busy: bool = False
    masks: dict[int, _Masks] = field(default_factory=dict)


class Allocation(State):
    """The state that all versions of a cache share: ids that never repeat, slots, masks and what is
    open.
    """

    def __init__(self) -> None:
        self._next_id = 0
        self._halves: dict[str, _Half] = {}
        self._holder: bytes | None = None
        self.dry = False  # a fork, without masks

    def ids(self, count: int) -> np.ndarray:
        """Return `count` fresh ids."""
        first, self._next_id = self._next_id, self._next_id + count
        return np.arange(first, self._next_id)

    def half(self, kind: _Kind) -> _Half:
        return self._halves.setdefault(kind.name, _Half())

    def bind(self, party: Party) -> None:
        """Bind the masks to this party; raise ValueError when they are another party's, or of
        another session.
        """
        holder = party.own.child("cached rows").words((4,)).tobytes()
        if self._holder not in (None, holder):
            raise ValueError("a cache of another session: its masks cannot be used here")
        self._holder = holder

    def fork(self) -> Allocation:
        dry = Allocation()
        dry._next_id, dry.dry = self._next_id, True
        dry._halves = {name: _Half(half.slots.copy()) for name, half in self._halves.items()}
        return dry


@dataclass(frozen=True, eq=False)
class Cached(Arith, Stateful):
    """Shares [head, cap, d] that know which rows have been written, and as what.

    ids: [cap], in `allocation`; -1 for rows never written. They are about the array `written`:
    ValueError when it is not `words`.
    """

    allocation: Allocation = field(default_factory=Allocation, repr=False)
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    written: np.ndarray | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.written is not self.words:
            raise ValueError("a cache's ids are about other words; take its `plain()`")

    @property
    def state(self) -> Allocation:
        return self.allocation

    def fork(self, state: State) -> Cached:
        assert isinstance(state, Allocation)
        zeros = np.zeros(self.shape, np.uint64)
        return Cached(zeros, self.dtype, self.frac_bits, self.bits, state, self.ids, zeros)

    def plain(self) -> Arith:
        return Arith(self.words, self.dtype, self.frac_bits, self.bits)


def _rows_of(cache: Value) -> tuple[Allocation, np.ndarray]:
    """Return the allocation and the ids of a cache in any form."""
    if isinstance(cache, Cached):
        return cache.allocation, cache.ids
    allocation = Allocation()
    written = np.ones(cache.shape[1], bool)
    if isinstance(cache, Public):
        written = cache.value.any(axis=(0, 2))
    ids = np.full(cache.shape[1], -1, np.int64)
    ids[written] = allocation.ids(int(written.sum()))
    return allocation, ids


# ---- append


def _append(party: Party, cache: Value, rows: Value, at: Value) -> Cached:
    if not isinstance(at, Public):
        raise ValueError("rows are written at a public position")
    allocation, ids = _rows_of(cache)
    old, more = as_arith(party, cache), as_arith(party, rows)
    start = min(max(int(at.value), 0), cache.shape[1] - rows.shape[1])  # as JAX does
    stop = start + rows.shape[1]
    words, ids = np.array(old.words), ids.copy()
    words[:, start:stop] = more.words
    ids[start:stop] = allocation.ids(stop - start)
    return Cached(words, old.dtype, old.frac_bits, 64, allocation, ids, words)


append = protocol_op(
    "append",
    reference=lambda cache, rows, at: jax.lax.dynamic_update_slice(cache, rows, (0, at, 0)),
    two_party=_append,
    cost=lambda cache, rows, at: arith_cost(cache, rows),
    simulate=uniform_messages(_append, nothing_to_correct),
    non_interactive=True,
    of_forward=True,
)
"""cache [head, cap, d] with `rows` [head, n, d] written from the public position `at` on."""


# ---- lengthen


def _lengthen_reference(cache: Any, *, positions: int) -> Any:
    return jnp.pad(cache, ((0, 0), (0, positions - cache.shape[1]), (0, 0)))


def _lengthen(party: Party, cache: Value, *, positions: int) -> Cached:
    allocation, ids = _rows_of(cache)
    old, more = as_arith(party, cache), positions - cache.shape[1]
    words = np.pad(old.words, ((0, 0), (0, more), (0, 0)))
    ids = np.pad(ids, (0, more), constant_values=-1)
    return Cached(words, old.dtype, old.frac_bits, 64, allocation, ids, words)


lengthen = protocol_op(
    "lengthen",
    reference=_lengthen_reference,
    two_party=_lengthen,
    cost=lambda cache, positions: arith_cost(cache),
    simulate=uniform_messages(_lengthen, nothing_to_correct),
    non_interactive=True,
)
"""cache [head, cap, d] with zeros after it, `positions` rows in all. Rows that are open stay so."""


# ---- products


@dataclass(frozen=True)
class _Kind:
    """The differences of times_rows (x [head, n, d]) and times_columns (x [head, n, cap])."""

    name: str
    correlation: Callable[[int, int, int], Correlation]  # of queries, slots and d
    reference: Callable[[Any, Any], Any]
    known: Known  # the same with rows of the provider's

    @property
    def columns(self) -> bool:
        return self.known.columns

    def given(self, x: np.ndarray, use: Use) -> np.ndarray:
        """Return what of x a use multiplies: queries, or weights by slot, 0 where no row is."""
        if not self.columns:
            return x[:, use.rows]
        spread = np.zeros((len(x), use.rows.stop - use.rows.start, use.size), np.uint64)
        spread[:, :, use.slots] = x[:, use.rows, use.positions]
        return spread

    def factor(self, rows: np.ndarray, use: Use) -> np.ndarray:
        """Return what a use multiplies by, of a tile's words [head, N, d]."""
        return rows if self.columns else rows[:, use.slots].swapaxes(1, 2)

    def prepared(self, product: np.ndarray, use: Use) -> np.ndarray:
        """Return what a use takes of a tile's A B^T or P C."""
        taken = product[:, use.queries]
        return taken if self.columns else taken[:, :, use.slots]

    def put(self, out: np.ndarray, use: Use, result: np.ndarray) -> None:
        """Enter a use's part into the result."""
        if self.columns:
            out[:, use.rows] += result
        else:
            out[:, use.rows, use.positions] = result

    def correct(self, product: np.ndarray, use: Use, difference: np.ndarray) -> None:
        """Change a tile's A B^T or P C so that the result changes by `difference`."""
        if self.columns:
            product[:, use.queries] += difference[:, use.rows]
        else:
            product[:, use.queries, use.slots] += difference[:, use.rows, use.positions]


_ROWS = _Kind("rows", cached_products, lambda x, cache: x @ cache.swapaxes(1, 2), BY_ROWS)
_COLUMNS = _Kind("columns", weighted_rows, lambda w, cache: w @ cache, BY_COLUMNS)


def _check(kind: _Kind, x: Value, caches: Sequence[Value], tile: int) -> None:
    inner = 1 if kind.columns else 2
    fits = all(len(v.shape) == 3 and v.shape[0] == x.shape[0] for v in (x, *caches))
    sides = {sum(c.shape[1] for c in caches)} if kind.columns else {c.shape[inner] for c in caches}
    if not caches or not fits or sides != {x.shape[2]} or len({c.shape[2] for c in caches}) > 1:
        shapes = ", ".join(str(cache.shape) for cache in caches)
        raise ValueError(f"{x.shape} does not fit a cache of {shapes}")
    if tile < 1:
        raise ValueError(f"a tile has at least one slot, found {tile}")


def _ends(kind: _Kind, caches: Sequence[Value]) -> Iterator[slice]:
    """Yield, for each of the caches, which columns of the weights or of the result it has."""
    end = 0
    for cache in caches:
        end += cache.shape[1]
        yield slice(end - cache.shape[1], end)


def _times(
    kind: _Kind, party: Party, x: Value, *caches: Value, tile: int, shift: int | None = None
) -> Arith:
    _check(kind, x, caches, tile)
    share = as_arith(party, x)
    split = list(_split(kind, share.words, caches))
    outs = [np.zeros(kind.known.out_shape(part.shape, cache), np.uint64) for part, cache in split]
    turns = [
        known_rows.turn(kind.known, party, part, cache, tile=tile, out=out)
        if known_rows.is_known(cache)
        else _turn(kind, party, part, cache, tile, out)
        for (part, cache), out in zip(split, outs, strict=True)
    ]
    exchange(party, turns)
    result = sum(outs[1:], outs[0]) if kind.columns else np.concatenate(outs, axis=2)
    # Of empty caches the product is zero, and nothing is sent.
    some = any(_serves(cache, part.shape) for part, cache in split)
    return rescaled(party, result, share, shift if some else 0)


def _split(
    kind: _Kind, x: np.ndarray, caches: Sequence[Value]
) -> Iterator[tuple[np.ndarray, Value]]:
    """Yield, for each of the caches, the part of x that is multiplied by it, and the cache."""
    for columns, cache in zip(_ends(kind, caches), caches, strict=True):
        yield x[:, :, columns] if kind.columns else x, cache


def _serves(cache: Value, x: Sequence[int]) -> bool:
    """Return whether a product of an x of this shape with the cache is more than zero."""
    if known_rows.is_known(cache):
        return not known_rows.is_empty(x, cache)
    return bool(x[1]) and bool((_rows_of(cache)[1] >= 0).any())


def _turn(
    kind: _Kind, party: Party, x: np.ndarray, cache: Value, tile: int, out: np.ndarray
) -> Turn:
    # 1. First of all, so that both parties allocate in the same order.
    allocation, ids = _rows_of(cache)
    allocation.bind(party)
    half = allocation.half(kind)
    if half.busy:
        raise ValueError("an earlier product with this cache has failed, or is not at its end")
    half.busy = True
    plan = half.slots.schedule(ids, x.shape[1], tile)
    rows = as_arith(party, cache)
    for number, of in plan.fresh.items():
        masks = party.take(kind.correlation(*of, cache.shape[2]), x.shape[0])
        (a, b), (ab,) = masks.masks, masks.results
        half.masks[number] = _Masks(a, b, ab, np.zeros_like(b))
    if not plan.uses or allocation.dry:
        shape = x.shape[0], _opened(kind, plan, cache)
        yield np.zeros(shape, np.uint64), shape
    else:
        yield from _multiply(kind, party, x, rows.words, half, plan, out)
    half.masks = {t: m for t, m in half.masks.items() if t in half.slots.tiles}
    half.busy = False


def _multiply(
    kind: _Kind,
    party: Party,
    x: np.ndarray,
    rows: np.ndarray,
    half: _Half,
    plan: Schedule,
    out: np.ndarray,
) -> Turn:
    # 2.
    masks = half.masks
    under = [kind.given(x, use) - masks[use.tile].queries[:, use.queries] for use in plan.uses]
    rows_under = [rows[:, o.positions] - masks[o.tile].rows[:, o.slots] for o in plan.openings]
    own, apart = side_by_side(under + rows_under)
    opened = apart(own + (yield own, own.shape))
    for o, f in zip(plan.openings, opened[len(under) :], strict=True):
        masks[o.tile].opened[:, o.slots] = f
    # 3.
    for use, e in zip(plan.uses, opened, strict=False):
        m = masks[use.tile]
        share = m.rows + m.opened if party.rank == CLIENT else m.rows
        result = e @ kind.factor(share, use)
        result += m.queries[:, use.queries] @ kind.factor(m.opened, use)
        kind.put(out, use, result + kind.prepared(m.product, use))


def _opened(kind: _Kind, plan: Schedule, cache: Value) -> int:
    """Return how many words a head opens."""
    d = cache.shape[2]
    words = sum(
        (use.rows.stop - use.rows.start) * (use.size if kind.columns else d) for use in plan.uses
    )
    return words + d * sum(o.slots.size for o in plan.openings)


def _cost(kind: _Kind, x: Value, *caches: Value, tile: int, shift: int | None = None) -> Cost:
    """Return the cost of the next call, which depends on what is open now."""
    _check(kind, x, caches, tile)
    total = arith_cost(x, *(cache for cache in caches if not known_rows.is_known(cache)))
    words = np.zeros(2, int)  # of the client's, and of the provider's
    some = False
    for columns, cache in zip(_ends(kind, caches), caches, strict=True):
        shape = *x.shape[:2], (columns.stop - columns.start if kind.columns else x.shape[2])
        some |= _serves(cache, shape)
        words += _words(kind, shape, cache, tile)
    client, provider = (8 * int(n) for n in words)
    total += Cost(bool(client) + bool(provider), int(some), client, provider)
    shape = kind.known.out_shape(x.shape, caches[0])
    if not kind.columns:
        shape = *shape[:2], sum(cache.shape[1] for cache in caches)
    return total + (rescaled_cost(x, shape, shift) if some else Cost())


def _words(kind: _Kind, x: Sequence[int], cache: Value, tile: int) -> tuple[int, int]:
    """Return how many words the client and the provider send for one of the caches."""
    if known_rows.is_known(cache):
        return known_rows.sizes(kind.known, x, cache, tile=tile)
    allocation, ids = _rows_of(cache)
    plan = allocation.half(kind).slots.copy().schedule(ids, x[1], tile)
    size = x[0] * _opened(kind, plan, cache)
    return size, size


def _correct(kind: _Kind, x: Value, *caches: Value, tile: int, shift: int | None = None) -> Correct:
    """Return the function that brings a simulated result to the wanted one. The prepared products
    enter the result as they are; every entry that serves, once.
    """
    assert not any(isinstance(c, Stateful) for c in caches), "what is open already is no part of it"
    heads, n, _ = x.shape
    plans: list[Schedule | None] = [
        None
        if known_rows.is_known(cache)
        else Slots().schedule(_rows_of(cache)[1], n if heads else 0, tile)
        for cache in caches
    ]
    takes = [
        int(_serves(cache, (heads, n, cache.shape[1]))) if plan is None else len(plan.fresh)
        for cache, plan in zip(caches, plans, strict=True)
    ]

    def enter(drawn: Sequence[np.ndarray], difference: np.ndarray) -> None:
        # Two masks and a product each time that something is taken.
        products = iter(drawn[len(drawn) - 3 * sum(takes) + 2 :: 3])
        for columns, plan, count in zip(_ends(kind, caches), plans, takes, strict=True):
            taken = list(itertools.islice(products, count))
            if not taken:
                continue
            part = difference if kind.columns else difference[:, :, columns]
            if plan is None:
                known_rows.enter(kind.known, taken[0], part, tile=tile)
            else:
                _enter(kind, dict(zip(plan.fresh, taken, strict=True)), plan, part)
            if kind.columns:  # they add up: one of them takes the difference
                return

    return correct_product(x, shift, enter)


def _enter(
    kind: _Kind, products: dict[int, np.ndarray], plan: Schedule, difference: np.ndarray
) -> None:
    """Change the prepared products, by tile, of a first call with one cache."""
    # A row of w V adds up over tiles: one of them takes the difference.
    firsts = {use.rows.start: use for use in reversed(plan.uses)}
    for use in firsts.values() if kind.columns else plan.uses:
        kind.correct(products[use.tile], use, difference)


def _in_one(caches: Sequence[Any]) -> Any:
    whole_words = all(isinstance(cache, np.ndarray) for cache in caches)
    return (np if whole_words else jnp).concatenate(caches, axis=1)


def _product_op(name: str, kind: _Kind) -> ProtocolOp:
    two_party = functools.partial(_times, kind)
    return protocol_op(
        name,
        reference=lambda x, *caches, tile, shift=None: meaning(
            kind.reference(x, _in_one(caches)), shift
        ),
        two_party=two_party,
        cost=functools.partial(_cost, kind),
        simulate=uniform_messages(two_party, functools.partial(_correct, kind)),
    )


times_rows = _product_op("times_rows", _ROWS)
"""x [head, n, d] @ cache [head, cap, d]^T: [head, n, cap], of several caches side by side. `tile`:
the slots of a tile at most, and the queries of a unit of `known_rows`. `shift` as in `product`."""

times_columns = _product_op("times_columns", _COLUMNS)
"""w [head, n, cap] @ cache [head, cap, d]: [head, n, d], of several caches added up; w has their
columns side by side. `tile` as of `times_rows`. `shift` as in `product`."""
