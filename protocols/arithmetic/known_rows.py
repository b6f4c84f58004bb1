"""Products with rows that the provider knows, under masks of the parties' own.

x = x_0 + x_1 is shared, K [cap, d] is the provider's, and so is x_1: of x K^T = x_1 K^T + x_0 K^T
only the second term needs the other party, and only x_0 has to be hidden. So a unit has one cross
term, and queries are opened in one direction. It serves one head for N queries, all rows at once:

    known products         a [N, d] the client's, b [cap, d] the provider's; result a b^T [N, cap]
    weighted known rows    a [N, cap], b [cap, d]; result a b [N, d]

`cached.times_rows` and `cached.times_columns` do this where a cache is the provider's, in the same
messages as for others beside it; for the latter read K for K^T and b for b^T.

  1. The client sends e = x_0 - a for its queries; for each fresh unit the provider sends f = K - b,
     which the client keeps. Nothing that depends on x_1 is sent.
  2. x_0 K^T = e K^T + a f^T + a b^T: the provider has the first term, as it has x_1 K^T, the client
     the second one, and the third is shared.

known_rows   Rows of the provider's with what products with them keep from call to call. Nothing is
             sent.

Security. The provider sees e, words under rows of a that are uniform, the client's alone, and used
for one query of one head each: queries are counted, and the count only moves forward. The client
sees f, under a b of the provider's that is uniform and hides one content, K; a later unit hides it
again under a b of its own, so the copies are uniform given each other. Every entry of a result
takes one entry of a b^T that is used once, so its shares are as fresh as the prepared ones. Which
units are taken, and when, follows from the numbers of queries, which are public.

Words are fixed-point: prepared products are off by some 2^10 of 2^36 (`offline.packed.products`).

The masks are bound to one party's randomness (`lasting`): rows of another session are refused. A
fork, for a dry run, keeps the count without masks and rows: it sends zeros and computes zeros.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from protocols.arithmetic.lasting import Lasting, lasting, lasting_op
from protocols.arithmetic.product import shared
from protocols.bits.convert import known_words
from spu_llm.core.correlation import Correlation, Form, Part
from spu_llm.core.party import Party
from spu_llm.core.values import CLIENT, PROVIDER, Owner, Private, Value, frac_bits_of

_CHUNK = 4  # units made at once


def _own(owner: Owner, *shape: int) -> Part:
    return Part(shape, owner, Form.PRIVATE)


@functools.cache
def known_products(queries: int, rows: int, d: int) -> Correlation:
    return Correlation(
        name=f"known products {queries} {rows} {d}",
        masks=(_own(Owner.CLIENT, queries, d), _own(Owner.PROVIDER, rows, d)),
        results=(shared(queries, rows),),
        secure=lambda a, b: [a @ b.swapaxes(1, 2)],
        matrices=lambda a, b: (a, b.swapaxes(1, 2)),
        chunk=_CHUNK,
    )


@functools.cache
def weighted_known_rows(queries: int, rows: int, d: int) -> Correlation:
    return Correlation(
        name=f"weighted known rows {queries} {rows} {d}",
        masks=(_own(Owner.CLIENT, queries, rows), _own(Owner.PROVIDER, rows, d)),
        results=(shared(queries, d),),
        secure=lambda a, b: [a @ b],
        matrices=lambda a, b: (a, b),
        chunk=_CHUNK,
    )


# ---- the value


@dataclass
class _Unit:
    """A unit's words at one party, all heads: [head, N, ...]; `rows`, and f, which is `opened`:
    [head, cap, d]. `queries` and `opened` mean something at the client, `rows` at the provider.
    """

    queries: np.ndarray
    rows: np.ndarray
    product: np.ndarray
    opened: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))


def is_known(rows: Value) -> bool:
    """Return whether the provider knows the rows, and nobody else."""
    return isinstance(rows, Private) and rows.owner == PROVIDER


known_rows = lasting_op("known_rows", Owner.PROVIDER, "rows")
"""The provider's `rows` [head, cap, d], unchanged, which stay open for many products."""


# ---- products


@dataclass(frozen=True)
class Known:
    """The differences of products by rows (x [head, n, d]) and by columns (x [head, n, cap])."""

    correlation: Callable[[int, int, int], Correlation]
    columns: bool

    def of(self, rows: Value, tile: int) -> Correlation:
        return self.correlation(tile, *rows.shape[1:])

    def factor(self, rows: np.ndarray) -> np.ndarray:
        """Return the matrix that x is multiplied by: the rows, transposed in products by rows."""
        return rows if self.columns else rows.swapaxes(1, 2)

    def out_shape(self, x: Sequence[int], rows: Value) -> tuple[int, int, int]:
        """Return the shape of the product of an x of this shape with the rows."""
        return x[0], x[1], rows.shape[2 if self.columns else 1]


BY_ROWS = Known(known_products, False)
BY_COLUMNS = Known(weighted_known_rows, True)


def _uses(used: int, count: int, tile: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (unit, queries, rows) for every unit that serves some of `count` queries after the
    first `used`: its number, counted from the unit of the first of them; which of them it serves;
    and by which rows of it. It is a fresh one where its rows begin at 0.
    """
    done = 0
    while done < count:
        unit, first = divmod(used + done, tile)
        some = min(tile - first, count - done)
        yield unit - used // tile, slice(done, done + some), slice(first, first + some)
        done += some


def _fresh(used: int, count: int, tile: int) -> int:
    """Return how many units `count` queries after the first `used` begin."""
    return sum(queries.start == 0 for _, _, queries in _uses(used, count, tile))


# What one product puts into the message that all products of an op share: this party's words, and
# the shape of the peer's, which it is sent. It ends with that.
Turn = Generator[tuple[np.ndarray, tuple[int, ...]], np.ndarray, None]


def exchange(party: Party, turns: Sequence[Turn]) -> None:
    """Run all turns in one message each way, or in none where nobody has anything to say."""
    said = [next(turn) for turn in turns]
    own = np.concatenate([words.reshape(-1) for words, _ in said])
    sizes = [math.prod(shape) for _, shape in said]
    if own.size:
        party.send(own)
    came = party.recv((sum(sizes),)) if sum(sizes) else np.zeros(0, np.uint64)
    pieces = np.split(came, np.cumsum(sizes)[:-1])
    for turn, piece, (_, shape) in zip(turns, pieces, said, strict=True):
        with contextlib.suppress(StopIteration):
            turn.send(piece.reshape(shape))
            raise AssertionError("a product has one turn")


def turn(
    kind: Known, party: Party, x: np.ndarray, rows: Value, *, tile: int, out: np.ndarray
) -> Turn:
    """Multiply shares x [head, n, d] or [head, n, cap] by the provider's rows [head, cap, d], which
    fit it, in one turn, and enter this party's share of the product into `out`. `tile`: N.
    """
    known = lasting(rows, Owner.PROVIDER, "rows")
    half = known.masks.begin(party, kind.of(known, tile))
    if is_empty(x.shape, known):
        yield np.zeros(0, np.uint64), (0,)
    else:
        yield from _multiply(kind, party, x, known, tile, out)
        half.used += x.shape[1]
    half.busy = False


def is_empty(x: Sequence[int], rows: Value) -> bool:
    """Return whether a product of an x of this shape with the rows has no entries, or is a sum of
    nothing: zero.
    """
    return not math.prod((*x, *rows.shape))


def _multiply(
    kind: Known, party: Party, x: np.ndarray, known: Lasting, tile: int, out: np.ndarray
) -> Turn:
    correlation, heads = kind.of(known, tile), len(x)
    half = known.masks.half(correlation)
    uses = list(_uses(half.used, x.shape[1], tile))
    fresh = _take(party, correlation, heads, _fresh(half.used, x.shape[1], tile))
    shape_of_f = heads, len(fresh), *known.shape[1:]
    if known.masks.dry:
        shapes = [x.shape, shape_of_f]
        yield np.zeros(shapes[party.rank], np.uint64), shapes[1 - party.rank]
        return
    units = [*([half.unit] if half.unit and half.used % tile else []), *fresh]
    if party.rank == CLIENT:
        # 1.
        masks = np.concatenate([units[i].queries[:, queries] for i, _, queries in uses], axis=1)
        f = yield x - masks, shape_of_f
        for i, unit in enumerate(fresh):
            unit.opened = f[:, i]
        # 2.
        for i, served, queries in uses:
            out[:, served] = units[i].queries[:, queries] @ kind.factor(units[i].opened)
    else:
        words = known_words(party, known, frac_bits_of(known.dtype, party.frac_bits))
        f = np.zeros(shape_of_f, np.uint64)
        for i, unit in enumerate(fresh):
            f[:, i] = words - unit.rows
        e = yield f, x.shape
        out += (e + x) @ kind.factor(words)
    for i, served, queries in uses:
        out[:, served] += units[i].product[:, queries]
    half.unit = units[-1]


def _take(party: Party, correlation: Correlation, heads: int, count: int) -> list[_Unit]:
    """Take fresh units, each for all heads."""
    if not count:
        return []
    correlations = party.take(correlation, heads * count)
    words = [
        m.reshape(heads, count, *m.shape[1:]) for m in (*correlations.masks, *correlations.results)
    ]
    return [_Unit(*(w[:, i] for w in words)) for i in range(count)]


def sizes(kind: Known, x: Sequence[int], rows: Value, *, tile: int) -> tuple[int, int]:
    """Return how many words the client and the provider send in the next call, for an x of this
    shape; it depends on what is open now.
    """
    if is_empty(x, rows):
        return 0, 0
    used = rows.masks.used(kind.of(rows, tile)) if isinstance(rows, Lasting) else 0
    return math.prod(x), _fresh(used, x[1], tile) * math.prod(rows.shape)


def enter(kind: Known, product: np.ndarray, difference: np.ndarray, *, tile: int) -> None:
    """Change the prepared product [unit, N, ...] of a first call so that the result [head, n, ...]
    changes by `difference`. For the simulator: the prepared product enters the result as it is,
    every entry once.
    """
    heads, n, _ = difference.shape
    by_head = product.reshape(heads, _fresh(0, n, tile), *product.shape[1:])
    for i, served, queries in _uses(0, n, tile):
        by_head[:, i, queries] += difference[:, served]
