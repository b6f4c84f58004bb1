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

import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import binom, chi2, norm

from spu_llm.channel import Channel, CountingChannel, MemoryChannel, SealedChannel, Traffic
from spu_llm.correlation import Correlation, Form, Material, deal
from spu_llm.errors import PeerError, WireError
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
    sign_extended,
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
    common: list[np.ndarray]  # what both drew from their common stream
    leaked: list[np.ndarray]  # what the peer's masks are when it draws them from a known stream
    modelled: list[np.ndarray] | None  # words of the results by the op's integer model


class OpContract:
    """Inherit, set `op` and `cases`; see the module docstring.

    `masks` says whether some case makes a party mask what it sends; an op that only opens has none.
    `elementwise` ops treat every element alike; others have a leading axis of rows in every input
    but those at the positions `whole`, which all rows share. `fresh` ops hand out a random sharing
    of their result: when views are compared, an ideal one takes its place, so that a share which
    the peer's masks do not hide is noticed.
    """

    op: ProtocolOp
    cases: Sequence[Case]
    masks = True
    elementwise = True
    whole: Sequence[int] = ()
    fresh = False

    def hidden(self, own: list[Value], peer: list[Value], case: Case) -> list[np.ndarray]:
        """Words [ROWS, ...] under the masks of the peer's messages, where they are not simply its
        inputs or shares that follow from the view. The distinguisher gets them.
        """
        return []

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

    def test_tampered_messages_end_it(self) -> None:
        """Either direction, on a sealed channel: the receiver ends with a clear error."""
        for case in self.cases:
            cost = self.op.cost(*share_inputs(case)[CLIENT], **case.static)
            sizes = cost.client_to_provider, cost.provider_to_client
            for rank in (r for r in (CLIENT, PROVIDER) if sizes[r]):
                for how in TAMPERINGS:
                    try:
                        run_op(self.op, case, wrap=tampering(rank, how))
                    except WireError as exc:
                        assert "session ends" in str(exc), (how, exc)
                    else:
                        raise AssertionError(f"{case.forms}: a message {how} goes unnoticed")

    def test_views_are_simulated(self) -> None:
        for case in self._sampled_cases():
            for rank in (CLIENT, PROVIDER):
                found = distinguish(self.op, case, rank, fresh=self.fresh, hidden=self.hidden)
                assert not found, f"{case}, rank {rank}: {found}"

    def test_views_do_not_depend_on_the_secret(self) -> None:
        """To a party that knows nothing of the inputs, the smallest and the largest element look
        the same, its shares of the results included. This needs no simulator.
        """
        for smallest, largest in itertools.pairwise(self._sampled_cases()):
            kinds = [(c.forms, c.static, [x.shape for x in c.inputs]) for c in (smallest, largest)]
            if kinds[0] != kinds[1]:
                continue  # of two cases
            outcomes = run_op(self.op, smallest), run_op(self.op, largest)
            if any(owner_of(v) is not Owner.JOINT for v in outcomes[0].outputs[CLIENT]):
                continue
            for rank in (CLIENT, PROVIDER):
                held = [owner_of(v) for v in outcomes[0].inputs[rank]]
                own = [o for i, o in enumerate(held) if i not in self.whole]
                knows = Owner.of_rank(rank) in own or Owner.PUBLIC in own
                if knows or (rank == PROVIDER and "degenerate" in smallest.forms):
                    continue
                a, b = (
                    _columns(o, rank, o.views[rank], outgoing=True, peer=False) for o in outcomes
                )
                found = _differences(a, b)
                assert not found, f"{smallest}, rank {rank}: {found}"

    def test_broken_twins_are_caught(self) -> None:
        tried = 0
        for case in self._sampled_cases():
            outcome = run_op(self.op, case)
            for rank in (CLIENT, PROVIDER):
                if not outcome.views[1 - rank].own or not outcome.views[rank].incoming:
                    continue  # the peer masks nothing in this case: no mask to break
                for name, twin in MASK_TWINS.items():
                    found = distinguish(
                        self.op, case, rank, twin, fresh=self.fresh, hidden=self.hidden
                    )
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
            if words.size and (part.holder is Owner.JOINT or part.holder.rank == self.rank)
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

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known: set[tuple[int, ...]] = set()  # shapes of masks

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        self.known.add(words.shape)
        known = _leaked_stream().words(words.shape)
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
        self._for_client: queue.Queue[tuple[str, int, Material] | None] = queue.Queue()

    def stop(self) -> None:
        """No more units: the client is not left waiting."""
        self._for_client.put(None)

    def source(self, rank: int) -> _DealtHalf:
        return _DealtHalf(self, rank)

    def take(self, rank: int, correlation: Correlation, units: int, fixed: Any) -> Material:
        if rank == CLIENT:
            dealt = self._for_client.get(timeout=30)
            if dealt is None:
                raise PeerError("the other party has gone")
            name, count, material = dealt
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


def _leaked_stream() -> Prg:
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
    commons = [_RecordedStream(), _RecordedStream()]
    for rank in (CLIENT, PROVIDER):
        kind = peer_of[1] if peer_of is not None and peer_of[0] != rank else Party
        party = kind(
            rank, channels[rank], Prg.from_os(), FRAC_BITS, dealer.source(rank), commons[rank]
        )
        party.taps.append(drawn[rank].append)
        parties.append(party)
    outputs: list[Any] = [None, None]
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            outputs[rank] = op.run(parties[rank], inputs[rank], case.static)
        except BaseException as exc:  # re-raised in the caller's thread
            failures.append(exc)
            # The other one need not wait for its timeout.
            depths[rank].put(0)
            ends[rank].send(b"")
            dealer.stop()

    threads = [threading.Thread(target=work, args=(r,)) for r in (CLIENT, PROVIDER)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]  # the cause, not what the peer made of it
    views = [
        View(
            drawn[r],
            [np.frombuffer(data, np.uint8) for data in channels[r].incoming],
            [np.frombuffer(data, np.uint8) for data in channels[r].outgoing],
        )
        for r in (CLIENT, PROVIDER)
    ]
    broken = parties[1 - peer_of[0]] if peer_of else None
    peer_shapes = broken.known if isinstance(broken, KnownMask) else set()
    modelled = list(op.model(inputs, common_stream(), **case.static)) if op.model else None
    return Outcome(
        inputs, outputs, views, [c.traffic for c in counting], max(c.depth for c in channels),
        [p.ledger for p in parties], commons[CLIENT].drawn,
        [_leaked_stream().words(shape) for shape in sorted(peer_shapes)], modelled,
    )  # fmt: skip


TAMPERINGS = ("replayed", "cut", "reordered", "changed")


def tampering(rank: int, how: str) -> Callable[[int, Channel], Channel]:
    """For `run_op`: sealed channels, with the first message that `rank` sends tampered with.

    One message in each direction comes before those of the op, to be replayed or reordered.
    """

    def wrap(at: int, channel: Channel) -> Channel:
        wire = _Tampered(channel, how) if at == rank else channel
        sealed = SealedChannel(wire, b"a session's key", at)
        sealed.send(b"before")
        return _AfterTheFirst(sealed)

    return wrap


class _Tampered:
    def __init__(self, inner: Channel, how: str) -> None:
        self._inner, self._how = inner, how
        self._sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self._sent.append(data)
        first = len(self._sent) == 1
        if len(self._sent) == 2:
            middle = len(data) // 2
            changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            data = {"replayed": self._sent[0], "cut": data[:-1], "changed": changed}.get(
                self._how, data
            )
        if not (first and self._how == "reordered"):
            self._inner.send(data)
        if len(self._sent) == 2 and self._how == "reordered":
            self._inner.send(self._sent[0])

    def recv(self) -> bytes:
        return self._inner.recv()

    def close(self) -> None:
        self._inner.close()


class _AfterTheFirst:
    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self._waiting = True

    def send(self, data: bytes) -> None:
        self._inner.send(data)

    def recv(self) -> bytes:
        if self._waiting:
            self._waiting = False
            assert self._inner.recv() == b"before"
        return self._inner.recv()

    def close(self) -> None:
        self._inner.close()


class _RecordedStream(Prg):
    """The stream common to both parties, keeping what was drawn."""

    def __init__(self) -> None:
        self._inner = common_stream()
        self.drawn: list[np.ndarray] = []

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        self.drawn.append(self._inner.words(shape))
        return self.drawn[-1]


def common_stream() -> Prg:
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
        return sign_extended(a.words + b.words, a.bits)
    if isinstance(a, Bool) and isinstance(b, Bool):
        return as_words(decode(low_bits(a.words ^ b.words, a.bits), a.dtype, 0))
    held = [v.value for v in (a, b) if isinstance(v, Public | Private) and v.value is not None]
    for other in held[1:]:
        np.testing.assert_array_equal(held[0], other)
    return as_words(np.asarray(held[0]))


# ---- telling real views from simulated ones


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
        columns.append(_columns(outcome, rank, view, outgoing=outgoing, hidden=secrets))
    return _differences(*columns, first_only=twin is not None)


def _differences(
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
    return [f"{names[i]} with {names[j]}" for i, j in np.argwhere(np.triu(z, 1) > 8.5)[:3]]


def _repeats_p(a: np.ndarray, b: np.ndarray) -> float:
    """p-value that words repeat as often in both: each repeat falls on either side alike."""
    repeats = [len(x) - 1 - int(np.count_nonzero(np.diff(np.sort(x)))) for x in (a, b)]
    return float(min(1.0, 2 * binom.cdf(min(repeats), sum(repeats), 0.5)))


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
    return bits.sum(axis=0, dtype=np.int64)


def _bits_p(a: np.ndarray, b: np.ndarray, rows: int) -> float:
    """p-value (two proportions, Bonferroni over positions) that two bit frequencies agree."""
    pooled = (a + b) / (2 * rows)
    spread = np.sqrt(2 * rows * pooled * (1 - pooled))
    used = spread > 0
    if not used.any():
        return 1.0
    z = np.abs(a - b)[used] / spread[used]
    return float(min(1.0, 2 * norm.sf(z.max()) * used.sum()))


MAX_COLUMNS = 6  # of one array: the first and the last ones


def _columns(
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
    rank: int,
    prg: Prg,
    common: Prg,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    *,
    rounds: int,
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
