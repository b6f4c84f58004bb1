"""Silent products: masks, shares that add up to their products, and what is sent for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.arithmetic.product import linear
from spu_llm.compiler.demand import CorrelationRequest, Demand
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import PoolError
from spu_llm.core.integers import factor_from
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Private
from spu_llm.offline.silent import hint, ring
from spu_llm.offline.silent.products import WIDE_BITS, SilentProducts, matrix_of
from spu_llm.offline.silent.ring import N
from spu_llm.offline.supply import Supply
from tests.kit.dealing import TRIPLE
from tests.offline.silent_pair import HALF, Two, chi_square, correlation_of, fixed, matrix, words_of

KEY = 8 * N


def bound(w: np.ndarray) -> np.ndarray:
    """Bound the errors, by column. Noise is at most 21 of 2^10; the rest has standard deviation
    2^27.4, so that 2^31 is twelve of them.
    """
    lengths = np.abs(words_of(w).view(np.int64)).sum(axis=0)
    return 21 * 2**10 * lengths + 2**31


@settings(max_examples=25)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(0, 34),
    st.integers(1, HALF + 5),
    st.integers(0, 10**6),
)
def test_shares_add_up(k: int, m: int, bits: int, units: int, seed: int) -> None:
    """For weights as doubles and as words, which large ones are."""
    w = matrix(seed, k, m, bits)
    assert (w.dtype == np.uint64) == (bits > 24)
    error = Two().errors(correlation_of(k, m), units, w)
    assert (np.abs(error) <= bound(w)).all()


@pytest.mark.parametrize("length", [0.0, 0.05, 1.6])
def test_error_is_as_predicted(length: float) -> None:
    """`silent.products`: noise times the column, what the hint leaves out, the provider's own."""
    w = matrix(1, 64, 6)
    w = np.rint(w * length * 2.0**18 / np.linalg.norm(w, axis=0))
    actual = Two().errors(correlation_of(64, 6, chunk=N), N, w).std()
    noise = 3.24 * 2.0**10 * 2**18 * length
    predicted = np.sqrt(noise**2 + 2.0 ** (2 * 27.42) + 4.0**WIDE_BITS / 12)
    assert abs(actual / predicted - 1) < 0.1


def test_on_more_cores_the_same(tmp_path: Path) -> None:
    """Word for word, and what is sent: from the same streams and the same provider's key."""
    c, w, actual = correlation_of(40, 70), matrix(2, 40, 70), []
    Two(provider=tmp_path)  # its key
    for jobs in (1, 3):
        two = Two(provider=tmp_path, seed=5, jobs=jobs)
        actual.append(
            (
                [x for m in two.take(c, 9, w) for x in (*m.masks, *m.results)],
                [wire.sent for wire in two.wires],
            )
        )
    for a, b in zip(*(words for words, _ in actual), strict=True):
        np.testing.assert_array_equal(a, b)
    assert actual[0][1] == actual[1][1]
    own = hint.Secrets(bytes(32), matrix_of(c), "weights")
    one, more = (hint.make(matrix_of(c), factor_from(w), own, jobs) for jobs in (1, 3))
    np.testing.assert_array_equal(one, more)


def test_masks_differ_and_shares_look_random() -> None:
    """Top bits within six deviations of a half: three false alarms in half a billion runs."""
    two = Two()
    client, provider = two.take(correlation_of(3, 4, chunk=N), 2 * N, matrix(2, 3, 4))
    masks = client.masks[0]
    assert len(np.unique(masks)) == masks.size and not (masks & np.uint64(1023)).any()
    assert not (client.results[0] & np.uint64(2**24 - 1)).any()
    for words in (masks, client.results[0], provider.results[0]):
        top = (words >> np.uint64(63)).mean()
        assert abs(top - 0.5) < 6 * 0.5 / np.sqrt(words.size)


def test_the_provider_adds_noise_of_its_own() -> None:
    """To P u: uniform words of WIDE_BITS bits around zero, fresh for each result."""
    two, w, c = Two(), matrix(2, 1, 9), correlation_of(1, 9, chunk=N)
    _, provider = two.take(c, N, w)
    use, key = two.products[PROVIDER]._uses[c.name], two.products[PROVIDER]._keys[0]
    assert use.own is not None
    product = ring.exact_product(key[None], ring.transform(use.own.small(slice(0, 9))))
    wide = (provider.results[0].T - product).view(np.int64)
    half = 1 << WIDE_BITS - 1
    assert -half <= wide.min() < -0.99 * half and 0.99 * half < wide.max() < half
    counts = np.bincount((wide.reshape(-1) + half) >> (WIDE_BITS - 8), minlength=256)
    assert abs(chi_square(counts, wide.size / 256) - 255) < 6 * np.sqrt(510)
    assert len(np.unique(wide)) > 0.99 * wide.size


def test_hints_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix is worked on in pieces: the hint is the same, and no stream serves twice."""
    own, w = hint.Secrets(bytes(32), hint.Matrix("w", 9, 200), "weights"), matrix(3, 9, 200)
    whole = hint.make(hint.Matrix("w", 9, 200), factor_from(w), own)
    labels: list[str] = []
    child = Prg.child

    def recorded(prg: Prg, label: str) -> Prg:
        labels.append(label)
        return child(prg, label)

    monkeypatch.setattr(Prg, "child", recorded)
    monkeypatch.setattr(hint, "_OUTPUTS", 64)
    monkeypatch.setattr(hint, "_INPUTS", 4)
    assert (hint.make(hint.Matrix("w", 9, 200), factor_from(w), own) == whole).all()
    assert sorted(labels) == sorted(f"{x} {n}" for x in "eu" for n in (0, 64, 128, 192))


def test_hints_have_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their own, though most of it is rounded away."""
    m, w = hint.Matrix("w", 1, 2), np.zeros((1, 2))
    own = hint.Secrets(bytes(32), m, "weights")
    before = hint.make(m, factor_from(w), own)
    large = np.full((2, N), 1 << 62, np.uint64)
    monkeypatch.setattr(hint.Secrets, "noise", lambda self, rows: large)
    after = hint.make(m, factor_from(w), own)
    # The highest byte moves by 64, and by a carry of the noise that is gone.
    moved = (after[..., 4] - before[..., 4]).astype(int)
    assert np.abs(moved - 64).max() <= 1 and (moved == 64).mean() > 0.99


def test_positions_and_keys() -> None:
    """One key has N positions for every matrix; another is sent when they are used up."""
    a, b = correlation_of(2, 3, "a"), correlation_of(4, 1, "b")
    w, v = matrix(3, 2, 3), matrix(4, 4, 1)
    two = Two()
    client = two.products[CLIENT]
    assert client.available(a) == 0
    seen = []
    for correlation, values, units, left in [
        (a, w, 10, HALF - 10),  # the first window under the first key
        (a, w, HALF - 10, 0),
        (b, v, 1, HALF - 1),
        (a, w, 1, HALF - 1),
        (a, w, HALF, HALF - 1),  # crosses to the second key
        (b, v, N - 1, 0),
        (b, v, N, 0),  # the second key, made for `a`
    ]:
        error = two.errors(correlation, units, values)
        assert (np.abs(error) <= bound(values)).all()
        assert [p.available(correlation) for p in two.products] == [left, left]
        seen.append(two.sent(CLIENT).count(KEY))
    assert seen == [1, 1, 1, 1, 2, 2, 2]
    two.take(b, 1, v)
    assert two.sent(CLIENT).count(KEY) == 3


@pytest.mark.parametrize("chunk", [90, 700, 3000])
def test_a_window_ends_with_its_key(chunk: int) -> None:
    """Whatever a correlation's chunk: no position is made twice, none is left out."""
    c, w = correlation_of(1, 1, chunk=chunk), matrix(5, 1, 1)
    two = Two()
    two.take(c, N - 3, w)
    use = two.products[CLIENT]._uses[c.name]
    assert use.next + N * use.key == N - 3 + use.left <= N
    two.errors(c, 3, w)
    assert two.sent(CLIENT).count(KEY) == 1
    assert (np.abs(two.errors(c, 5, w)) <= bound(w)).all()
    assert two.sent(CLIENT).count(KEY) == 2


def test_a_failure_while_positions_are_made_loses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    c, w = correlation_of(1, 1), matrix(6, 1, 1)
    two = Two()
    two.set_up((c, w))

    def broken(start: int, count: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(hint, "public_inputs", broken)
        client, _ = two.outcomes(lambda rank, p: p.prepare(c, 1, fixed(rank, w)))
    assert isinstance(client, Exception)
    use = two.products[CLIENT]._uses[c.name]
    assert (use.key, use.next, use.left) == (0, HALF, 0)


def test_nothing_to_take() -> None:
    two = Two()
    for correlations in two.take(correlation_of(2, 3), 0, matrix(7, 2, 3)):
        assert correlations.masks[0].shape == (0, 2) and correlations.results[0].shape == (0, 3)
    assert two.sent(CLIENT) == [8]  # the hint is there, no key


def test_exact_traffic() -> None:
    """Set-up: 32 bytes per matrix down, 8 up, and the hints in pieces of 4 MiB; a key: 16 KiB up.
    Positions: nothing.
    """
    a, b = correlation_of(1, 420, "a"), correlation_of(3, 2, "b")
    w, v = matrix(8, 1, 420), matrix(9, 3, 2)
    two = Two()
    two.set_up((a, w), (b, v))
    assert matrix_of(a).hint_bytes == 420 * 5 * N
    down, up = [64, 1 << 22, 420 * 5 * N - (1 << 22), 2 * 5 * N], [16]
    assert (two.sent(PROVIDER), two.sent(CLIENT)) == (down, up)
    two.set_up((a, w), (b, v))
    two.take(b, 1, v)
    two.take(a, HALF, w)
    two.take(b, N - 1, v)
    assert (two.sent(PROVIDER), two.sent(CLIENT)) == (down, [*up, KEY])
    for meter, sent, received in zip(two.meters, (up, down), (down, up), strict=True):
        assert {e.phase for e in meter.entries} == {"offline"}
        assert [e.kind for e in meter.entries[:2]] == ["hint", "pool"]
        first, total = meter.entries[0].traffic, meter.traffic()
        assert (first.sent_bytes, first.received_bytes) == (sum(sent), sum(received))
        assert total.bytes == sum(sent) + sum(received) + KEY
        assert total.messages == len(sent) + len(received) + 1


def test_progress_of_hints() -> None:
    two = Two()
    heard: list[tuple[int, int]] = []
    two.products[CLIENT]._on_hint = lambda done, total: heard.append((done, total))
    c, total = correlation_of(1, 420), 420 * 5 * N
    two.set_up((c, matrix(8, 1, 420)))
    assert heard == [(0, total), (0, total), (1 << 22, total), (total, total)]


def test_another_matrix_of_the_same_name_is_refused() -> None:
    c, w = correlation_of(2, 2), matrix(10, 2, 2)
    two = Two()
    two.take(c, 1, w)
    two.take(c, 1, w.copy())  # the same weights elsewhere
    with pytest.raises(PoolError, match="other weights than before"):
        two.products[PROVIDER].set_up([(c, factor_from(w + 1))])
    other = correlation_of(2, 3)
    object.__setattr__(other, "name", c.name)
    with pytest.raises(PoolError, match="other weights than before"):
        two.products[CLIENT].set_up([(other, None)])


# ---- around them


class _Pool:
    """Records what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    def available(self, correlation: Correlation) -> int:
        return 7

    def prepare(self, correlation: Correlation, units: int) -> None:
        self.asked.append(("prepare", correlation.name, units))

    def take(self, correlation: Correlation, units: int) -> str:
        self.asked.append(("take", correlation.name, units))
        return "from the pool"


def test_supply() -> None:
    """What is bound to weights comes from silent products, everything else from the pool."""
    two, bound_, w = Two(), correlation_of(2, 1), matrix(11, 2, 1)
    pools = [_Pool(), _Pool()]

    def work(rank: int, products: SilentProducts) -> list[int]:
        supply = Supply(pools[rank], products)  # type: ignore[arg-type]
        weights = fixed(rank, w)
        supply.set_up(Demand.of([CorrelationRequest(bound_, 1, weights)]))
        supply.prepare(bound_, 1, weights)
        supply.prepare(TRIPLE, 5)
        correlations = supply.take(bound_, 3, weights)
        assert supply.take(TRIPLE, 2) == "from the pool"
        return [len(correlations.results[0]), supply.available(bound_), supply.available(TRIPLE)]

    assert two.both(work) == [[3, HALF - 3, 7]] * 2
    for pool in pools:
        assert pool.asked == [("prepare", TRIPLE.name, 5), ("take", TRIPLE.name, 2)]


def test_linear_refuses_a_lift_that_masks_do_not_cover() -> None:
    two = Two()
    supply = Supply(None, two.products[CLIENT])  # type: ignore[arg-type]
    prg = two.products[CLIENT]._own
    party = Party(CLIENT, two.wires[CLIENT], prg, 18, supply, prg)
    x = Arith(np.zeros((1, 2), np.uint64), np.dtype(np.float32), 18)
    w = Private(PROVIDER, (2, 2), np.dtype(np.float32), None)
    with pytest.raises(ValueError, match="lowest 10 bits"):
        linear.run(party, [x, w], {"label": "w", "shift": None, "lift": 9})
