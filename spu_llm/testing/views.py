"""Telling real views from ideal ones, by statistics over many equal rows.

Every column of every message, mask and share is looked at: alone by the frequency of its bits and
words, all together by relations that hold in every row (`relations`), and by pairs of single bits;
sums of two and three columns are some of all, those first that involve what the test knows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, chdtrc, ndtr  # the tails of scipy.stats, without its checks

from spu_llm.core import field
from spu_llm.core.op import ProtocolOp, View
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import Arith, Bool, Private, Value, as_words, low_bits
from spu_llm.testing.hiding import insert
from spu_llm.testing.run import Case, Outcome, common_stream, run_op

# Samples of a view: one call with that many equal rows. They fill no byte and no word of a plane,
# and since their number is prime, a message's size tells how it is made up of rows.
ROWS = 4096 + 37
BINS = 16
# Chance that one whole view comparison rejects a correct protocol.
FALSE_ALARM = 1e-9


def ideal_share(value: Value) -> Value:
    if not isinstance(value, Arith | Bool):
        return value
    words = low_bits(Prg.from_os().words(value.shape), value.bits)
    return dataclasses.replace(value, words=words)


def distinguish(
    op: ProtocolOp,
    case: Case,
    rank: int,
    twin: type[Party] | None = None,
    *,
    fresh: bool = False,
    uniform: bool = True,
    hidden: Callable[[list[Value], list[Value], Case], list[np.ndarray]] = lambda *_: [],
) -> list[str]:
    """Return the names of the statistics by which `rank` tells a real view from an ideal one.

    Two independent runs; in the second, of intact parties, what the party draws, is dealt and
    receives is replaced. `uniform`: by uniform words and bytes of the same sizes, whatever the
    inputs; no code of the op makes them. The party's result follows from such a view, so it is left
    out, unless it is to be `fresh`: then an ideal share takes its place, uniform and independent of
    all else, and the results of prepared units, from which it follows, are left out. Otherwise by
    the op's simulator, which sees the party's own inputs and outputs.

    The statistics come from `relations` (of a uniform view) and `differences`.
    """
    real = run_op(op, case, (rank, twin) if twin is not None else None)
    other = run_op(op, case)
    other.leaked = real.leaked
    if fresh:
        other.outputs[rank] = [ideal_share(v) for v in other.outputs[rank]]
    if uniform:
        pair = (real, _drawn(real, rank, fresh)), (other, _ideal(_drawn(other, rank, fresh)))
    else:
        simulated = op.simulate(
            rank,
            Prg.from_os(),
            common_stream(),
            other.inputs[rank],
            other.outputs[rank],
            **case.static,
        )
        pair = (real, real.views[rank]), (other, simulated)
    columns = []
    for outcome, view in pair:
        secrets = hidden(outcome.inputs[rank], outcome.inputs[1 - rank], case)
        shown = fresh or not uniform
        columns.append(columns_of(outcome, rank, view, outputs=shown, hidden=secrets))
    differing = relations(columns[0]) if uniform else []
    if differing and twin is not None:
        return differing
    return differing + differences(*columns, first_only=twin is not None)


def _drawn(outcome: Outcome, rank: int, fresh: bool) -> View:
    """Return what a party draws, is dealt and receives; where its results are fresh, without the
    results of prepared units.
    """
    own = list(outcome.fresh[rank].own)
    for taken in outcome.fresh[rank].taken:
        own += [
            words
            for part, words in zip(taken.correlation.masks, taken.correlations.masks, strict=True)
            if part.is_held_by(rank)
        ]
        own += [] if fresh else taken.correlations.results
    return View([words for words in own if words.size], outcome.views[rank].incoming)


def _ideal(view: View) -> View:
    """Return uniform words, or single bits, and bytes in place of a view's."""
    prg = Prg.from_os()

    def words(like: np.ndarray) -> np.ndarray:
        return low_bits(prg.words(like.shape), _bits_of(like))

    def message(like: np.ndarray) -> np.ndarray:
        return prg.words(((like.nbytes + 7) // 8,)).view(np.uint8)[: like.nbytes]

    return View([words(w) for w in view.own], [message(m) for m in view.incoming])


def relations(columns: dict[str, Column]) -> list[str]:
    """Name the bits of what the party draws, is dealt and receives that are, in every row, the xor
    of other ones, of bits that the test knows, and of a constant: none may be.

    It takes as many of the uniform bits at once as leave 64 rows more than columns: among these,
    uniform ones are related with a chance below 2^-60.
    """
    known: dict[int, int] = {}
    insert(known, (1 << ROWS) - 1)
    free: dict[int, list[tuple[str, int]]] = {}
    for name, column in columns.items():
        if name.startswith(_UNIFORM):
            bits = [(f"{name} bit {i}", b) for i, b in enumerate(column.planes())]
            free.setdefault(column.reading, []).extend(bits)
            continue
        for plane in column.planes() if len(known) < ROWS // 2 else ():
            insert(known, plane)
    dependent: list[str] = []
    at_once = ROWS - 64 - len(known)
    for read in free.values():
        for start in range(0, len(read), at_once):
            basis = dict(known)
            some = read[start : start + at_once]
            dependent += [f"relation of {name}" for name, bits in some if not insert(basis, bits)]
    return dependent


def differences(
    a_columns: dict[str, Column], b_columns: dict[str, Column], *, first_only: bool = False
) -> list[str]:
    """Return the names of statistics in which two sets of columns differ.

    The statistics are of columns, of signed sums and xors of two and three, and of differences of
    neighbouring rows and of the two halves: each binned by its top and by its bottom bits and
    compared by a two-sample chi-square test, by the frequency of each of the 64 bits, and by how
    often words repeat; Bonferroni-corrected to FALSE_ALARM. And `_pairs_of_bits`.
    """
    if a_columns.keys() != b_columns.keys():
        return [f"one view has {list(a_columns)}, the other {list(b_columns)}"]
    a, b = ({n: c.words for n, c in columns.items()} for columns in (a_columns, b_columns))
    features = _features(list(a))
    limit = FALSE_ALARM / (3 * max(1, len(features)))
    differing = []
    for name, feature in features:
        x, y = feature(a), feature(b)
        # Of three columns, single bits are looked at under xor and the rest under sums: time.
        few = name.count(" & ") < 2
        if few or "^" not in name:
            ends = zip(_ends(x), _ends(y), strict=True)
            if any(_chi_square_p(*pair) < limit for pair in ends):
                differing.append(f"bins of {name}")
        if (few or "^" in name) and _bits_p(_ones(x), _ones(y), len(x)) < limit:
            differing.append(f"bits of {name}")
        if few and _repeats_p(x, y) < limit:
            differing.append(f"repeats of {name}")
        if differing and first_only:
            return differing
    return differing + _pairs_of_bits(a_columns, b_columns)


def _pairs_of_bits(a: dict[str, Column], b: dict[str, Column]) -> list[str]:
    """Return pairs of single bits, anywhere in the view, that go together more in one set of
    columns than in the other.

    A mask that serves twice, in two places, makes such pairs. All inner products of bits as +-1 are
    compared; z beyond 8.5 has a chance below 1e-16 for each of some million pairs.
    """

    names = [n for n in a if not n.startswith("peer's") and not a[n].reading]
    bits = [(n, i) for n in names for i in range(a[n].bits)]

    def signs(columns: dict[str, Column]) -> np.ndarray:
        if not names:
            return np.ones((ROWS, 0), np.float32)
        both = np.concatenate([columns[n].unpacked() for n in names], axis=1)
        return both.astype(np.float32) * 2 - 1

    one, other = signs(a), signs(b)
    # A bit that never changes in either says nothing here.
    varies = (np.ptp(one, axis=0) > 0) | (np.ptp(other, axis=0) > 0) if bits else np.ones(0, bool)
    one, other = one[:, varies], other[:, varies]
    left = [f"{n} bit {i}" for (n, i), v in zip(bits, varies, strict=True) if v]
    z = np.abs(one.T @ one - other.T @ other) / np.sqrt(2 * ROWS)
    return [f"{left[i]} with {left[j]}" for i, j in np.argwhere(np.triu(z, 1) > 8.5)]


def _repeats_p(a: np.ndarray, b: np.ndarray) -> float:
    """Return the p-value that words repeat as often in both: each repeat falls on either side
    alike.
    """
    repeats = [len(x) - 1 - int(np.count_nonzero(np.diff(np.sort(x)))) for x in (a, b)]
    return float(min(1.0, 2 * bdtr(min(repeats), sum(repeats), 0.5)))


def _ends(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return histograms of the top and of the bottom four bits."""
    return (
        np.bincount((words >> np.uint64(60)).astype(int), minlength=BINS),
        np.bincount((words & np.uint64(15)).astype(int), minlength=BINS),
    )


def _ones(words: np.ndarray) -> np.ndarray:
    """Return how often each of the 64 bits is set."""
    bits = np.unpackbits(
        np.ascontiguousarray(words).view(np.uint8).reshape(-1, 8), axis=1, bitorder="little"
    )
    # Byte by byte, eight at a time: 128 rows cannot overflow one.
    whole = len(bits) // 128 * 128
    eight = bits[:whole].view(np.uint64).reshape(-1, 128, 8).sum(axis=1, dtype=np.uint64)
    rest = bits[whole:].sum(axis=0, dtype=np.int64)
    return eight.view(np.uint8).reshape(-1, 64).sum(axis=0, dtype=np.int64) + rest


def _bits_p(a: np.ndarray, b: np.ndarray, rows: int) -> float:
    """Return the p-value (two proportions, Bonferroni over positions) that two bit frequencies
    agree.
    """
    pooled = (a + b) / (2 * rows)
    spread = np.sqrt(2 * rows * pooled * (1 - pooled))
    used = spread > 0
    if not used.any():
        return 1.0
    z = np.abs(a - b)[used] / spread[used]
    return float(min(1.0, 2 * ndtr(-z.max()) * used.sum()))


# ---- columns


@dataclass(frozen=True)
class Column:
    """One word per row, of which the lowest `bits` bits were seen. What may be read in several ways
    gives columns for each of them.
    """

    words: np.ndarray
    bits: int = 64
    reading: int = 0

    def unpacked(self) -> np.ndarray:
        """Return the bits that were seen, [ROWS, bits] of 0 and 1, the lowest first."""
        raw = self.words.view(np.uint8).reshape(-1, 8)
        return np.unpackbits(raw, axis=1, count=self.bits, bitorder="little")

    def planes(self) -> list[int]:
        """Return each bit of all rows, as one number."""
        packed = np.packbits(np.ascontiguousarray(self.unpacked().T), axis=1, bitorder="little")
        return [int.from_bytes(plane.tobytes(), "little") for plane in packed]


_UNIFORM = ("own", "incoming", "output")  # where a view is: the others are known to the test


def columns_of(
    outcome: Outcome,
    rank: int,
    view: View,
    *,
    outputs: bool = True,
    outgoing: bool = False,
    peer: bool = True,
    hidden: Sequence[np.ndarray] = (),
) -> dict[str, Column]:
    """Return one word per row and column: all that the party sees; with `peer`, also what it does
    not.

    Raise AssertionError for a message that cannot be read row by row: nothing goes by unseen.
    """
    columns: dict[str, Column] = {}

    def add(name: str, readings: Sequence[Sequence[Column]]) -> None:
        for i, reading in enumerate(readings):
            for j, column in enumerate(reading):
                columns[f"{name}.{i}.{j}"] = dataclasses.replace(column, reading=i)

    # What the test knows comes first; words that this party can compute because the peer draws its
    # masks from a stream it has, too, among it.
    for i, words in enumerate(hidden):
        add(f"hidden {i}", [_word_columns(words.reshape(ROWS, -1))])
    for i, words in enumerate(outcome.leaked):
        add(f"leaked {i}", _own_rows(words, must=False))
    for i, words in enumerate(outcome.common):
        add(f"common {i}", _own_rows(words, must=False))
    values = {"input": outcome.inputs[rank]}
    if peer:  # a view must not depend on these beyond the output
        values["peer's input"] = outcome.inputs[1 - rank]
    if outputs:
        values["output"] = outcome.outputs[rank]
    for name, held in values.items():
        for i, v in enumerate(held):
            if isinstance(v, Arith | Bool) and len(v.words) == ROWS:
                words = low_bits(v.words, v.bits).reshape(ROWS, -1)
                add(f"{name} {i}", [_word_columns(words, v.bits)])
            elif isinstance(v, Private) and v.value is not None and len(v.value) == ROWS:
                add(f"{name} {i}", [_word_columns(as_words(v.value).reshape(ROWS, -1))])
    for i, words in enumerate(view.own):
        add(f"own {i}", _own_rows(words))
    for i, data in enumerate(view.incoming):
        add(f"incoming {i}", _message_rows(data))
    if outgoing:
        for i, data in enumerate(view.outgoing):
            add(f"outgoing {i}", _message_rows(data)[:1])
        for i, (come, gone) in enumerate(zip(view.incoming, view.outgoing, strict=False)):
            if come.nbytes == gone.nbytes:
                both = come.reshape(-1).view(np.uint8) ^ gone.reshape(-1).view(np.uint8)
                add(f"opened {i}", _message_rows(both)[:1])
    return columns


def _word_columns(words: np.ndarray, bits: int = 64) -> list[Column]:
    """Return words [ROWS, n] as n columns."""
    return [Column(np.ascontiguousarray(column), bits) for column in words.T]


def _bit_columns(planes: np.ndarray) -> list[Column]:
    """Return bits [n, ROWS] of 0 and 1 as ceil(n / 64) columns, plane i at bit i % 64."""
    columns = []
    for some in (planes[i : i + 64] for i in range(0, len(planes), 64)):
        raw = np.zeros((planes.shape[1], 8), np.uint8)
        packed = np.packbits(np.ascontiguousarray(some.T), axis=1, bitorder="little")
        raw[:, : packed.shape[1]] = packed
        columns.append(Column(raw.view(np.uint64)[:, 0], len(some)))
    return columns


_MAX_VALUES = 64  # of a row, side by side in a message or a plane


def _own_rows(words: np.ndarray, must: bool = True) -> list[list[Column]]:
    """Return own random words as columns, in each way they may be read: words per row, bits a word
    each, bit-sliced ones (64 values a word).
    """
    if not words.any():
        return []  # the peer's
    if words.size % ROWS == 0:
        axis = words.shape.index(ROWS) if ROWS in words.shape else 0
        rows = np.moveaxis(words, axis, 0).reshape(ROWS, -1)
        if rows.max() <= 1:
            return [_bit_columns(rows.T.astype(np.uint8))]
        return [_word_columns(rows, _bits_of(rows))]
    for values in range(1, _MAX_VALUES):
        groups = -(-values * ROWS // 64)
        if len(words) % groups == 0:
            planes = np.ascontiguousarray(words.reshape(groups, -1).T).view(np.uint8)
            return [_of_planes(planes, values)]
    if not must:
        return []  # of no row, such as a key
    raise AssertionError(f"own words of shape {words.shape} cannot be read row by row")


def _bits_of(words: np.ndarray) -> int:
    """Return the bits that many words of one form have: single ones, elements of the field, or
    whole words.
    """
    return next(bits for bits in (1, field.BITS, 64) if words.max() < 1 << bits)


def _of_planes(planes: np.ndarray, values: int) -> list[Column]:
    """Return packed planes (uint8 [n, bytes]) of so many values a row as columns."""
    bits = np.unpackbits(planes, axis=1, count=values * ROWS, bitorder="little")
    return _bit_columns(bits.reshape(-1, ROWS))


def _message_rows(data: np.ndarray) -> list[list[Column]]:
    """Return a message (words or bytes) as columns, in each way it may be read: words row by row or
    column by column, narrow words, planes of one bit of every value, bits row by row; bits and then
    words.
    """
    raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
    readings: list[list[Column]] = []
    if not raw.size:
        return readings
    if raw.size % ROWS == 0:
        readings += _rows_of_bytes(raw)
    every = range(1, _MAX_VALUES + 1)
    plane = {values: -(-values * ROWS // 8) for values in every}
    for values in every:
        if raw.size == plane[values]:
            bits = np.unpackbits(raw, count=values * ROWS, bitorder="little")
            readings.append(_bit_columns(np.ascontiguousarray(bits.reshape(ROWS, values).T)))
    for values in every:
        rest = raw.size - plane[values]
        if rest > 0 and rest % (values * ROWS) == 0 and rest <= 8 * values * ROWS:
            single = _of_planes(raw[None, : plane[values]], values)
            readings += [[*single, *reading] for reading in _rows_of_bytes(raw[plane[values] :])]
    planes = next((v for v in every if raw.size % plane[v] == 0 and raw.size > plane[1]), None)
    if planes is not None:
        readings.append(_of_planes(raw.reshape(-1, plane[planes]), planes))
    if not readings:
        raise AssertionError(f"a message of {raw.size} bytes cannot be read row by row")
    return readings


def _rows_of_bytes(raw: np.ndarray) -> list[list[Column]]:
    rows = raw.reshape(ROWS, -1)
    size = rows.shape[1]
    if size % 8 == 0:
        words = raw.view(np.uint64) if raw.ctypes.data % 8 == 0 else raw.copy().view(np.uint64)
        readings = [_word_columns(words.reshape(ROWS, -1))]
        return readings if size == 8 else [*readings, _word_columns(words.reshape(-1, ROWS).T)]
    columns = []
    for start in range(0, size, 8):
        part = rows[:, start : start + 8]
        padded = np.zeros((ROWS, 8), np.uint8)
        padded[:, : part.shape[1]] = part
        columns.append(Column(padded.view(np.uint64)[:, 0], 8 * part.shape[1]))
    return [columns]


# ---- features


MAX_PAIRS, MAX_TRIPLES = 150, 60
Feature = Callable[[dict[str, np.ndarray]], np.ndarray]


def _features(names: list[str]) -> list[tuple[str, Feature]]:
    """Return what is compared: every column alone; signed sums and xors of some pairs, and of some
    triples in which one has come from the peer. Pairs and triples with most of what the test knows
    besides the view come first.
    """
    features: list[tuple[str, Feature]] = []
    for n in names:
        features += [
            (n, functools.partial(_sum, names=(n,), signs=(1,))),
            (f"{n}, row to row", functools.partial(_row_to_row, name=n)),
            (f"{n}, half to half", functools.partial(_halves, names=(n,))),
        ]

    def known(group: tuple[str, ...]) -> tuple[int, int]:
        """Return the sort key of a group: first by how much of it came or is known to the test;
        other places are as good as random.
        """
        much = ("leaked", "hidden", "common", "peer's input")
        came = any(n.startswith(("incoming", "opened")) for n in group)
        return -came - sum(n.startswith(much) for n in group), zlib.crc32(repr(group).encode())

    for two in sorted(itertools.combinations(names, 2), key=known)[:MAX_PAIRS]:
        pair = " & ".join(two)
        features += [
            (f"{pair} (+)", functools.partial(_sum, names=two, signs=(1, 1))),
            (f"{pair} (-)", functools.partial(_sum, names=two, signs=(1, -1))),
            (f"{pair} (^)", functools.partial(_xor, names=two)),
            (f"{pair} (^), half to half", functools.partial(_halves, names=two)),
        ]
    few = sorted(names, key=lambda n: known((n,)))[:40]
    triples = (
        t for t in itertools.combinations(few, 3) if any(n.startswith("incoming") for n in t)
    )
    for three in sorted(triples, key=known)[:MAX_TRIPLES]:
        triple = " & ".join(three)
        for signs in itertools.product((1,), (1, -1), (1, -1)):
            label = " ".join("+-"[s < 0] for s in signs[1:])
            features.append(
                (f"{triple} ({label})", functools.partial(_sum, names=three, signs=signs))
            )
        features.append((f"{triple} (^ ^)", functools.partial(_xor, names=three)))
    return features


def _sum(columns: dict[str, np.ndarray], names: Sequence[str], signs: Sequence[int]) -> np.ndarray:
    total = np.zeros(ROWS, np.uint64)
    for name, sign in zip(names, signs, strict=True):
        total = total + columns[name] if sign > 0 else total - columns[name]
    return total


def _xor(columns: dict[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    return functools.reduce(np.bitwise_xor, (columns[name] for name in names))


def _row_to_row(columns: dict[str, np.ndarray], name: str) -> np.ndarray:
    return columns[name][1:] - columns[name][:-1]


def _halves(columns: dict[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    words, half = _xor(columns, names), ROWS // 2
    return words[half : 2 * half] ^ words[:half]


def _chi_square_p(a: np.ndarray, b: np.ndarray) -> float:
    """Return the p-value of the two-sample chi-square test on two histograms of equal totals."""
    total = a + b
    used = total > 0
    # Bins that nothing falls into carry no degree of freedom; one used bin cannot differ.
    if used.sum() < 2:
        return 1.0
    statistic = float((((a - b) ** 2)[used] / total[used]).sum())
    return float(chdtrc(int(used.sum()) - 1, statistic))
