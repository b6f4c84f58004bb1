"""Conditions that silent products rest on (`spu_llm.offline.silent.products`), each with a twin
that breaks it and shows what an attacker would have.
"""

from __future__ import annotations

import numpy as np
import pytest

from spu_llm.core.integers import factor_from
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, digest
from spu_llm.offline import rlwe
from spu_llm.offline.silent import hint, ring
from spu_llm.offline.silent.hint import Matrix, Secrets
from spu_llm.offline.silent.ring import N
from tests.offline.silent_pair import (
    HALF,
    Two,
    correlation_of,
    forbid_numpys_randomness,
    looks_uniform,
    matrix,
)

ONE = Matrix("one 1 1", 1, 1)  # its weight is searched for
WEIGHTS = np.arange(-(2**11), 2**11)


def secrets(m: Matrix, w: np.ndarray, key: bytes = bytes(32)) -> Secrets:
    return Secrets(key, m, digest(w))


def hint_words(m: Matrix, w: np.ndarray, own: Secrets) -> np.ndarray:
    """Words [outputs, N] of a hint."""
    kept = hint.make(m, factor_from(w), own)
    words = np.zeros((*kept.shape[:2], 8), np.uint8)
    words[..., 8 - hint.BYTES :] = kept
    return words.view(np.uint64)[..., 0]


def weight_in(words: np.ndarray, m: Matrix = ONE) -> int | None:
    """Return the weight w with words = w a + small for the public a of m's one input, if there is
    one.
    """
    a = hint.public_inputs(m, 0, 1)[0, :8]
    rest = (words[:8] - WEIGHTS.astype(np.uint64)[:, None] * a).view(np.int64)
    (actual,) = np.nonzero((np.abs(rest.astype(float)) < 2.0**30).all(axis=1))
    return int(WEIGHTS[actual[0]]) if len(actual) else None


def test_p_is_nobodys_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.array([[-1234.0]])
    assert weight_in(hint_words(ONE, w, secrets(ONE, w))[0]) is None
    assert np.count_nonzero(hint.public_key_base()) > N - 3
    monkeypatch.setattr(hint, "public_key_base", lambda: np.zeros(N, np.uint64))
    assert weight_in(hint_words(ONE, w, secrets(ONE, w))[0]) == -1234


def test_every_version_of_the_weights_has_its_own_u(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = np.array([[300.0]]), np.array([[1700.0]])

    def difference() -> np.ndarray:
        x, y = (hint_words(ONE, w, secrets(ONE, w))[0] for w in (old, new))
        return y - x

    assert weight_in(difference()) is None
    child = Prg.child
    cut = len(f"{hint.VERSION}: {ONE.name}, ")
    monkeypatch.setattr(Prg, "child", lambda self, label: child(self, label[:cut]))
    assert weight_in(difference()) == 1400


def test_every_u_and_noise_is_its_own() -> None:
    """Of outputs, slices, matrices, versions of the weights, and providers."""
    w, rows = np.zeros((1, 130)), [slice(0, 64), slice(64, 128), slice(128, 130)]
    all_of = [
        secrets(Matrix("a 1 130", 1, 130), w),
        secrets(Matrix("b 1 130", 1, 130), w),
        secrets(Matrix("a 1 130", 1, 130), w + 1),
        secrets(Matrix("a 1 130", 1, 130), w, bytes(31) + b"\1"),
    ]
    assert list(hint.slices(130)) == rows
    u = np.concatenate([s.small(r) for s in all_of for r in rows]).astype(np.int8)
    e = np.concatenate([s.noise(r) for s in all_of for r in rows])
    assert len({row.tobytes() for row in u}) == len({row.tobytes() for row in e}) == 4 * 130
    assert len({s.name for s in all_of}) == 4
    # No two are alike anywhere: a third of the places of independent ones are.
    alike = (u[:130, None] == u[None, :130]).mean(axis=2)[~np.eye(130, dtype=bool)]
    assert np.abs(alike - 1 / 3).max() < 6 * np.sqrt(2 / 9 / N)
    again = secrets(Matrix("a 1 130", 1, 130), w)
    assert (again.noise(rows[1]) == e[64:128]).all() and (again.small(rows[0]) != 0).any()


def online(two: Two, name: str, units: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return what the client sends for some inputs x of its choice, and x: words [units, 3]."""
    x = Prg.from_seed(units, name).words((units, 3)) >> np.uint64(40) << np.uint64(12)
    client, _ = two.take(correlation_of(3, 1, name), units, matrix(1, 3, 1))
    return x - client.masks[0], x


def near(words: np.ndarray) -> bool:
    """Return whether words are no larger than a difference of noise."""
    return bool((np.abs(words.view(np.int64).astype(float)) <= 42 * 2**10).all())


def test_every_matrix_has_its_own_a(monkeypatch: pytest.MonkeyPatch) -> None:
    def difference() -> np.ndarray:
        two = Two()
        (sent, x), (sent_2, x_2) = online(two, "a", HALF), online(two, "b", HALF)
        return (sent - sent_2) - (x - x_2)

    actual = difference()
    assert not near(actual) and looks_uniform(actual.view(np.uint8).reshape(-1, 8)[:, 2:])
    inputs, same = hint.public_inputs, Matrix("same", 3, 1)
    monkeypatch.setattr(hint, "public_inputs", lambda m, start, count: inputs(same, start, count))
    assert near(difference())


def test_every_position_is_used_once() -> None:
    two = Two()
    sent, x = online(two, "a", HALF)
    sent_2, x_2 = online(two, "a", HALF)
    assert not near((sent - sent_2) - (x - x_2))
    for products in two.products:
        use = products._uses["a 3 1"]
        assert (use.key, use.next) == (1, 0)
        use.key = 0  # set back
    sent_3, x_3 = online(two, "a", HALF)
    assert near((sent - sent_3) - (x - x_3))


def test_every_key_is_fresh() -> None:
    """Within a session and from session to session."""
    two, w = Two(), matrix(1, 3, 1)
    two.take(correlation_of(3, 1), 3 * N, w)
    other = Two()
    other.take(correlation_of(3, 1), N, w)
    keys = [x for t in (two, other) for x in t.wires[CLIENT].sent if len(x) == 8 * N]
    assert len(keys) == 4
    words = [np.frombuffer(x, np.uint64) for x in keys]
    assert not any(near(x - y) for i, x in enumerate(words) for y in words[:i])


def test_noise_of_each_position_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.ndarray] = []
    noise = ring.noise

    def recorded(prg: Prg, shape: tuple[int, ...]) -> np.ndarray:
        actual = noise(prg, shape)
        drawn.append(actual.copy())
        return actual

    two, w = Two(), matrix(2, 2, 1)
    two.set_up((correlation_of(2, 1), w))
    monkeypatch.setattr(ring, "noise", recorded)
    (client, _) = two.take(correlation_of(2, 1), N, w)
    assert [x.shape for x in drawn] == [(N,), (2, HALF), (2, HALF)]  # the key's, two windows'
    # What is left of a mask without its noise is -a s, for the s of the key.
    a, s = hint.public_inputs(Matrix("matrix 2 1", 2, 1), 0, 2), two.products[CLIENT]._keys[0]
    noises = np.concatenate(drawn[1:], axis=1)
    hidden = ring.exact_product(a, ring.transform(s)) + noises
    assert (client.masks[0] == (np.uint64(0) - hidden).T).all()
    assert (noises[:, :HALF] != noises[:, HALF:]).mean() > 0.8


def inverse_mod_2(h: np.ndarray) -> np.ndarray:
    """Invert a polynomial of 0 and 1 with h(1) odd, mod 2 and X^N + 1: h^N = h(X^N) = 1."""
    product, power = h, h
    for _ in range(10):
        place = np.nonzero(power)[0] * 2 % N
        power = np.zeros(N)
        np.add.at(power, place, 1)
        power %= 2
        product = times(product, power) % 2
    return product


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.rint(rlwe.inverse(ring.transform(a) * ring.transform(b)))


def test_raw_products_stay_closed() -> None:
    """A provider that saw the raw products of N positions would have the client's share -hint s,
    and from it s, here mod 2. That is why `linear` truncates before anything can be opened.
    """
    m = 64
    two, w, c = Two(), matrix(5, 2, m), correlation_of(2, m, chunk=N)
    client, _ = two.take(c, N, w)
    lowest = (two.products[CLIENT]._uses[c.name].hint[..., 0] & 1).astype(float)
    o = int(np.argmax(lowest.sum(axis=1) % 2))  # one with an odd sum: half of them are
    h, share = lowest[o], client.results[0][:, o]
    parity = (np.uint64(0) - share + np.uint64(1 << 23)) >> np.uint64(24) & np.uint64(1)
    actual = times(parity.astype(float), inverse_mod_2(h)) % 2
    s = two.products[CLIENT]._keys[0]
    assert (actual == np.abs(s)).all() and 0.6 < actual.mean() < 0.72


def test_truncated_products_are_for_the_client_alone() -> None:
    """Opened to the provider they would show s, since it knows what its hints leave out: here from
    2^17 results of x = 0 under one key, with weights so small that their noise hides little.
    """
    k, m = 1, 64
    w, c = np.ones((k, m)), correlation_of(k, m, chunk=N)
    two = Two()
    client, provider = two.take(c, N, w)
    (r,), (mine,), (theirs,) = client.masks, client.results, provider.results
    product = (mine + theirs - r @ w.astype(np.uint64)).view(np.int64)  # of x = 0
    opened = np.rint(product / 2.0**30 + np.random.default_rng(1).random((N, m)) - 0.5)
    # The provider's: the hint before it was rounded.
    kept = two.products[PROVIDER]._uses[c.name]
    assert kept.own is not None
    name = Matrix(c.name, k, m)
    a = hint.public_inputs(name, 0, 1)
    exact = a * np.uint64(1) + kept.own.noise(slice(0, m))
    small = ring.transform(kept.own.small(slice(0, m)))
    exact += ring.exact_product(hint.public_key_base()[None], small)
    left = ((exact + np.uint64(1 << 23)) & np.uint64(2**24 - 1)).astype(float) - 2.0**23
    # Regression on d s, d = -left: correlate.
    d = ring.transform(left)
    total = rlwe.inverse((ring.transform(opened.T * 2.0**30) * d.conj()).sum(axis=0))
    total /= (left**2).sum()
    assert (np.clip(np.rint(total), -1, 1) == two.products[CLIENT]._keys[0]).mean() > 0.9


@pytest.mark.parametrize("false", [True, False])
def test_a_false_key_shows_what_masks_weights(false: bool) -> None:
    """A client that adds 2^40 to its key, and asks the same x in N rows that are opened to it, has
    u_o of every output, and from the hint the weights. One that sends a true key has none of it.
    """
    w, c = np.array([[-1234.0, 77.0, 2000.0]]), correlation_of(1, 3, ONE.name, chunk=N)
    name, two = Matrix(c.name, 1, 3), Two()

    def change(number: int, data: bytes) -> bytes:
        if len(data) != 8 * N or not false:
            return data
        key = np.frombuffer(data, np.uint64).copy()
        key[0] += np.uint64(1 << 40)
        return key.tobytes()

    two.wires[CLIENT].change = change
    error = two.errors(c, N, w)
    of_x = np.rint(w * 321)  # the same in every row, and unknown to the client
    opened = of_x + np.rint(error / 2.0**30 + np.random.default_rng(1).random(error.shape) - 0.5)
    middle = (opened.max(axis=0) + opened.min(axis=0)) / 2
    actual = np.rint((opened - middle) / 2.0**10).T
    kept = two.products[PROVIDER]._uses[c.name]
    assert kept.own is not None
    assert (actual == kept.own.small(slice(0, 3))).all() == false and actual.any() == false
    masked = hint_words(name, w, kept.own)
    bare = masked - ring.exact_product(hint.public_key_base()[None], ring.transform(actual))
    assert [weight_in(row, name) for row in bare] == ([-1234, 77, 2000] if false else [None] * 3)


# ---- what each party sees


def test_what_the_provider_sees_looks_uniform() -> None:
    """The key, and inputs under their masks: all bits that are not always zero."""
    two, w, c = Two(), matrix(3, 40, 1), correlation_of(40, 1, chunk=N)
    client, _ = two.take(c, 2 * N, w)
    keys = [np.frombuffer(x, np.uint64) for x in two.wires[CLIENT].sent if len(x) == 8 * N]
    zero_inputs = np.uint64(0) - client.masks[0].reshape(-1)
    for words in (np.concatenate(keys), zero_inputs):
        assert not (words & np.uint64(1023)).any()
        top = (words >> np.uint64(10)).view(np.uint8).reshape(-1, 8)[:, :6]
        assert looks_uniform(top)
        for byte in range(6):
            assert looks_uniform(top[:, byte])


def test_hints_look_uniform() -> None:
    """Even of a matrix of zeros."""
    m = Matrix("zeros 2 80", 2, 80)
    w = np.zeros((2, 80))
    kept = hint.make(m, factor_from(w), secrets(m, w))
    for byte in range(hint.BYTES):
        assert looks_uniform(kept[..., byte])


def test_no_other_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, masks and hints come from keyed streams; so they repeat when those do."""
    forbid_numpys_randomness(monkeypatch)
    collected = []
    for _ in range(2):
        two = Two()
        for rank, products in enumerate(two.products):
            products._own = Prg.from_seed(rank, "own")
        two.products[PROVIDER]._provider_key = bytes(32)
        batches = two.take(correlation_of(2, 2), N, matrix(4, 2, 2))
        words = [x.tobytes() for m in batches for x in (*m.masks, *m.results)]
        collected.append((words, two.wires[CLIENT].sent, two.wires[PROVIDER].sent))
    assert collected[0] == collected[1]
