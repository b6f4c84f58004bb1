"""One contract test that every protocol op inherits, and a toy op to try it on.

    class TestReveal(OpContract):
        op = reveal
        cases = [Case(...), ...]

The contract runs the op between two threads on an in-memory channel and checks, for every case:
the result against the plaintext reference, messages and bytes against the declared cost, openings
against the declared ones, and each party's view against the op's simulator. Broken twins of the
party (mask dropped, reused, known to the peer) must make the view check fail.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import chi2, norm

from spu_llm.channel import Channel, CountingChannel, MemoryChannel, Traffic
from spu_llm.correlation import Correlation, Form, Material, deal
from spu_llm.errors import WireError
from spu_llm.ledger import Ledger
from spu_llm.op import Cost, Functionality, ProtocolOp, View, protocol_op
from spu_llm.party import Party
from spu_llm.prg import Prg
from spu_llm.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Bool,
    Owner,
    Private,
    Public,
    Value,
    as_words,
    decode,
    low_bits,
)

FRAC_BITS = 18
ROWS = 4096  # samples of a view: one call with that many equal rows
BINS = 16
# Chance that one whole view comparison rejects a correct protocol.
FALSE_ALARM = 1e-9


@dataclass(frozen=True)
class Case:
    """Inputs of one call: integer arrays, the form each is held in, and static parameters.

    Forms: "arith", "bool<bits>", "client", "provider", "public"; "degenerate" is an arithmetic
    share without a mask of its own (one party holds the value, the other zero), which SPU's own
    conversions produce. "arith<bits>" is a narrow share.
    """

    inputs: tuple[np.ndarray, ...]
    forms: tuple[str, ...]
    static: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What both parties saw of one run."""

    inputs: list[list[Value]]
    outputs: list[list[Value]]
    views: list[View]
    traffic: list[Traffic]  # client's, provider's
    rounds: int
    ledgers: list[Ledger]
    common: list[np.ndarray]  # what the peer's masks are when it draws them from a known stream
    modelled: list[np.ndarray] | None  # words of the results by the op's integer model


class OpContract:
    """Inherit, set `op` and `cases`; see the module docstring.

    `masks` says whether some case makes a party mask what it sends; an op that only opens has none.
    `elementwise` ops treat every element alike; others have a leading axis of rows in every input
    but those at the positions `whole`, which all rows share.
    """

    op: ProtocolOp
    cases: Sequence[Case]
    masks = True
    elementwise = True
    whole: Sequence[int] = ()

    def test_result_is_the_reference(self) -> None:
        assert self.cases
        for case in self.cases:
            outcome = run_op(self.op, case)
            expected: Any = outcome.modelled
            if expected is None:
                expected = self.op.reference(*case.inputs, **case.static)
            expected = expected if isinstance(expected, tuple | list) else [expected]
            for i, value in enumerate(expected):
                found = reconstruct_words([outputs[i] for outputs in outcome.outputs])
                np.testing.assert_array_equal(found, as_words(np.asarray(value)), str(case.forms))

    def test_result_belongs_to_whom_it_should(self) -> None:
        """Each result is held in a form of its declared owner; nothing is readable beyond that."""
        for case in self.cases:
            outcome = run_op(self.op, case)
            owners = self.op.owners(*map(owner_of, outcome.inputs[CLIENT]), **case.static)
            for outputs in outcome.outputs:
                assert [owner_of(v) for v in outputs] == list(owners), case.forms

    def test_cost_is_as_declared(self) -> None:
        for case in self.cases:
            outcome = run_op(self.op, case)
            cost = self.op.cost(*outcome.inputs[CLIENT], **case.static)
            client, provider = outcome.traffic
            assert client.sent_messages + provider.sent_messages == cost.messages, case.forms
            assert client.sent_bytes == cost.client_to_provider, case.forms
            assert provider.sent_bytes == cost.provider_to_client, case.forms
            assert outcome.rounds == cost.rounds, case.forms
            # Nothing is sent that nobody reads.
            assert client.received_bytes == provider.sent_bytes, case.forms
            assert provider.received_bytes == client.sent_bytes, case.forms

    def test_opens_what_is_declared(self) -> None:
        for case in self.cases:
            outcome = run_op(self.op, case)
            declared = self.op.opens(*outcome.inputs[CLIENT], **case.static)
            for ledger in outcome.ledgers:
                assert ledger.openings == list(declared), case.forms

    def test_views_are_simulated(self) -> None:
        for case in self._sampled_cases():
            for rank in (CLIENT, PROVIDER):
                found = distinguish(self.op, case, rank)
                assert not found, f"{case}, rank {rank}: {found}"

    def test_broken_twins_are_caught(self) -> None:
        tried = 0
        for case in self._sampled_cases():
            outcome = run_op(self.op, case)
            for rank in (CLIENT, PROVIDER):
                if not outcome.views[1 - rank].own:
                    continue  # the peer masks nothing in this case: no mask to break
                for name, twin in MASK_TWINS.items():
                    found = distinguish(self.op, case, rank, twin)
                    assert found, f"{case}: rank {rank} does not notice a {name}"
                    tried += 1
        assert bool(tried) == self.masks

    def _sampled_cases(self) -> list[Case]:
        """Per case, its smallest and largest element in ROWS equal rows: one call, ROWS views."""
        sampled = []
        for case in self.cases:
            inputs = [np.asarray(x) for x in case.inputs]
            if self.elementwise:
                inputs = [x.reshape(-1) for x in inputs]
                order = np.argsort(inputs[0], kind="stable").tolist()
            else:
                order = list(range(len(inputs[0])))
            for i in {order[0], order[-1]} if order else ():
                rows = tuple(
                    x if j in self.whole else np.repeat(x[i : i + 1], ROWS, axis=0)
                    for j, x in enumerate(inputs)
                )
                sampled.append(Case(rows, case.forms, case.static))
        return sampled


def owner_of(value: Value) -> Owner:
    """Who can read a value, by its form."""
    if isinstance(value, Public):
        return Owner.PUBLIC
    return Owner.of_rank(value.owner) if isinstance(value, Private) else Owner.JOINT


# ---- running an op


class BrokenParty(Party):
    """A party whose masks are spoiled before it uses them; results it prepared stay as they are."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        raise NotImplementedError

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.spoil(super().mask(shape), Form.ARITH)

    def take(
        self, correlation: Correlation, units: int, fixed: np.ndarray | None = None
    ) -> Material:
        material = super().take(correlation, units, fixed)
        masks = [
            self.spoil(words, part.form)
            if part.holder is Owner.JOINT or part.holder.rank == self.rank
            else words
            for part, words in zip(correlation.masks, material.masks, strict=True)
        ]
        return Material(masks, material.results)


class DroppedMask(BrokenParty):
    """Broken: masks nothing."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        return np.zeros_like(words)


class ReusedMask(BrokenParty):
    """Broken: the same mask for every element."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        if words.size == 0:
            return words
        if form is Form.BOOL:  # bit-sliced: an element is a bit
            lowest = words.reshape(-1, words.shape[-1])[:1] & np.uint64(1)
            return np.broadcast_to(np.uint64(0) - lowest, words.shape)
        return np.broadcast_to(words.reshape(-1)[:1], words.shape)


class HalfReusedMask(BrokenParty):
    """Broken: the second half of the elements reuses the masks of the first."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        flat = words.reshape(-1).copy()
        half = flat.size // 2
        flat[half : 2 * half] = flat[:half]
        return flat.reshape(words.shape)


class ThinMask(BrokenParty):
    """Broken: one bit is not masked: in the middle of a word, the first of several, every other."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        thin = words.copy()
        if form is Form.BOOL:
            thin[..., 0] = 0
        elif form is Form.BIT:
            thin[::2] = 0
        else:
            thin &= ~np.uint64(1 << 30)
        return thin


class KnownMask(BrokenParty):
    """Broken: masks from a stream that the peer has, too."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        known = _common_stream().words(words.shape)
        return known & np.uint64(1) if form is Form.BIT else known


MASK_TWINS: dict[str, type[Party]] = {
    "dropped mask": DroppedMask,
    "reused mask": ReusedMask,
    "mask reused once": HalfReusedMask,
    "mask with a hole": ThinMask,
    "mask the peer can recompute": KnownMask,
}


class Dealer:
    """Correlated randomness for two threads, from one place that sees everything: tests only."""

    def __init__(self) -> None:
        self._for_client: queue.Queue[tuple[str, int, Material]] = queue.Queue()

    def source(self, rank: int) -> _DealtHalf:
        return _DealtHalf(self, rank)

    def take(self, rank: int, correlation: Correlation, units: int, fixed: Any) -> Material:
        if rank == CLIENT:
            name, count, material = self._for_client.get(timeout=30)
            assert (name, count) == (correlation.name, units), "the parties take different units"
            return material
        masks = [correlation.draw(r, Prg.from_os(), units) for r in (CLIENT, PROVIDER)]
        results = deal(correlation, masks, Prg.from_os(), fixed)
        self._for_client.put(
            (correlation.name, units, Material(masks[CLIENT], results[CLIENT]))
        )
        return Material(masks[PROVIDER], results[PROVIDER])


@dataclass(frozen=True)
class _DealtHalf:
    dealer: Dealer
    rank: int

    def take(
        self, correlation: Correlation, units: int, fixed: np.ndarray | None = None
    ) -> Material:
        return self.dealer.take(self.rank, correlation, units, fixed)


def _common_stream() -> Prg:
    return Prg.from_seed(0, "known to both parties")


class _TracedChannel:
    """Records what comes in, whoever asks for it, and how deep the chain of messages is."""

    def __init__(self, inner: CountingChannel, sent: queue.Queue[int], came: queue.Queue[int]):
        self._inner, self._sent, self._came = inner, sent, came
        self.incoming: list[bytes] = []
        self.outgoing: list[bytes] = []
        self.depth = 0

    def send(self, data: bytes) -> None:
        self._sent.put(self.depth + 1)
        self.outgoing.append(data)
        self._inner.send(data)

    def recv(self) -> bytes:
        data = self._inner.recv()
        self.depth = max(self.depth, self._came.get())
        self.incoming.append(data)
        return data

    def close(self) -> None:
        self._inner.close()


def run_op(
    op: ProtocolOp,
    case: Case,
    peer_of: tuple[int, type[Party]] | None = None,
    wrap: Callable[[int, Channel], Channel] = lambda rank, channel: channel,
) -> Outcome:
    """Run `op` between two threads. `peer_of` = (rank, twin) breaks the *other* party's class.

    `wrap` may put something around each party's channel, under what counts and records.
    """
    inputs = share_inputs(case)
    ends = MemoryChannel.pair()
    counting = [CountingChannel(wrap(r, ends[r])) for r in (CLIENT, PROVIDER)]
    depths: list[queue.Queue[int]] = [queue.Queue(), queue.Queue()]
    channels = [_TracedChannel(counting[r], depths[r], depths[1 - r]) for r in (CLIENT, PROVIDER)]
    drawn: list[list[np.ndarray]] = [[], []]
    parties = []
    dealer = Dealer()
    for rank in (CLIENT, PROVIDER):
        kind = peer_of[1] if peer_of is not None and peer_of[0] != rank else Party
        party = kind(
            rank, channels[rank], Prg.from_os(), FRAC_BITS, dealer.source(rank), _dither()
        )
        party.taps.append(drawn[rank].append)
        parties.append(party)
    outputs: list[Any] = [None, None]

    def work(rank: int) -> None:
        try:
            outputs[rank] = op.run(parties[rank], inputs[rank], case.static)
        except BaseException as exc:  # re-raised in the caller's thread
            outputs[rank] = exc
            ends[rank].send(b"")  # the other one need not wait for its timeout

    threads = [threading.Thread(target=work, args=(r,)) for r in (CLIENT, PROVIDER)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    failed = [(p, r) for p, r in zip(parties, outputs, strict=True) if isinstance(r, BaseException)]
    if failed:
        # The first cause, not what the peer made of it.
        failed.sort(key=lambda f: isinstance(f[1], WireError) and "has 0 bytes" in str(f[1]))
        raise failed[0][1]
    views = [
        View(
            drawn[r],
            [np.frombuffer(data, np.uint8) for data in channels[r].incoming],
            [np.frombuffer(data, np.uint8) for data in channels[r].outgoing],
        )
        for r in (CLIENT, PROVIDER)
    ]
    peer_shapes = {words.shape for words in drawn[1 - peer_of[0]]} if peer_of else set()
    modelled = list(op.model(inputs, _dither(), **case.static)) if op.model else None
    return Outcome(
        inputs, outputs, views, [c.traffic for c in counting], max(c.depth for c in channels),
        [p.ledger for p in parties],
        [_common_stream().words(shape) for shape in sorted(peer_shapes)], modelled,
    )  # fmt: skip


def _dither() -> Prg:
    return Prg.from_seed(1, "common to both parties")


def share_inputs(case: Case) -> list[list[Value]]:
    """Both parties' inputs for a case, freshly shared."""
    sharing = Prg.from_os()
    both: list[list[Value]] = [[], []]
    for x, form in zip(case.inputs, case.forms, strict=True):
        x = np.asarray(x)
        words, dtype = as_words(x), x.dtype
        if form == "public":
            pair: list[Value] = [Public(x), Public(x)]
        elif form in ("client", "provider"):
            owner = CLIENT if form == "client" else PROVIDER
            pair = [Private(owner, x.shape, dtype, x if r == owner else None) for r in (0, 1)]
        elif form == "degenerate" or form.startswith("arith"):
            bits = int(form.removeprefix("arith") or 64) if form != "degenerate" else 64
            mask = np.zeros(x.shape, np.uint64) if form == "degenerate" else sharing.words(x.shape)
            noise = sharing.words(x.shape) << np.uint64(bits) if bits < 64 else np.uint64(0)
            pair = [Arith(mask, dtype, 0, bits), Arith(words - mask + noise, dtype, 0, bits)]
        else:
            bits = int(form.removeprefix("bool"))
            mask = sharing.words(x.shape)  # the bits above `bits` mean nothing, so they are noise
            pair = [Bool(mask, dtype, 0, bits), Bool(low_bits(words, bits) ^ mask, dtype, 0, bits)]
        both[0].append(pair[0])
        both[1].append(pair[1])
    return both


def reconstruct_words(values: Sequence[Value]) -> np.ndarray:
    """Ring words of both parties' values together."""
    a, b = values
    if isinstance(a, Arith) and isinstance(b, Arith):
        spare = np.uint64(64 - a.bits)
        return (((a.words + b.words) << spare).view(np.int64) >> spare.view(np.int64)).view(
            np.uint64
        )
    if isinstance(a, Bool) and isinstance(b, Bool):
        return as_words(decode(low_bits(a.words ^ b.words, a.bits), a.dtype, 0))
    held = [v.value for v in (a, b) if isinstance(v, Public | Private) and v.value is not None]
    for other in held[1:]:
        np.testing.assert_array_equal(held[0], other)
    return as_words(np.asarray(held[0]))


# ---- telling real views from simulated ones


def distinguish(
    op: ProtocolOp, case: Case, rank: int, twin: type[Party] | None = None
) -> list[str]:
    """Names of the statistics by which `rank` tells a real view from a simulated one.

    Two independent runs; in the second, own randomness and incoming words come from the simulator
    instead, which sees the party's own inputs and outputs. Statistics are signed sums and xors of
    up to three columns of the view, and differences of neighbouring rows; each is binned by its
    top and by its bottom bits and compared by a two-sample chi-square test, by the frequency of
    each of the 64 bits, and by how often words repeat; Bonferroni-corrected to FALSE_ALARM.
    """
    peer = (rank, twin) if twin is not None else None
    real = run_op(op, case, peer)
    other = run_op(op, case, peer)
    simulated = op.simulate(
        rank, Prg.from_os(), other.inputs[rank], other.outputs[rank], **case.static
    )
    outgoing = bool(simulated.outgoing)
    real_columns = _columns(real, rank, real.views[rank], outgoing=outgoing)
    sim_columns = _columns(other, rank, simulated, outgoing=outgoing)
    if real_columns.keys() != sim_columns.keys():
        return [f"view has {list(real_columns)}, simulated {list(sim_columns)}"]
    names, real_stats = _measure(real_columns)
    _, sim_stats = _measure(sim_columns)
    limit = FALSE_ALARM / (3 * max(1, len(names)))  # a party may see nothing at all
    found = []
    for name, a, b in zip(names, real_stats, sim_stats, strict=True):
        if _chi_square_p(a.top, b.top) < limit or _chi_square_p(a.bottom, b.bottom) < limit:
            found.append(f"bins of {name}")
        if _bits_p(a.ones, b.ones, a.rows) < limit:
            found.append(f"bits of {name}")
        # Uniform words of 64 bits do not repeat among ROWS; words of few bits repeat alike.
        if abs(a.distinct - b.distinct) > a.rows // 16:
            found.append(f"repeats of {name}")
    return found


def _measure(columns: dict[str, np.ndarray]) -> tuple[list[str], list[_Statistics]]:
    measured = [(name, _statistics(words)) for name, words in _features(columns)]
    return [name for name, _ in measured], [s for _, s in measured]


@dataclass(frozen=True)
class _Statistics:
    rows: int
    top: np.ndarray
    bottom: np.ndarray
    ones: np.ndarray  # per bit position
    distinct: int


def _statistics(words: np.ndarray) -> _Statistics:
    words = np.ascontiguousarray(words)
    bits = np.unpackbits(words.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    return _Statistics(
        rows=words.size,
        top=np.bincount((words >> np.uint64(60)).astype(int), minlength=BINS),
        bottom=np.bincount((words & np.uint64(15)).astype(int), minlength=BINS),
        ones=bits.sum(axis=0, dtype=np.int64),
        distinct=np.unique(words).size,
    )


def _bits_p(a: np.ndarray, b: np.ndarray, rows: int) -> float:
    """p-value (two proportions, Bonferroni over positions) that two bit frequencies agree."""
    pooled = (a + b) / (2 * rows)
    spread = np.sqrt(2 * rows * pooled * (1 - pooled))
    used = spread > 0
    if not used.any():
        return 1.0
    z = np.abs(a - b)[used] / spread[used]
    return float(min(1.0, 2 * norm.sf(z.max()) * used.sum()))


def _columns(
    outcome: Outcome, rank: int, view: View, *, outgoing: bool
) -> dict[str, np.ndarray]:
    """One word per row and column: all that the party sees, and what the test knows besides."""
    columns: dict[str, np.ndarray] = {}

    def add(name: str, readings: Sequence[np.ndarray]) -> None:
        for i, words in enumerate(readings):
            for j, column in enumerate(words.T):
                if column.any():  # the peer's own masks are zeros here
                    columns[f"{name}.{i}.{j}"] = np.ascontiguousarray(column)

    values = {"input": outcome.inputs[rank], "output": outcome.outputs[rank],
              # A view must not depend on these beyond the output.
              "peer's input": outcome.inputs[1 - rank]}  # fmt: skip
    for name, held in values.items():
        for i, v in enumerate(held):
            if isinstance(v, Arith | Bool) and len(v.words) == ROWS:
                add(f"{name} {i}", [v.words.reshape(ROWS, -1)])
            elif isinstance(v, Private) and v.value is not None and len(v.value) == ROWS:
                add(f"{name} {i}", [as_words(v.value).reshape(ROWS, -1)])
    for i, words in enumerate(view.own):
        add(f"own {i}", _own_rows(words))
    for i, data in enumerate(view.incoming):
        add(f"incoming {i}", _message_rows(data))
    if outgoing:
        sent = [(i, c) for i, data in enumerate(view.outgoing) for c in _message_rows(data)]
        for i, words in sent:
            add(f"outgoing {i}", [words])
            for j, own in enumerate(view.own):
                if len(own) != ROWS and (mask := _own_rows(own)[0]).shape == words.shape:
                    add(f"share sent {i} under {j}", [words ^ mask])
    # Words this party can compute because the peer draws its masks from a stream it has, too.
    for i, words in enumerate(outcome.common):
        add(f"common {i}", _own_rows(words))
    return columns


def _own_rows(words: np.ndarray) -> list[np.ndarray]:
    """Own random words as [ROWS, columns]: words per row, or bit-sliced ones (64 rows a word)."""
    if len(words) == ROWS:
        return [words.reshape(ROWS, -1)]
    if words.size % (ROWS // 64):
        return []  # of a fixed size that does not depend on the rows
    planes = words.reshape(ROWS // 64, -1).T
    return [_pack_planes(np.ascontiguousarray(planes).view(np.uint8))]


def _message_rows(data: np.ndarray) -> list[np.ndarray]:
    """A message (words or bytes) as [ROWS, columns], in each way it may be read: words row by row
    or column by column, narrow words, planes of one bit per row.
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
    elif bits % 8 == 0 and bits > 8:
        found.append(raw.reshape(ROWS, -1).astype(np.uint64))
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


MAX_TRIPLES = 40_000  # more columns than that takes: only pairs, and triples of whole messages


def _features(columns: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Signed sums and xors of up to three columns; of three, one has come from the peer."""
    names = list(columns)
    for n in names:
        yield n, columns[n]
        yield f"{n}, row to row", columns[n][1:] - columns[n][:-1]
        yield f"{n}, half to half", columns[n][ROWS // 2 :] ^ columns[n][: ROWS // 2]
    for a, b in itertools.combinations(names, 2):
        yield f"{a} + {b}", columns[a] + columns[b]
        yield f"{a} - {b}", columns[a] - columns[b]
        yield f"{a} ^ {b}", (both := columns[a] ^ columns[b])
        yield f"{a} ^ {b}, half to half", both[ROWS // 2 :] ^ both[: ROWS // 2]
    triples = [
        t for t in itertools.combinations(names, 3) if any(n.startswith("incoming") for n in t)
    ]
    if 5 * len(triples) > MAX_TRIPLES:
        triples = [t for t in triples if all(n.endswith(".0") for n in t)][: MAX_TRIPLES // 5]
    for a, b, c in triples:
        x, y, z = columns[a], columns[b], columns[c]
        for label, v in (("+ +", x + y + z), ("+ -", x + y - z), ("- +", x - y + z),
                         ("- -", x - y - z), ("^ ^", x ^ y ^ z)):  # fmt: skip
            yield f"{a} {b} {c} ({label})", v


def _chi_square_p(a: np.ndarray, b: np.ndarray) -> float:
    """p-value of the two-sample chi-square test on two histograms of equal totals."""
    total = a + b
    used = total > 0
    # Bins that nothing falls into carry no degree of freedom; one used bin cannot differ.
    if used.sum() < 2:
        return 1.0
    statistic = float((((a - b) ** 2)[used] / total[used]).sum())
    return float(chi2.sf(statistic, int(used.sum()) - 1))


# ---- the toy op


def _toy_two_party(party: Party, x: Value, *, rounds: int) -> Arith:
    """Fresh arithmetic shares of the same value, `rounds` times over.

    1. Each party draws a mask of its own and sends it; 2. y = x - own mask + the peer's.
    The next round's mask covers the difference of two shares, so rounds depend on each other.
    """
    assert isinstance(x, Arith)
    words = x.words
    for _ in range(rounds):
        # 1. The word sent is half of what this party gives up, hidden by its own fresh mask.
        mine = party.mask(x.shape)
        party.send(words + mine)
        theirs = party.recv(x.shape)
        # 2. The parties swap roles: each now holds the peer's masked share minus its own mask.
        words = theirs - mine
    return Arith(words, x.dtype, x.frac_bits)


def _toy_simulate(
    rank: int, prg: Prg, inputs: Sequence[Value], outputs: Sequence[Value], *, rounds: int
) -> View:
    """Masks are uniform; incoming words follow from them and this party's own shares."""
    (y,) = outputs
    assert isinstance(y, Arith)
    own = [prg.words(y.shape) for _ in range(rounds)]
    # The peer's fresh mask makes every incoming word uniform; the last one is fixed by the output.
    incoming = [prg.words(y.shape) for _ in range(rounds - 1)]
    incoming.append(y.words + own[-1])
    return View(own, incoming)


def _toy_cost(x: Value, *, rounds: int) -> Cost:
    size = 8 * int(np.prod(x.shape, dtype=int)) * rounds
    return Cost(2 * rounds, rounds, size, size)


toy_reshare = protocol_op(
    "toy_reshare",
    reference=lambda x, rounds: x,
    two_party=_toy_two_party,
    owners=lambda x, rounds: [Owner.JOINT],
    cost=_toy_cost,
    functionality=Functionality(),
    simulate=_toy_simulate,
)
