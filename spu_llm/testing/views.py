"""Telling real views from simulated ones, by statistics over many equal rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy.special import bdtr, chdtrc, ndtr  # the tails of scipy.stats, without its checks

from spu_llm.op import ProtocolOp, View
from spu_llm.party import Party
from spu_llm.prg import Prg
from spu_llm.testing.run import Case, Outcome, common_stream, run_op
from spu_llm.values import (
    Arith,
    Bool,
    Private,
    Value,
    as_words,
    low_bits,
)

ROWS = 4096  # samples of a view: one call with that many equal rows
BINS = 16
# Chance that one whole view comparison rejects a correct protocol.
FALSE_ALARM = 1e-9


def _ideal_share(value: Value) -> Value:
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
    hidden: Callable[[list[Value], list[Value], Case], list[np.ndarray]] = lambda *_: [],
) -> list[str]:
    """Names of the statistics by which `rank` tells a real view from a simulated one.

    Two independent runs; in the second, of intact parties, own randomness and messages come from
    the simulator instead, which sees the party's own inputs and outputs (`fresh`: an ideal share of
    the result, uniform and independent of all else). Statistics are signed sums
    and xors of up to three columns of the view, and differences of neighbouring rows and of the two
    halves; each is binned by its top and by its bottom bits and compared by a two-sample chi-square
    test, by the frequency of each of the 64 bits, and by how often words repeat;
    Bonferroni-corrected to FALSE_ALARM.
    """
    real = run_op(op, case, (rank, twin) if twin is not None else None)
    other = run_op(op, case)
    other.leaked = real.leaked
    if fresh:
        other.outputs[rank] = [_ideal_share(v) for v in other.outputs[rank]]
    simulated = op.simulate(
        rank, Prg.from_os(), common_stream(), other.inputs[rank], other.outputs[rank], **case.static
    )
    outgoing = bool(simulated.outgoing)
    columns = []
    for outcome, view in ((real, real.views[rank]), (other, simulated)):
        secrets = hidden(outcome.inputs[rank], outcome.inputs[1 - rank], case)
        columns.append(columns_of(outcome, rank, view, outgoing=outgoing, hidden=secrets))
    return differences(*columns, first_only=twin is not None)


def differences(
    a_columns: dict[str, np.ndarray], b_columns: dict[str, np.ndarray], *, first_only: bool = False
) -> list[str]:
    """Names of statistics in which two sets of columns differ."""
    if a_columns.keys() != b_columns.keys():
        return [f"one view has {list(a_columns)}, the other {list(b_columns)}"]
    limit = FALSE_ALARM / (3 * max(1, sum(1 for _ in _features(a_columns))))
    found = []
    for (name, a), (_, b) in zip(_features(a_columns), _features(b_columns), strict=True):
        # Of three columns, single bits are looked at under xor and the rest under sums: time.
        few = name.count(" & ") < 2
        if few or "^" not in name:
            ends = zip(_ends(a), _ends(b), strict=True)
            if any(_chi_square_p(x, y) < limit for x, y in ends):
                found.append(f"bins of {name}")
        if (few or "^" in name) and _bits_p(_ones(a), _ones(b), len(a)) < limit:
            found.append(f"bits of {name}")
        if few and _repeats_p(a, b) < limit:
            found.append(f"repeats of {name}")
        if found and first_only:
            return found
    return found + _pairs_of_bits(a_columns, b_columns)


def _pairs_of_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """Pairs of single bits, anywhere in the view, that go together more in one set of columns.

    Such as a mask that serves twice, in two places. Compares all inner products of bits as +-1;
    z beyond 8.5 has a chance below 1e-16 for each of some million pairs.
    """

    def signs(columns: dict[str, np.ndarray]) -> np.ndarray:
        bits = [
            np.unpackbits(words.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
            for name, words in columns.items()
            if not name.startswith("peer's")
        ]
        return np.concatenate(bits, axis=1).astype(np.float32) * 2 - 1 if bits else np.ones((1, 0))

    names = [f"{name} bit {i}" for name in a if not name.startswith("peer's") for i in range(64)]
    one, other = signs(a), signs(b)
    # A bit that never changes in either says nothing here.
    varies = (np.ptp(one, axis=0) > 0) | (np.ptp(other, axis=0) > 0) if names else np.ones(0, bool)
    one, other = one[:, varies], other[:, varies]
    names = [n for n, v in zip(names, varies, strict=True) if v]
    z = np.abs(one.T @ one - other.T @ other) / np.sqrt(2 * ROWS)
    return [f"{names[i]} with {names[j]}" for i, j in np.argwhere(np.triu(z, 1) > 8.5)]


def _repeats_p(a: np.ndarray, b: np.ndarray) -> float:
    """p-value that words repeat as often in both: each repeat falls on either side alike."""
    repeats = [len(x) - 1 - int(np.count_nonzero(np.diff(np.sort(x)))) for x in (a, b)]
    return float(min(1.0, 2 * bdtr(min(repeats), sum(repeats), 0.5)))


def _ends(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Histograms of the top and of the bottom four bits."""
    return (
        np.bincount((words >> np.uint64(60)).astype(int), minlength=BINS),
        np.bincount((words & np.uint64(15)).astype(int), minlength=BINS),
    )


def _ones(words: np.ndarray) -> np.ndarray:
    """How often each of the 64 bits is set."""
    bits = np.unpackbits(
        np.ascontiguousarray(words).view(np.uint8).reshape(-1, 8), axis=1, bitorder="little"
    )
    # Byte by byte, eight at a time: 128 rows cannot overflow one.
    whole = len(bits) // 128 * 128
    eight = bits[:whole].view(np.uint64).reshape(-1, 128, 8).sum(axis=1, dtype=np.uint64)
    rest = bits[whole:].sum(axis=0, dtype=np.int64)
    return eight.view(np.uint8).reshape(-1, 64).sum(axis=0, dtype=np.int64) + rest


def _bits_p(a: np.ndarray, b: np.ndarray, rows: int) -> float:
    """p-value (two proportions, Bonferroni over positions) that two bit frequencies agree."""
    pooled = (a + b) / (2 * rows)
    spread = np.sqrt(2 * rows * pooled * (1 - pooled))
    used = spread > 0
    if not used.any():
        return 1.0
    z = np.abs(a - b)[used] / spread[used]
    return float(min(1.0, 2 * ndtr(-z.max()) * used.sum()))


MAX_COLUMNS = 6  # of one array: the first and the last ones


def columns_of(
    outcome: Outcome,
    rank: int,
    view: View,
    *,
    outgoing: bool,
    peer: bool = True,
    hidden: Sequence[np.ndarray] = (),
) -> dict[str, np.ndarray]:
    """One word per row and column: all that the party sees; with `peer`, what it does not, too."""
    columns: dict[str, np.ndarray] = {}

    def add(name: str, readings: Sequence[np.ndarray]) -> None:
        for i, words in enumerate(readings):
            chosen = range(words.shape[1])
            if len(chosen) > MAX_COLUMNS:
                chosen = [*chosen[: MAX_COLUMNS // 2], *chosen[-(MAX_COLUMNS // 2) :]]  # type: ignore[assignment]
            for j in chosen:
                if words[:, j].any():  # the peer's own masks are zeros here
                    columns[f"{name}.{i}.{j}"] = np.ascontiguousarray(words[:, j])

    values = {"input": outcome.inputs[rank], "output": outcome.outputs[rank]}
    if peer:  # a view must not depend on these beyond the output
        values["peer's input"] = outcome.inputs[1 - rank]
    for name, held in values.items():
        for i, v in enumerate(held):
            if isinstance(v, Arith | Bool) and len(v.words) == ROWS:
                add(f"{name} {i}", [low_bits(v.words, v.bits).reshape(ROWS, -1)])
            elif isinstance(v, Private) and v.value is not None and len(v.value) == ROWS:
                add(f"{name} {i}", [as_words(v.value).reshape(ROWS, -1)])
    for i, words in enumerate(hidden):
        add(f"hidden {i}", [words.reshape(ROWS, -1)])
    for i, words in enumerate(view.own):
        add(f"own {i}", _own_rows(words))
    for i, data in enumerate(view.incoming):
        add(f"incoming {i}", _message_rows(data))
    for i, words in enumerate(outcome.common):
        add(f"common {i}", _own_rows(words))
    if outgoing:
        for i, (come, gone) in enumerate(zip(view.incoming, view.outgoing, strict=False)):
            if come.nbytes == gone.nbytes and (readings := _message_rows(come)):
                add(f"opened {i}", [readings[-1] ^ _message_rows(gone)[-1]])
        sent = [(i, _message_rows(data)) for i, data in enumerate(view.outgoing)]
        for i, words in [(i, readings[-1]) for i, readings in sent if readings]:
            add(f"outgoing {i}", [words])
            for j, own in enumerate(view.own):
                # The bit planes that this mask may hide: as many as it has.
                if own.any() and 8 * view.outgoing[i].nbytes == 64 * own.size < 64 * ROWS:
                    add(f"share sent {i} under {j}", [words ^ _own_rows(own)[-1]])
    # Words this party can compute because the peer draws its masks from a stream it has, too.
    for i, words in enumerate(outcome.leaked):
        add(f"leaked {i}", _own_rows(words))
    return columns


def _own_rows(words: np.ndarray) -> list[np.ndarray]:
    """Own random words as [ROWS, columns], in each way they may be read: words per row, bits a word
    each, bit-sliced ones (64 rows a word) last.
    """
    found = []
    if words.size and words.size % ROWS == 0:
        rows = words.reshape(ROWS, -1)
        if rows.shape[1] > 1 and rows.max() <= 1:
            rows = _pack_planes(np.packbits(rows.T.astype(np.uint8), axis=1, bitorder="little"))
        found.append(rows)
    if len(words) != ROWS and words.size % (ROWS // 64) == 0 and words.size < 4 * ROWS:
        planes = words.reshape(ROWS // 64, -1).T
        found.append(_pack_planes(np.ascontiguousarray(planes).view(np.uint8)))
    return found


def _message_rows(data: np.ndarray) -> list[np.ndarray]:
    """A message (words or bytes) as [ROWS, columns], in each way it may be read: words row by row
    or column by column, narrow words, bits row by row, planes of one bit per row.
    """
    raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
    if raw.size * 8 % ROWS:
        return []
    bits = raw.size * 8 // ROWS
    found = []
    if bits % 64 == 0:
        words = raw.view(np.uint64)
        found.append(words.reshape(ROWS, -1))
        if bits > 64:
            found.append(words.reshape(-1, ROWS).T)
    if 1 < bits < 64:  # bits row by row
        rows = np.unpackbits(raw, bitorder="little").reshape(ROWS, bits)
        found.append(_pack_planes(np.packbits(rows.T, axis=1, bitorder="little")))
    if bits <= 256:
        found.append(_pack_planes(raw.reshape(bits, -1)))
    return found


def _pack_planes(planes: np.ndarray) -> np.ndarray:
    """Planes [bits, rows / 8] of packed bits -> words [rows, bits / 64], plane i at bit i."""
    words = np.zeros((planes.shape[1] * 8, (len(planes) + 63) // 64), np.uint64)
    for i, plane in enumerate(planes):
        bit = np.unpackbits(plane, bitorder="little").astype(np.uint64)
        words[:, i // 64] |= bit << np.uint64(i % 64)
    return words


MAX_TRIPLES = 3_000  # features


def _features(columns: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Signed sums and xors of up to three columns; of three, one has come from the peer."""
    names = list(columns)
    for n in names:
        yield n, columns[n]
        yield f"{n}, row to row", columns[n][1:] - columns[n][:-1]
        yield f"{n}, half to half", columns[n][ROWS // 2 :] ^ columns[n][: ROWS // 2]
    for a, b in itertools.combinations(names, 2):
        yield f"{a} & {b} (+)", columns[a] + columns[b]
        yield f"{a} & {b} (-)", columns[a] - columns[b]
        yield f"{a} & {b} (^)", (both := columns[a] ^ columns[b])
        yield f"{a} & {b} (^), half to half", both[ROWS // 2 :] ^ both[: ROWS // 2]
    triples = [
        t for t in itertools.combinations(names, 3) if any(n.startswith("incoming") for n in t)
    ]
    # What the test knows besides the view comes first: there, a few messages tell a lot.
    triples.sort(key=lambda t: -sum(n.startswith(("leaked", "hidden", "common")) for n in t))
    triples = triples[: MAX_TRIPLES // 5]
    for a, b, c in triples:
        x, y, z = columns[a], columns[b], columns[c]
        for label, v in (("+ +", x + y + z), ("+ -", x + y - z), ("- +", x - y + z),
                         ("- -", x - y - z), ("^ ^", x ^ y ^ z)):  # fmt: skip
            yield f"{a} & {b} & {c} ({label})", v


def _chi_square_p(a: np.ndarray, b: np.ndarray) -> float:
    """p-value of the two-sample chi-square test on two histograms of equal totals."""
    total = a + b
    used = total > 0
    # Bins that nothing falls into carry no degree of freedom; one used bin cannot differ.
    if used.sum() < 2:
        return 1.0
    statistic = float((((a - b) ** 2)[used] / total[used]).sum())
    return float(chdtrc(int(used.sum()) - 1, statistic))
