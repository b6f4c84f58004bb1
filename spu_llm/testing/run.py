"""Running one op between two threads, on shares dealt for the occasion."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from spu_llm.core.channel import Channel, CountingChannel, MemoryChannel, Traffic
from spu_llm.core.correlation import Correlation, Correlations, deal
from spu_llm.core.errors import PeerError
from spu_llm.core.integers import Factor
from spu_llm.core.ledger import Ledger
from spu_llm.core.op import ProtocolOp, View
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Bool,
    Private,
    Public,
    Value,
    as_words,
    decode,
    joined_words,
    low_bits,
)

FRAC_BITS = 18


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


@dataclass(frozen=True)
class Taken:
    """Units of a correlation as one party got them; `fixed` as the provider gave it."""

    correlation: Correlation
    correlations: Correlations
    fixed: Factor | None = None


@dataclass
class Fresh:
    """All randomness that one party got in a run: words of its own stream, and prepared units;
    `words` has the words of both in their order.
    """

    own: list[np.ndarray] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    words: list[np.ndarray] = field(default_factory=list)

    def keep(self, taken: Taken) -> None:
        self.taken.append(taken)
        self.words += [*taken.correlations.masks, *taken.correlations.results]


@dataclass
class Outcome:
    """Outcome of one run, as both parties saw it."""

    inputs: list[list[Value]]
    outputs: list[list[Value]]
    views: list[View]
    traffic: list[Traffic]  # client's, provider's
    rounds: int
    ledgers: list[Ledger]
    common: list[np.ndarray]  # what both drew from their common stream
    leaked: list[np.ndarray]  # what the peer's masks are when it draws them from a known stream
    modelled: list[np.ndarray] | None  # words of the results by the op's integer model
    fresh: list[Fresh]  # before a broken party spoils it


class Dealer:
    """Correlated randomness for two threads, from one place that sees everything: tests only."""

    def __init__(self) -> None:
        self._for_client: queue.Queue[tuple[str, int, Correlations] | None] = queue.Queue()

    def stop(self) -> None:
        """Hand out no more units, so that the client is not left waiting."""
        self._for_client.put(None)

    def source(self, rank: int, keep: Callable[[Taken], None] = lambda taken: None) -> _DealtHalf:
        """Return one party's source of units; `keep` gets what is handed out."""
        return _DealtHalf(self, rank, keep)

    def take(self, rank: int, correlation: Correlation, units: int, fixed: Any) -> Correlations:
        if rank == CLIENT:
            dealt = self._for_client.get(timeout=30)
            if dealt is None:
                raise PeerError("the other party has gone")
            name, count, correlations = dealt
            assert (name, count) == (correlation.name, units), "the parties take different units"
            return correlations
        masks = [correlation.draw(r, Prg.from_os(), units) for r in (CLIENT, PROVIDER)]
        results = deal(correlation, masks, Prg.from_os(), fixed)
        if correlation.name in _wrong:
            results[CLIENT] = [Prg.from_os().words(words.shape) for words in results[CLIENT]]
        self._for_client.put(
            (correlation.name, units, Correlations(masks[CLIENT], results[CLIENT]))
        )
        return Correlations(masks[PROVIDER], results[PROVIDER])


_wrong: set[str] = set()


@contextmanager
def wrong_results(name: str) -> Iterator[None]:
    """Break dealers: inside, results of this correlation have nothing to do with its masks."""
    _wrong.add(name)
    try:
        yield
    finally:
        _wrong.remove(name)


@dataclass(frozen=True)
class _DealtHalf:
    dealer: Dealer
    rank: int
    keep: Callable[[Taken], None]

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        with _code_of(an_op=False):
            correlations = self.dealer.take(self.rank, correlation, units, fixed)
        self.keep(Taken(correlation, correlations, fixed))
        return correlations


def leaked_words(shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Return words of so many bits of a stream that the peer has, too."""
    with _code_of(an_op=False):
        words = Prg.from_seed(0, "known to both parties").words(shape)
    return low_bits(words, bits)


# ---- streams that an op makes


_running = threading.local()
_make_stream = Prg.__init__


def _refuse_stream(self: Prg, key: bytes) -> None:
    """Stand in for `Prg.__init__`: raise AssertionError when an op's code makes a stream that is
    not a child of its party's own or common one.
    """
    if getattr(_running, "an_op", False):
        raise AssertionError("an op's code makes a `Prg`: masks come from `Party.mask` and `take`")
    _make_stream(self, key)


@contextmanager
def _code_of(*, an_op: bool) -> Iterator[None]:
    """Mark what runs inside, in this thread, as an op's code, or else as the test's own."""
    before = getattr(_running, "an_op", False)
    _running.an_op = an_op
    try:
        yield
    finally:
        _running.an_op = before


class _TracedChannel(CountingChannel):
    """Records what comes in, whoever asks for it, and how deep the chain of messages is."""

    def __init__(self, inner: Channel, sent: queue.Queue[int], came: queue.Queue[int]):
        super().__init__(inner)
        self._sent, self._came = sent, came
        self.incoming: list[bytes] = []
        self.outgoing: list[bytes] = []
        self.depth = 0

    def send(self, data: bytes) -> None:
        self._sent.put(self.depth + 1)
        self.outgoing.append(data)
        super().send(data)

    def recv(self) -> bytes:
        data = super().recv()
        self.depth = max(self.depth, self._came.get())
        self.incoming.append(data)
        return data


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
    depths: list[queue.Queue[int]] = [queue.Queue(), queue.Queue()]
    channels = [
        _TracedChannel(wrap(r, ends[r]), depths[r], depths[1 - r]) for r in (CLIENT, PROVIDER)
    ]
    parties = []
    dealer = Dealer()
    common: list[list[np.ndarray]] = [[], []]
    fresh = [Fresh(), Fresh()]
    for rank in (CLIENT, PROVIDER):
        kind = peer_of[1] if peer_of is not None and peer_of[0] != rank else Party
        own = RecordedStream(Prg.from_os(), fresh[rank].own, fresh[rank].words)
        source = dealer.source(rank, fresh[rank].keep)
        both = RecordedStream(common_stream(), common[rank])
        parties.append(kind(rank, channels[rank], own, FRAC_BITS, source, both))
    outputs: list[Any] = [None, None]
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            with _code_of(an_op=True):
                outputs[rank] = op.run(parties[rank], inputs[rank], case.static)
        except BaseException as exc:  # re-raised in the caller's thread
            failures.append(exc)
            # The other one need not wait for its timeout.
            depths[rank].put(0)
            ends[rank].send(b"")
            dealer.stop()

    threads = [threading.Thread(target=work, args=(r,)) for r in (CLIENT, PROVIDER)]
    with mock.patch.object(Prg, "__init__", _refuse_stream):
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    if failures:
        raise failures[0]  # the cause, not what the peer made of it
    views = [
        View(
            fresh[r].words,
            [np.frombuffer(data, np.uint8) for data in channels[r].incoming],
            [np.frombuffer(data, np.uint8) for data in channels[r].outgoing],
        )
        for r in (CLIENT, PROVIDER)
    ]
    broken = parties[1 - peer_of[0]] if peer_of else None
    known: set[tuple[tuple[int, ...], bool]] = getattr(broken, "known", set())  # see KnownMask
    modelled = list(op.model(inputs, common_stream(), **case.static)) if op.model else None
    return Outcome(
        inputs,
        outputs,
        views,
        [c.traffic for c in channels],
        max(c.depth for c in channels),
        [p.ledger for p in parties],
        common[CLIENT],
        [leaked_words(*kind) for kind in sorted(known)],
        modelled,
        fresh,
    )


class RecordedStream(Prg):
    """A stream of a party's; lists keep what was drawn."""

    def __init__(self, inner: Prg, *lists: list[np.ndarray]) -> None:
        self._inner, self._lists = inner, lists

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        words = self._inner.words(shape)
        for drawn in self._lists:
            drawn.append(words)
        return words

    def child(self, label: str) -> Prg:
        with _code_of(an_op=False):
            return self._inner.child(label)


def common_stream() -> Prg:
    return Prg.from_seed(1, "common to both parties")


def share_inputs(case: Case) -> list[list[Value]]:
    """Share the inputs of a case afresh, and return both parties' values."""
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
    """Return the ring words of both parties' values together."""
    a, b = values
    if isinstance(a, Arith) and isinstance(b, Arith):
        return joined_words(a, b.words)
    if isinstance(a, Bool) and isinstance(b, Bool):
        return as_words(decode(joined_words(a, b.words), a.dtype, 0))
    held = [v.value for v in (a, b) if isinstance(v, Public | Private) and v.value is not None]
    for other in held[1:]:
        np.testing.assert_array_equal(held[0], other)
    return as_words(np.asarray(held[0]))
