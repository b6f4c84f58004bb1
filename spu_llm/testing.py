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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import chi2, norm

from spu_llm.channel import CountingChannel, MemoryChannel, Traffic
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
    conversions produce.
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
    common: np.ndarray  # words of a stream both parties know


class OpContract:
    """Inherit, set `op` and `cases`; see the module docstring.

    `masks` says whether some case makes a party mask what it sends; an op that only opens has none.
    """

    op: ProtocolOp
    cases: Sequence[Case]
    masks = True

    def test_result_is_the_reference(self) -> None:
        assert self.cases
        for case in self.cases:
            outcome = run_op(self.op, case)
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
            flat = [np.asarray(x).reshape(-1) for x in case.inputs]
            order = np.argsort(flat[0], kind="stable")
            for i in {int(order[0]), int(order[-1])} if order.size else ():
                inputs = tuple(np.repeat(x[i : i + 1], ROWS) for x in flat)
                sampled.append(Case(inputs, case.forms, case.static))
        return sampled


def owner_of(value: Value) -> Owner:
    """Who can read a value, by its form."""
    if isinstance(value, Public):
        return Owner.PUBLIC
    return Owner.of_rank(value.owner) if isinstance(value, Private) else Owner.JOINT


# ---- running an op


class DroppedMask(Party):
    """Broken: masks nothing."""

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros_like(super().mask(shape))


class ReusedMask(Party):
    """Broken: the same mask for every element."""

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        fresh = super().mask(shape)
        return np.broadcast_to(fresh.reshape(-1)[:1], shape)


class HalfReusedMask(Party):
    """Broken: the second half of the elements reuses the masks of the first."""

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        fresh = super().mask(shape)
        flat = fresh.reshape(-1).copy()
        half = flat.size // 2
        flat[half : 2 * half] = flat[:half]
        return flat.reshape(shape)


class ThinMask(Party):
    """Broken: one bit in the middle is not masked."""

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        return super().mask(shape) & ~np.uint64(1 << 30)


class KnownMask(Party):
    """Broken: masks from a stream that the peer has, too."""

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        super().mask(shape)
        return _common_stream().words(shape)


MASK_TWINS: dict[str, type[Party]] = {
    "dropped mask": DroppedMask,
    "reused mask": ReusedMask,
    "mask reused once": HalfReusedMask,
    "mask with a hole": ThinMask,
    "mask the peer can recompute": KnownMask,
}


def _common_stream() -> Prg:
    return Prg.from_seed(0, "known to both parties")


class _TracedChannel:
    """Records what comes in, whoever asks for it, and how deep the chain of messages is."""

    def __init__(self, inner: CountingChannel, sent: queue.Queue[int], came: queue.Queue[int]):
        self._inner, self._sent, self._came = inner, sent, came
        self.incoming: list[bytes] = []
        self.depth = 0

    def send(self, data: bytes) -> None:
        self._sent.put(self.depth + 1)
        self._inner.send(data)

    def recv(self) -> bytes:
        data = self._inner.recv()
        self.depth = max(self.depth, self._came.get())
        self.incoming.append(data)
        return data

    def close(self) -> None:
        self._inner.close()


def run_op(op: ProtocolOp, case: Case, peer_of: tuple[int, type[Party]] | None = None) -> Outcome:
    """Run `op` between two threads. `peer_of` = (rank, twin) breaks the *other* party's class."""
    inputs = share_inputs(case)
    counting = [CountingChannel(c) for c in MemoryChannel.pair()]
    depths: list[queue.Queue[int]] = [queue.Queue(), queue.Queue()]
    channels = [_TracedChannel(counting[r], depths[r], depths[1 - r]) for r in (CLIENT, PROVIDER)]
    masks: list[list[np.ndarray]] = [[], []]
    parties = []
    for rank in (CLIENT, PROVIDER):
        kind = peer_of[1] if peer_of is not None and peer_of[0] != rank else Party
        party = kind(rank, channels[rank], Prg.from_os(), FRAC_BITS)
        party.taps.append(masks[rank].append)
        parties.append(party)
    outputs: list[Any] = [None, None]

    def work(rank: int) -> None:
        try:
            outputs[rank] = op.run(parties[rank], inputs[rank], case.static)
        except BaseException as exc:  # re-raised in the caller's thread
            outputs[rank] = exc

    threads = [threading.Thread(target=work, args=(r,)) for r in (CLIENT, PROVIDER)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in outputs:
        if isinstance(result, BaseException):
            raise result
    rows = int(np.prod(np.shape(case.inputs[0]), dtype=int))
    views = [
        View(masks[r], [_as_rows(data, rows) for data in channels[r].incoming])
        for r in (CLIENT, PROVIDER)
    ]
    return Outcome(
        inputs, outputs, views, [c.traffic for c in counting], max(c.depth for c in channels),
        [p.ledger for p in parties], _common_stream().words(np.shape(case.inputs[0])),
    )  # fmt: skip


def _as_rows(data: bytes, rows: int) -> np.ndarray:
    """A message as one word per row: ring words, or packed bits."""
    if len(data) == 8 * rows:
        return np.frombuffer(data, np.uint64)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return bits[:rows].astype(np.uint64)


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
        elif form in ("arith", "degenerate"):
            mask = np.zeros(x.shape, np.uint64) if form == "degenerate" else sharing.words(x.shape)
            pair = [Arith(mask, dtype, 0), Arith(words - mask, dtype, 0)]
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
        return a.words + b.words
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
    real_columns = _columns(real, rank, real.views[rank])
    sim_columns = _columns(other, rank, simulated)
    if real_columns.keys() != sim_columns.keys():
        return [f"view has {list(real_columns)}, simulated {list(sim_columns)}"]
    names = [name for name, _ in _features(real_columns)]
    real_stats, sim_stats = (
        [_statistics(words) for _, words in _features(c)] for c in (real_columns, sim_columns)
    )
    limit = FALSE_ALARM / (3 * len(names))
    found = []
    for name, a, b in zip(names, real_stats, sim_stats, strict=True):
        if _chi_square_p(a.top, b.top) < limit or _chi_square_p(a.bottom, b.bottom) < limit:
            found.append(f"bins of {name}")
        if _bits_p(a.ones, b.ones, a.rows) < limit:
            found.append(f"bits of {name}")
        # Uniform words of 64 bits do not repeat among ROWS; words of few bits repeat alike.
        if abs(a.distinct - b.distinct) > ROWS // 16:
            found.append(f"repeats of {name}")
    return found


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


def _columns(outcome: Outcome, rank: int, view: View) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    for i, v in enumerate(outcome.inputs[rank]):
        if isinstance(v, Arith | Bool):
            columns[f"input {i}"] = v.words
    for i, v in enumerate(outcome.outputs[rank]):
        if isinstance(v, Arith | Bool):
            columns[f"output {i}"] = v.words
    for name, words in (("own", view.own), ("incoming", view.incoming)):
        columns.update({f"{name} {i}": w for i, w in enumerate(words)})
    # Words this party can compute because the peer has the same stream.
    columns["common"] = outcome.common
    return columns


def _features(columns: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    features = []
    names = list(columns)
    for n in names:
        features.append((n, columns[n]))
        features.append((f"{n}, row to row", columns[n][1:] - columns[n][:-1]))
    for a, b in itertools.combinations(names, 2):
        features.append((f"{a} + {b}", columns[a] + columns[b]))
        features.append((f"{a} - {b}", columns[a] - columns[b]))
        features.append((f"{a} ^ {b}", columns[a] ^ columns[b]))
    for a, b, c in itertools.combinations(names, 3):
        x, y, z = columns[a], columns[b], columns[c]
        for label, v in (("+ +", x + y + z), ("+ -", x + y - z), ("- +", x - y + z),
                         ("- -", x - y - z), ("^ ^", x ^ y ^ z)):  # fmt: skip
            features.append((f"{a} {b} {c} ({label})", v))
    return features


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
