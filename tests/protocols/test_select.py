"""Selection at a private index: exact, two messages, and views that tell nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.ot import transfer
from protocols.ot.select import select
from protocols.ot.transfer import MAX_ENTRIES
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.channel import Channel, SealedChannel
from spu_llm.core.correlation import Form
from spu_llm.core.errors import WireError
from spu_llm.core.values import CLIENT, PROVIDER, Owner, Value
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation, reconstruct
from spu_llm.testing import (
    FRAC_BITS,
    ROWS,
    Case,
    OpContract,
    distinguish,
    reconstruct_words,
    run_op,
)
from spu_llm.testing.broken import MASK_TWINS, BrokenParty, DroppedMask

RNG = np.random.default_rng(0)


def case(
    shape: tuple[int, ...], form: str = "arith", bits: int = 64, choice: int | None = None
) -> Case:
    """Return a random table [rows, entries, ...] of signed numbers of `bits` bits and random
    indices; with a fixed choice, the table's numbers are the ring's edges.
    """
    half = 2 ** (bits - 1)
    table = RNG.integers(-half, half - 1, shape, endpoint=True)
    if choice is not None:
        table = np.resize(np.array([half - 1, -half, -1, 0]), shape)
    index = RNG.integers(0, shape[1], shape[0])
    if choice is not None:
        index[:] = choice
    return Case((table, index), (form, "client"), {"bits": bits})


def selected(x: Case) -> np.ndarray:
    table, index = x.inputs
    return table[np.arange(len(index)), index]


class TestSelect(OpContract):
    op = select
    elementwise = False
    uniform = False
    fresh = True
    hashes = (PROVIDER,)
    cases = [
        case((1, 1), "degenerate"),
        case((1, 2), "degenerate", choice=1),
        case((1, 2), "provider", choice=0),
        case((1, 2, 2), "arith", bits=40, choice=1),
        case((1, 2), "client", choice=1),
        Case((np.array([[3, 2**40], [-1, 7]]), np.array([0, 1])), ("arith", "client")),
    ]


class LowHole(BrokenParty):
    """Broken: a bit of the mask is missing where a narrow ring still has one."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        thin = words.copy()
        if form is Form.BIT:
            thin[::2] = 0
        return thin & ~np.uint64(1 << 3) if form is Form.ARITH else thin


class TestSelectInANarrowRing(OpContract):
    op = select
    elementwise = False
    uniform = False
    fresh = True
    hashes = (PROVIDER,)
    cases = [
        case((1, 4), "arith", bits=8, choice=2),
        case((1, 2), "arith24", bits=24, choice=0),
        Case((np.array([[5, 2**16 - 1], [0, 9]]), np.array([1, 0])), ("bool16", "client")),
        case((1, 2, 3), "degenerate", bits=8, choice=1),
    ]

    def test_broken_twins_are_caught(self, monkeypatch: Any) -> None:  # type: ignore[override]
        monkeypatch.setitem(MASK_TWINS, "mask with a hole", LowHole)
        super().test_broken_twins_are_caught()


SIZES = [
    *(
        case((5, n, *rest), "arith", bits)
        for n in (1, 2, 3, 5, 16)
        for rest in ((), (3,))
        for bits in (64, 24, 8)
    ),
    *(case((5, 16), form) for form in ("degenerate", "provider", "client", "public")),
    case((3, 6), "arith24", 24),
    Case(case((3, 6), "", 24).inputs, ("arith24", "client")),
    case((9, 100), "arith", 33),
    case((2, 3, 2, 40), "provider", 12),
    Case((RNG.integers(0, 2, (4, 7)).astype(bool), np.array([0, 6, 3, 3])), ("provider", "client")),
    Case((RNG.integers(0, 2, (4, 7)).astype(bool), np.array([0, 6, 3, 3])), ("bool1", "client")),
    Case((RNG.integers(0, 2**19, (4, 7)), np.array([0, 6, 3, 3])), ("bool19", "client")),
    Case((np.zeros((0, 4), np.int64), np.zeros(0, np.int32)), ("arith", "client")),
    Case((np.zeros((2, 4, 0), np.int64), np.zeros(2, np.int32)), ("arith", "client")),
    Case((np.arange(12).reshape(3, 4), np.array([0, 3, 1], np.int32)), ("arith", "client")),
]


@pytest.mark.parametrize(
    "check",
    [
        "test_result_is_the_reference",
        "test_result_belongs_to_whom_it_should",
        "test_cost_is_as_declared",
        "test_opens_what_is_declared",
    ],
)
def test_other_sizes_and_forms(check: str) -> None:
    contract = OpContract()
    contract.op, contract.cases = select, SIZES
    getattr(contract, check)()


@given(st.data(), st.sampled_from(["arith", "degenerate", "provider", "client"]))
def test_any_value_at_any_index(data: Any, form: str) -> None:
    """Exact mod 2^bits over the whole ring."""
    rows, entries = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    rest = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    bits = data.draw(st.integers(1, 64))
    seed = data.draw(st.integers(0, 2**32))
    shape = (rows, entries, *rest)
    table = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, shape, endpoint=True)
    table.flat[0] = data.draw(st.sampled_from([-(2**63), 2**63 - 1, -1, 0]))
    index = np.array(data.draw(st.lists(st.integers(0, entries - 1), min_size=rows, max_size=rows)))
    outcome = run_op(select, Case((table, index), (form, "client"), {"bits": bits}))
    spare = np.uint64(64 - bits)
    words = [o[0].words for o in outcome.outputs]
    expected = table[np.arange(rows), index].view(np.uint64)
    np.testing.assert_array_equal((words[0] + words[1]) << spare, expected << spare)
    for (value,) in outcome.outputs:
        assert value.bits == bits and (bits == 64 or not (value.words >> np.uint64(bits)).any())


def test_bytes_of_a_verification_step() -> None:
    """Eight rows of a vocabulary of 32000: two messages, 256 KB a row at 64 bits, 96 KB at 24."""
    for bits, size in ((64, 8), (24, 3)):
        outcome = run_op(select, case((8, 32000), "arith", bits))
        client, provider = outcome.traffic
        assert (client.messages, outcome.rounds) == (2, 2)
        assert (client.sent_bytes, provider.sent_bytes) == (15, 8 * 32000 * size)


def test_largest_table() -> None:
    x = case((1, MAX_ENTRIES), choice=MAX_ENTRIES - 2)
    outcome = run_op(select, x)
    words = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
    np.testing.assert_array_equal(words, selected(x))


def test_dtype_and_fraction_bits_stay() -> None:
    table = RNG.normal(size=(3, 5)).astype(np.float32)
    outcome = run_op(select, Case((table, np.array([4, 0, 2])), ("provider", "client")))
    for (value,) in outcome.outputs:
        assert (value.dtype, value.frac_bits) == (np.float32, FRAC_BITS)
    words = reconstruct([o[0] for o in outcome.outputs])
    np.testing.assert_allclose(words, selected(Case((table, np.array([4, 0, 2])), ())), atol=1e-5)


def test_views_of_more_entries() -> None:
    for shape, bits in (((1, 5), 8), ((1, 16), 64)):
        x = case(shape, "degenerate", bits, choice=2)
        rows = Case(tuple(np.repeat(v, ROWS, axis=0) for v in x.inputs), x.forms, x.static)
        for rank in (CLIENT, PROVIDER):
            assert distinguish(select, rows, rank, fresh=True, uniform=False) == []


# ---- broken twins of this protocol: the views must tell


def _no_pads(pads: Any) -> Any:
    return lambda *args: ((r, e, np.zeros_like(p)) for r, e, p in pads(*args))


def _one_pad_twice(pads: Any) -> Any:
    def twice(*args: Any) -> Any:
        for rows, entries, some in pads(*args):
            some[:, 1] = some[:, 0]
            yield rows, entries, some

    return twice


def _rows_like_the_first(pads: Any) -> Any:
    def same(*args: Any) -> Any:
        for rows, entries, some in pads(*args):
            some[1:, 1:] = some[:1, 1:]
            yield rows, entries, some

    return same


@pytest.mark.parametrize("broken", [_no_pads, _one_pad_twice, _rows_like_the_first])
def test_views_tell_broken_pads(monkeypatch: Any, broken: Any) -> None:
    """The client chooses entry 0, whose pad stays right but where there is none at all."""
    x = case((1, 2), "degenerate", choice=0)
    rows = Case(tuple(np.repeat(v, ROWS, axis=0) for v in x.inputs), x.forms, x.static)
    monkeypatch.setattr(transfer, "all_pads", broken(transfer.all_pads))
    if broken is _no_pads:
        own = transfer.own_pads
        monkeypatch.setattr(transfer, "own_pads", lambda *args: np.zeros_like(own(*args)))
    assert distinguish(select, rows, CLIENT, fresh=True, uniform=False)


def test_one_mask_for_two_rows_is_told() -> None:
    """Broken: the provider masks every other row of the result with the mask of the row before."""

    class Twice(BrokenParty):
        def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
            return words if form is Form.BIT else np.repeat(words[::2], 2, axis=0)[: len(words)]

    x = case((1, 2), "arith", choice=0)
    rows = Case(tuple(np.repeat(v, ROWS, axis=0) for v in x.inputs), x.forms, x.static)
    assert distinguish(select, rows, CLIENT, Twice, fresh=True, uniform=False)


def test_choice_is_what_the_message_holds_without_its_mask() -> None:
    """With the client's bits dropped, its message is the index; with them, it is not."""
    x = case((64, 16))
    plain = np.packbits(
        np.concatenate([(x.inputs[1] >> t) & 1 for t in range(4)]).astype(np.uint8),
        bitorder="little",
    )
    dropped = run_op(select, x, (PROVIDER, DroppedMask)).views[PROVIDER].incoming[0]
    np.testing.assert_array_equal(dropped, plain)
    assert (run_op(select, x).views[PROVIDER].incoming[0] != plain).any()


def test_a_second_call_shares_nothing_with_the_first() -> None:
    """Same inputs, other messages: masks, keys and the hash's key are drawn anew."""
    both = [run_op(_twice, case((4, 8))) for _ in range(2)]
    for a, b in ((both[0], both[1]), (both[0], both[0])):
        first = a.views[CLIENT].incoming[0].view(np.uint64)
        second = b.views[CLIENT].incoming[1].view(np.uint64)
        assert len(np.intersect1d(first, second)) == 0


# ---- what must be refused


@pytest.mark.parametrize(("index", "row"), [([0, 4], 1), ([-1, 0], 0), ([0, 2**31], 1)])
def test_an_index_outside_the_table_is_refused(index: list[int], row: int) -> None:
    """Also not told: the index itself, which is the client's secret."""
    sent: list[bytes] = []

    class Listening:
        def __init__(self, inner: Channel) -> None:
            self.inner, self.recv = inner, inner.recv

        def send(self, data: bytes) -> None:
            sent.append(data)
            self.inner.send(data)

    x = Case((np.zeros((2, 4), np.int64), np.array(index)), ("arith", "client"))
    message = f"row {row} chooses an entry outside 0..3; nothing was sent"
    with pytest.raises(ValueError, match=f"^{message}$"):
        run_op(select, x, wrap=lambda rank, channel: Listening(channel))
    assert not sent


@pytest.mark.parametrize(
    ("table", "index", "static", "message"),
    [
        ((2, 4), (3,), {}, "shapes"),
        ((2,), (2,), {}, "shapes"),
        ((2, 4), (2,), {"bits": 65}, "1 to 64 bits"),
        ((2, 4), (2,), {"bits": 0}, "1 to 64 bits"),
        ((2, 0), (2,), {}, "entries"),
    ],
)
def test_shapes_and_bits(table: Any, index: Any, static: Any, message: str) -> None:
    x = Case((np.zeros(table, np.int64), np.zeros(index, np.int64)), ("arith", "client"), static)
    with pytest.raises(ValueError, match=message):
        run_op(select, x)


def test_index_must_be_the_clients() -> None:
    for owner in (Owner.PROVIDER, Owner.JOINT, Owner.PUBLIC):
        with pytest.raises(ValueError, match="index of the client's"):
            select.owners(Owner.JOINT, owner)


# ---- attacks on the wire


def _call_twice(party: Any, table: Value, index: Value, **static: Any) -> Any:
    return select.two_party(party, table, index), select.two_party(party, table, index)


_twice = dataclasses.replace(select, two_party=_call_twice)


class Meddler:
    """Changes what a party receives: replace(number, messages so far) -> message."""

    def __init__(self, inner: Channel, replace: Callable[[int, list[bytes]], bytes]) -> None:
        self.inner, self.replace = inner, replace
        self.sent: list[bytes] = []
        self.came: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        self.inner.send(data)

    def recv(self) -> bytes:
        self.came.append(self.inner.recv())
        return self.replace(len(self.came) - 1, self.came)

    def close(self) -> None:
        self.inner.close()  # type: ignore[attr-defined]


def _flip(at: int) -> Callable[[int, list[bytes]], bytes]:
    def flip(number: int, came: list[bytes]) -> bytes:
        data = bytearray(came[number])
        data[at] ^= 1
        return bytes(data)

    return flip


ATTACKS = {
    "mutated number": _flip(0),
    "mutated tag": _flip(8),
    "mutated content": _flip(-1),
    "truncated": lambda n, came: came[n][:-1],
    "truncated to nothing": lambda n, came: b"",
    "longer": lambda n, came: came[n] + b"\0",
    "replayed": lambda n, came: came[0],
}


def sealed(
    victim: int, replace: Callable[[int, list[bytes]], bytes], key: bytes = bytes(32)
) -> tuple[Callable[[int, Channel], Channel], list[Meddler]]:
    meddlers: list[Meddler] = []

    def wrap(rank: int, channel: Channel) -> Channel:
        if rank == victim:
            channel = Meddler(channel, replace)
            meddlers.append(channel)
        return SealedChannel(channel, key, rank)

    return wrap, meddlers


@pytest.mark.parametrize("victim", [CLIENT, PROVIDER])
@pytest.mark.parametrize("attack", ATTACKS)
def test_meddling_ends_the_session(attack: str, victim: int) -> None:
    x = case((4, 8))
    wrap, meddlers = sealed(victim, ATTACKS[attack])
    with pytest.raises(WireError):
        run_op(_twice, x, wrap=wrap)
    # A replay is noticed where it comes in place of the second message, all else at the first.
    assert len(meddlers[0].came) == (2 if attack == "replayed" else 1)


@pytest.mark.parametrize("victim", [CLIENT, PROVIDER])
def test_a_later_an_own_or_a_recorded_message_is_no_message(victim: int) -> None:
    x = case((4, 8))
    wrap, meddlers = sealed(victim, lambda n, came: came[n])
    run_op(_twice, x, wrap=wrap)
    later, own_part = meddlers[0].came[1], meddlers[0].sent[0]
    recorded = meddlers[0].came[0]
    for data, key in ((later, bytes(32)), (own_part, bytes(32)), (recorded, bytes(31) + b"\1")):
        wrap, again = sealed(victim, lambda n, came, data=data: data, key)
        with pytest.raises(WireError):
            run_op(_twice, x, wrap=wrap)
        assert len(again[0].came) == 1


def test_wrong_sizes_are_noticed_without_a_seal() -> None:
    for victim in (CLIENT, PROVIDER):
        with pytest.raises(WireError, match="bytes, expected"):
            run_op(
                select,
                case((4, 8)),
                wrap=lambda rank, channel, v=victim: (
                    Meddler(channel, lambda n, came: came[n][:-1]) if rank == v else channel
                ),
            )


# ---- between real parties


def test_between_segments_on_real_spu(simulation: Simulation) -> None:
    """A shared table out of a segment, its entries into the next; a provider's table of rows."""
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    w = RNG.normal(size=(3, 9)).astype(np.float32)
    rows = RNG.normal(size=(4, 5, 6)).astype(np.float32)
    index, place = np.array([8, 0, 3, 3], np.int32), np.array([4, 0, 1, 2], np.int32)

    def fn(x: Any, w: Any, rows: Any, index: Any, place: Any) -> Any:
        return select(x @ w, index) * 2.0, select(rows, place)

    owners = (Owner.CLIENT, Owner.PROVIDER, Owner.PROVIDER, Owner.CLIENT, Owner.CLIENT)
    function = SecureFunction(fn, owners, "select")
    plain = PlaintextSession().call(function, x, w, rows, index, place)

    def program(session: Any) -> Any:
        arrays = [(0, x), (1, w), (1, rows), (0, index), (0, place)]
        values = [session.private(r, lambda a=a: a, a.shape, a.dtype) for r, a in arrays]
        return session.call(function, *values)

    words = [reconstruct(pair) for pair in zip(*simulation.run(program), strict=True)]
    for a, b in zip(words, plain, strict=True):
        np.testing.assert_allclose(a, b.value, atol=1e-3)
    np.testing.assert_allclose(words[1], rows[np.arange(4), place], atol=1e-5)
