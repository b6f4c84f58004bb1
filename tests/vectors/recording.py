"""Recording a case: both parties as threads, all randomness from keys that follow from its name."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from protocols.bits import gates
from spu_llm.core.correlation import Correlation, Correlations, deal
from spu_llm.core.errors import PeerError
from spu_llm.core.integers import Factor
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    ROLES,
    Arith,
    Bool,
    Private,
    Public,
    Value,
    encode,
    frac_bits_of,
    low_bits,
)
from spu_llm.testing import FRAC_BITS
from tests.vectors.cases import CASES, Call, Case, Given, Made
from tests.vectors.encoding import FORMAT, Json, gate_of, of_both, to_hex, to_static, units_of

STREAMS = (*ROLES, "common")


def record(op: str, taken: dict[str, Correlation] | None = None) -> Json:
    """Return all cases of an op, as its file has them; put the correlations that it takes into
    `taken`, by their names.
    """
    used: dict[str, Json] = {}
    with _noting_gates(used):
        cases = [_record(op, case, {} if taken is None else taken) for case in CASES[op]]
    return {"format": FORMAT, "op": op, "gates": dict(sorted(used.items())), "cases": cases}


@contextmanager
def _noting_gates(used: dict[str, Json]) -> Iterator[None]:
    """Gates that are evaluated, by the names of their correlations."""
    made = gates.correlation

    def noting(gate: gates.Gate) -> Correlation:
        correlation = made(gate)
        used[correlation.name] = gate_of(gate)
        return correlation

    with mock.patch.object(gates, "correlation", noting):
        yield


def _record(op: str, case: Case, taken: dict[str, Correlation]) -> Json:
    def key(use: str) -> bytes:
        return hashlib.sha256(f"vectors of {op}, {case.name}: {use}".encode()).digest()

    sharing = Prg(key("sharing"))
    given = [_inputs(call, sharing) for call in case.calls]
    dealer, wires = _Dealer(Prg(key("dealer")), taken), _Wire.pair()

    def half(rank: int) -> list[_Half]:
        own, common = _Stream(Prg(key(ROLES[rank]))), _Stream(Prg(key("common")))
        source = _Source(dealer, rank)
        party = Party(rank, wires[rank], own, FRAC_BITS, source, common)
        done: list[_Half] = []
        try:
            for call, values in zip(case.calls, given, strict=True):
                inputs = [
                    done[x.call].outputs[0] if isinstance(x, Made) else x[rank] for x in values
                ]
                outputs = call.op.run(party, inputs, call.static)
                done.append(_Half(outputs, wires[rank].sent, own.drawn, common.drawn, source.taken))
                wires[rank].sent, own.drawn, common.drawn, source.taken = [], [], [], []
                wires[rank].round = 0
            return done
        except BaseException:
            # The other one need not wait for its timeout.
            wires[rank].stop()
            dealer.stop()
            raise

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(half, rank) for rank in (CLIENT, PROVIDER)]
    failed = [f.exception() for f in futures if f.exception()]
    for exc in sorted(failed, key=lambda e: isinstance(e, PeerError)):  # the cause comes first
        raise exc  # type: ignore[misc]
    calls = [
        _call(call, values, halves)
        for call, values, *halves in zip(
            case.calls, given, *(f.result() for f in futures), strict=True
        )
    ]
    keys = {name: key(name).hex() for name in STREAMS}
    return {"name": case.name, "frac_bits": FRAC_BITS, "keys": keys, "calls": calls}


def _call(call: Call, given: Sequence[list[Value] | Made], halves: Sequence[_Half]) -> Json:
    client, provider = halves
    drawn = (client.own, provider.own, client.common)
    assert to_hex(client.common) == to_hex(provider.common), "the common streams part ways"
    messages = [
        {"round": number, "from": role, "bytes": data.hex()}
        for role, half in zip(ROLES, halves, strict=True)
        for number, data in half.sent
    ]
    return {
        "op": call.op.name,
        "static": to_static(call.static),
        "error": call.error,
        "inputs": [{"call": x.call} if isinstance(x, Made) else of_both(*x) for x in given],
        "drawn": {name: to_hex(words) for name, words in zip(STREAMS, drawn, strict=True)},
        "correlations": provider.taken,
        "messages": sorted(messages, key=lambda m: m["round"]),
        "outputs": [of_both(*pair) for pair in zip(client.outputs, provider.outputs, strict=True)],
    }


@dataclass
class _Half:
    """What one party's half of a call left."""

    outputs: list[Value]
    sent: list[tuple[int, bytes]]
    _own: list[np.ndarray]
    _common: list[np.ndarray]
    taken: list[Json]

    @property
    def own(self) -> np.ndarray:
        return joined(self._own)

    @property
    def common(self) -> np.ndarray:
        return joined(self._common)


def joined(drawn: Sequence[np.ndarray]) -> np.ndarray:
    """Return all words of some draws, in order."""
    return np.concatenate([np.zeros(0, np.uint64), *(words.reshape(-1) for words in drawn)])


def _inputs(call: Call, sharing: Prg) -> list[list[Value] | Made]:
    """Return both parties' halves of what is given; what is made stays as it is."""
    return [x if isinstance(x, Made) else _shared(x, sharing) for x in call.inputs]


def _shared(given: Given, sharing: Prg) -> list[Value]:
    x, form = given.plain, given.form
    if form == "public":
        return [Public(x), Public(x)]
    if form in ROLES:
        owner = ROLES.index(form)
        return [Private(owner, x.shape, x.dtype, x if r == owner else None) for r in (0, 1)]
    frac_bits = frac_bits_of(x.dtype, FRAC_BITS)
    words, mask = encode(x, frac_bits), sharing.words(x.shape)
    bits = int(form.removeprefix("arith").removeprefix("bool") or 64)
    if form.startswith("bool"):  # bits above `bits` mean nothing, so they are noise
        shares = mask, low_bits(words, bits) ^ mask
        return [Bool(share, x.dtype, frac_bits, bits) for share in shares]
    noise = sharing.words(x.shape) << np.uint64(bits) if bits < 64 else np.uint64(0)
    return [Arith(share, x.dtype, frac_bits, bits) for share in (mask, words - mask + noise)]


# ---- what the two threads share


class _Wire:
    """One party's end of two queues; a message goes with its round, the length of the longest chain
    of messages that it ends.
    """

    def __init__(self, inbox: queue.Queue[Any], outbox: queue.Queue[Any]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self.sent: list[tuple[int, bytes]] = []
        self.round = 0

    @staticmethod
    def pair() -> tuple[_Wire, _Wire]:
        a: queue.Queue[Any] = queue.Queue()
        b: queue.Queue[Any] = queue.Queue()
        return _Wire(a, b), _Wire(b, a)

    def send(self, data: bytes) -> None:
        self.sent.append((self.round + 1, data))
        self._outbox.put(self.sent[-1])

    def recv(self) -> bytes:
        message = self._inbox.get(timeout=30)
        if message is None:
            raise PeerError("the other party has gone")
        number, data = message
        self.round = max(self.round, number)
        return bytes(data)

    def stop(self) -> None:
        self._outbox.put(None)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _Stream(Prg):
    """Keeps what is drawn."""

    def __init__(self, inner: Prg) -> None:
        self._inner = inner
        self.drawn: list[np.ndarray] = []

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        self.drawn.append(self._inner.words(shape))
        return self.drawn[-1]

    def child(self, label: str) -> Prg:
        return self._inner.child(label)


class _Dealer:
    """Units for both parties, from one stream. The provider deals, since it has the matrices."""

    def __init__(self, stream: Prg, taken: dict[str, Correlation]) -> None:
        """Take the stream, and what correlations are noted in, by their names."""
        self._stream, self._taken = stream, taken
        self._for_client: queue.Queue[tuple[str, int, Correlations] | None] = queue.Queue()

    def deal(self, correlation: Correlation, units: int, fixed: Any) -> list[Correlations]:
        self._taken[correlation.name] = correlation
        masks = [correlation.draw(rank, self._stream, units) for rank in (CLIENT, PROVIDER)]
        results = deal(correlation, masks, self._stream, fixed)
        both = [Correlations(masks[rank], results[rank]) for rank in (CLIENT, PROVIDER)]
        self._for_client.put((correlation.name, units, both[CLIENT]))
        return both

    def dealt(self, correlation: Correlation, units: int) -> Correlations:
        actual = self._for_client.get(timeout=30)
        if actual is None:
            raise PeerError("the other party has gone")
        name, count, correlations = actual
        assert (name, count) == (correlation.name, units), "the parties take different units"
        return correlations

    def stop(self) -> None:
        self._for_client.put(None)


@dataclass
class _Source:
    """A party's supply; the provider's keeps both halves of what was taken."""

    dealer: _Dealer
    rank: int
    taken: list[Json] = field(default_factory=list)

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        if self.rank == CLIENT:
            return self.dealer.dealt(correlation, units)
        both = self.dealer.deal(correlation, units, fixed)
        self.taken.append(units_of(correlation, both, fixed))
        return both[PROVIDER]
