"""Conditions that packed products rest on (`spu_llm.offline.packed.products`), each with a twin
that breaks it and shows what an attacker would have. The provider encrypts, the client evaluates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline import rlwe
from spu_llm.offline.packed import products, ring
from spu_llm.offline.packed.products import PackedProducts
from spu_llm.offline.packed.ring import KEY_BITS, KEY_DROP, LIMB, N
from tests.offline.packed_pair import (
    KEY,
    NOISE,
    SWITCHING,
    Masks,
    PackedTwo,
    as_bytes,
    correlation_of,
    layout_of,
    layouts_of,
    one_way,
)
from tests.offline.silent_pair import forbid_numpys_randomness, looks_uniform

GUESSES = np.arange(64, dtype=np.uint64)  # of a word of X


def near(words: np.ndarray, bound: float = 2 * 21 + 4) -> np.ndarray:
    """Return whether all of the last axis are no larger than differences of noise."""
    return (np.abs(words.view(np.int64).astype(float)) <= bound).all(axis=-1)


def scaled(two: PackedTwo, *x: int, m: int = N) -> Masks:
    """Masks of words x of the client, times rows of the provider."""
    (_, none), provider = two.draw(one_way(1, 1, m), len(x))
    return [[np.array(x, np.uint64).reshape(-1, 1, 1), none], provider]


def public_a(two: PackedTwo, start: int, count: int) -> np.ndarray:
    return two.products[PROVIDER]._public("a", PROVIDER, start, count)


def whole_numbers(x: np.ndarray) -> np.ndarray:
    """Python's, of words [..., 2, N]."""
    return x[..., 0, :].astype(object) + (x[..., 1, :].astype(object) << 64)


def centred(x: np.ndarray, bits: int) -> np.ndarray:
    half = 1 << bits - 1
    return (x + half) % (1 << bits) - half


# ---- p and a


def guesses(a: np.ndarray) -> np.ndarray:
    """Words [64, 8] of c0 for every guess, without p s'."""
    return ring.upper_times(a[:, :8], GUESSES[:, None])


def test_p_is_nobodys_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def words_found() -> list[int]:
        two, c = PackedTwo(), one_way(1, 1, 4)
        masks = scaled(two, 41, m=4)
        two.make(c, masks)
        c0 = two.answer(layout_of(c, masks))
        return list(GUESSES[near(c0[0, :8] - guesses(public_a(two, 0, 1)[0]))])

    assert words_found() == []
    base = PackedTwo().products[CLIENT]._key_base(PROVIDER)
    assert looks_uniform(as_bytes(base))
    monkeypatch.setattr(PackedProducts, "_key_base", lambda self, rank: np.zeros(N, np.uint64))
    assert words_found() == [41]


def test_every_ciphertext_has_its_own_a(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one call and of two."""
    c = one_way(1, 1, N)

    def shows(set_back: bool = False) -> list[bool]:
        """Return whether pairs of ciphertexts differ by what they hold."""
        two, of, rows = PackedTwo(), None, []
        messages, actual = [], []
        for seed in (1, 2):
            masks = two.draw(c, 2, seed)
            of = layout_of(c, masks)
            two.make(c, masks)
            actual.extend(whole_numbers(two.ciphertexts(of)))
            messages.extend(masks[PROVIDER][1][:, 0].astype(object) << 64)
            if set_back:
                for party in two.products:
                    party._made = 0
        for i, j in ((0, 1), (0, 2), (1, 3)):
            rest = centred(actual[i] - actual[j] - messages[i] + messages[j], 128)
            rows.append(bool((np.abs(rest) <= 42).all()))
        return rows

    assert shows() == [False, False, False]
    assert shows(set_back=True) == [False, True, True]
    public = PackedProducts._public

    def one(self: PackedProducts, what: str, rank: int, start: int, count: int) -> np.ndarray:
        return np.repeat(public(self, what, rank, 0, 1), count, axis=0)

    monkeypatch.setattr(PackedProducts, "_public", one)
    assert shows() == [True, True, True]


def test_every_public_string_is_for_one_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys, switching keys, ciphertexts, parties and sessions."""
    asked: Counter[tuple[str, int]] = Counter()
    public = rlwe.public

    def counted(label: str, start: int, count: int, words: int) -> np.ndarray:
        asked.update((label, i) for i in range(start, start + count))
        return public(label, start, count, words)

    monkeypatch.setattr(rlwe, "public", counted)
    several = [(correlation_of(3, 2, 9), 3), (correlation_of(1, 6, N // 2), 2)]
    several.append((correlation_of(1, 1, 300), 70))  # in parts
    layouts = [layouts_of(c, PackedTwo().draw(c, units)) for c, units in several]
    assert [len(of) for of in layouts[:2]] == [1, 1] and len(layouts[2]) > 1
    for session in (b"one", b"two"):
        two = PackedTwo(common=session)
        for c, units in (*several, *several):
            two.make(c, two.draw(c, units))
    # The owner encrypts with each once, the evaluator multiplies with it once.
    assert set(asked.values()) == {2}
    # 1 p, 3 limbs of each stride, all ciphertexts twice: of two parties, two sessions.
    strides = {d for parts in layouts for of in parts for d in of.switches}
    ciphertexts = sum(of.groups * of.blocks for parts in layouts for of in parts)
    assert len(asked) == 4 * (1 + 3 * len(strides) + 2 * ciphertexts)
    first = [public(label, i, 1, 4).tobytes() for label, i in asked]
    assert len(set(first)) == len(first)


# ---- s'


def test_every_answer_has_its_own_small_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one call and of two; else the owner has the difference of two products with its a."""
    c = one_way(1, 1, N)
    x = [7, 60, 33, 2]

    def alike_pairs() -> list[list[tuple[int, int]]]:
        two, c0 = PackedTwo(), []
        for some in (x[:2], x[2:]):
            masks = scaled(two, *some)
            two.make(c, masks)
            c0.extend(two.answer(layout_of(c, masks))[:, :8])
        made = [guesses(a) for a in public_a(two, 0, 4)]
        pairs = []
        for i, j in ((0, 1), (0, 2), (1, 3)):
            rest = (c0[i] - c0[j]) - (made[i][:, None] - made[j][None, :])
            pairs.append([(int(k), int(l)) for k, l in zip(*np.nonzero(near(rest)), strict=True)])
        return pairs

    assert alike_pairs() == [[], [], []]
    ternary = rlwe.ternary
    kept: dict[int, np.ndarray] = {}

    def same(prg: Prg, count: int, n: int) -> np.ndarray:
        first = kept.setdefault(id(prg), ternary(prg, count, n)[:1])
        return np.repeat(first, count, axis=0)

    monkeypatch.setattr(rlwe, "ternary", same)
    assert alike_pairs() == [[(7, 60)], [(7, 33)], [(60, 2)]]


# ---- raw products stay closed


def truncated(raw: np.ndarray, bits: int = 18) -> np.ndarray:
    """Return what is opened of products `raw`, as they stand after `bits` are truncated,
    unbiased.
    """
    up = Prg.from_os().words(raw.shape) >> np.uint64(64 - bits)
    return (raw + up >> np.uint64(bits)) << np.uint64(bits)


def kept_of(
    party: PackedProducts, draw: Callable[..., Any], name: str, into: dict[str, np.ndarray]
) -> Callable[..., Any]:
    """Return `draw`, and what a party drew last is kept."""

    def kept(prg: Prg, *shape: Any) -> np.ndarray:
        actual = draw(prg, *shape)
        if prg is party._own:
            into[name] = actual.copy()
        return actual

    return kept


def test_raw_products_would_show_s_to_the_evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows s', e' and what it rounded c0 by, so that the errors are linear in e and s.

    Here from 2^18 products. What truncation adds has 4 times the variance with every bit; for g = 6
    the factors of s have 2^5.5 times that of these, where g = 0. So 2^18 products without their
    last 10 bits are as good as some 2^28 without their last 18.
    """
    units, c, two = 32, one_way(1, 1, N), PackedTwo()
    masks = two.draw(c, units)
    drawn: dict[str, np.ndarray] = {}  # by the client
    for name in ("ternary", "noise"):
        kept = kept_of(two.products[CLIENT], getattr(rlwe, name), name, drawn)
        monkeypatch.setattr(rlwe, name, kept)
    client, provider = two.make(c, masks)
    x, y = masks[CLIENT][0], masks[PROVIDER][1]
    a = public_a(two, 0, units)
    exact = whole_numbers(a) * x[:, 0].astype(object)
    made = np.stack([ring.upper_times(a[i], x[i, 0, 0]) for i in range(units)])
    rounded = centred((made.astype(object) << 64) - exact, 128).astype(float) / 2.0**64
    # error = e s' - (e' + rounded) s + what is small: least squares at each place of transforms.
    f = rlwe.transform(drawn["ternary"])
    g = -rlwe.transform(drawn["noise"] + rounded)

    def right(opened: np.ndarray) -> float:
        """Return the part of s that is found."""
        error = rlwe.transform((opened - x @ y).view(np.int64)[:, 0].astype(float))
        ff, fg, gg = ((u.conj() * v).sum(axis=0) for u, v in ((f, f), (f, g), (g, g)))
        fe, ge = ((u.conj() * error).sum(axis=0) for u in (f, g))
        s = rlwe.inverse((ff * ge - fg.conj() * fe) / (ff * gg - fg * fg.conj()))
        actual = np.clip(np.rint(s), -1, 1)
        return float((actual == two.products[PROVIDER]._secret).mean())

    assert right(client + provider) > 0.99
    assert right(truncated(client + provider, 10)) > 0.9
    assert right(truncated(client + provider)) < 0.4


def test_raw_products_would_show_x_to_the_owner() -> None:
    """Errors correlate with its noise times X."""
    c, two = one_way(128, 128, 64), PackedTwo()
    masks = two.draw(c, 1)
    of = layout_of(c, masks)
    client, provider = two.make(c, masks)
    x, y = masks[CLIENT][0], masks[PROVIDER][1]
    a, at = public_a(two, 0, of.blocks), 64 - len(of.switches)
    noise = encryption_noise(two.ciphertexts(of), a, two.secret(), of.encoded_right(y)[0], at)

    def correlation(opened: np.ndarray, guess: np.ndarray) -> float:
        polynomials = np.stack([of.encoded_left(guess[0], r) for r in range(of.pairs)])
        left = rlwe.transform(polynomials.view(np.int64).astype(float))
        predicted = rlwe.inverse((left * rlwe.transform(noise)).sum(axis=1))
        error = (opened - x @ y).view(np.int64).reshape(-1)
        return float(np.corrcoef(predicted[:, :: of.stride].reshape(-1), error)[0, 1])

    raw, other = client + provider, Prg.from_os().words(x.shape)
    assert correlation(raw, x) > 0.35  # 2^9.9 of 2^10.9
    assert abs(correlation(raw, other)) < 0.1
    assert abs(correlation(truncated(raw), x)) < 0.1


# ---- noise


def encryption_noise(
    b: np.ndarray, a: np.ndarray, s: np.ndarray, message: np.ndarray, at: int, bits: int = 128
) -> np.ndarray:
    """Return what b [..., 2, N] is off a s + 2^at message."""
    exact = whole_numbers(ring.times_small(a, s, np.int64(0)))
    exact = exact + (message.view(np.int64).astype(object) << at)
    return centred(whole_numbers(b) - exact, bits).astype(float)


def all_noise(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Return the noise of the key, switching keys, ciphertexts and answers of a session: rows of
    N.
    """
    drawn: dict[str, np.ndarray] = {}
    two, c = PackedTwo(), one_way(1, 1, N // 2)
    client, owner = two.products
    with monkeypatch.context() as patch:
        patch.setattr(rlwe, "ternary", kept_of(client, rlwe.ternary, "s'", drawn))
        masks = two.draw(c, 3)
        of = layout_of(c, masks)
        two.make(c, masks)
        alone = scaled(two, 5, m=N // 2)
        two.make(c, alone)
    s, rows = two.secret(), []
    key, switching, *_ = two.wires[PROVIDER].sent
    p = owner._key_base(PROVIDER)
    rest = np.frombuffer(key, np.uint64) - ring.word_times_small(p, s)
    rows.append(rest.view(np.int64).astype(float)[None])
    # Of the only stride, 2.
    turned = ring.mapped(owner._secret.astype(np.int64).view(np.uint64), 1 + N)
    bases = owner._switching_base(PROVIDER, 2)
    for limb, b in enumerate(products._from_key_bytes(switching)):
        at = KEY_DROP + LIMB * limb
        minus = np.uint64(0) - turned
        rows.append(encryption_noise(b, bases[limb], s, minus, at, KEY_BITS)[None])
    count = of.groups * of.blocks
    right = of.encoded_right(masks[PROVIDER][1])[:, 0]
    b = two.ciphertexts(of, -2)
    rows.append(encryption_noise(b, public_a(two, 0, count), s, right, 64 - len(of.switches)))
    # The one answer without packing.
    c0 = two.answer(layout_of(c, alone))
    plain = ring.upper_times(public_a(two, count, 1)[0], np.uint64(5))
    rest = c0[0] - plain - ring.word_times_small(p, rlwe.transform(drawn["s'"][0]))
    rows.append(rest.view(np.int64).astype(float)[None])
    return np.concatenate(rows)


def test_everything_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = all_noise(monkeypatch)
    assert len(actual) == 1 + 3 + 2 + 1
    assert np.abs(actual).max() <= 21
    assert (np.abs(actual.std(axis=1) / NOISE - 1) < 0.06).all()
    # No two are alike: an eighth of the places are alike by chance.
    alike = (actual[:, None] == actual[None]).mean(axis=2)[~np.eye(len(actual), dtype=bool)]
    assert alike.max() < 0.12
    monkeypatch.setattr(rlwe, "noise", lambda prg, shape: np.zeros(shape, np.int64))
    assert not all_noise(monkeypatch).any()


# ---- what each party sees


def parts(message: bytes) -> list[np.ndarray]:
    """Bytes [..., 8] or [..., 3] of a message that have nothing that is always zero."""
    if len(message) != SWITCHING:
        return [np.frombuffer(message, np.uint8).reshape(-1, 8)]
    low, high = message[: 3 * 8 * N], np.frombuffer(message[3 * 8 * N :], np.uint32)
    assert high.max() < 1 << KEY_BITS - 64
    return [np.frombuffer(low, np.uint8).reshape(-1, 8), as_bytes(high).reshape(-1, 4)[:, :3]]


def uniform(message: bytes) -> bool:
    return all(
        looks_uniform(part) and all(looks_uniform(part[:, i]) for i in range(part.shape[1]))
        for part in parts(message)
    )


def test_what_is_sent_looks_uniform() -> None:
    """Of zeros, too."""
    two, c = PackedTwo(), correlation_of(4, 3, 512)
    masks = [[np.zeros_like(x) for x in mine] for mine in two.draw(c, 2)]
    of = layout_of(c, masks)
    assert of.switches == [8, 4]
    two.make(c, masks)
    for wire in two.wires:
        assert [len(x) for x in wire.sent[:3]] == [KEY, SWITCHING, SWITCHING]
        assert all(uniform(message) for message in wire.sent)


def test_answers_look_uniform_to_an_owner_that_sends_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not depend on what it sends; without s' it would see words of X and noise."""
    c = one_way(4, 3, 512)
    of = layout_of(c, PackedTwo().draw(c, 2))
    assert of.answers == 1 and of.switches

    def answer(change: Callable[[bytes], bytes]) -> np.ndarray:
        two = PackedTwo(seed=3)
        two.wires[PROVIDER].change = lambda number, data: change(data)
        two.make(c, two.draw(c, 2))
        return two.answer(of)

    honest = answer(lambda data: data)
    assert uniform(honest.tobytes())
    random = Prg.from_os()
    for change in (
        lambda data: bytes(len(data)),
        lambda data: random.words((len(data) // 8,)).tobytes(),
    ):
        np.testing.assert_array_equal(answer(change), honest)
    monkeypatch.setattr(rlwe, "ternary", lambda prg, count, n: np.zeros((count, n)))
    masks = [[np.zeros_like(x) for x in mine] for mine in PackedTwo().draw(c, 2)]
    two = PackedTwo()
    two.make(c, masks)
    assert not uniform(two.answer(of).tobytes())


@pytest.mark.parametrize("leaks", [False, True])
def test_c1_stays_with_the_evaluator(monkeypatch: pytest.MonkeyPatch, leaks: bool) -> None:
    """An owner that had it, too, would have the product, and X with it."""
    c, two, kept = one_way(1, 1, N), PackedTwo(), []
    client, owner = two.products
    answer = client._answer

    def answered(*args: Any) -> Any:
        c0, c1 = answer(*args)
        kept.append(c1)
        return (np.concatenate([c0, c1], axis=1) if leaks else c0), c1

    monkeypatch.setattr(client, "_answer", answered)
    masks = scaled(two, 41)
    if leaks:
        with pytest.raises(WireError):
            two.make(c, masks)
    else:
        two.make(c, masks)
    sent = np.frombuffer(b"".join(two.wires[CLIENT].sent), np.uint64).reshape(-1, N)
    share = np.uint64(0) - ring.word_times_small(sent[:1], owner._small)
    y = masks[PROVIDER][1][0]
    collected = [
        int(guess)
        for other in (np.zeros(N, np.uint64), *sent[1:])
        for guess in GUESSES[near(share + other - GUESSES[:, None] * y, 2.0**15)]
    ]
    assert collected == ([41] if leaks else [])
    assert (sent == kept[0]).all(axis=1).any() == leaks


def wire(two: PackedTwo) -> np.ndarray:
    """Return all words that were sent."""
    return np.frombuffer(b"".join(two.wires[0].sent + two.wires[1].sent), np.uint64)


def test_nothing_on_the_wire_is_seen_twice() -> None:
    """In one session or two, of the same masks; it would be if both had the same streams."""
    c = correlation_of(4, 3, 512)

    def session(**of: Any) -> np.ndarray:
        two = PackedTwo(**of)
        for _ in range(2):
            two.make(c, two.draw(c, 2))
        return wire(two)

    first, second, third = session(), session(), session(common=b"other")
    several = np.concatenate([first, second, third])
    assert len(np.unique(several)) == len(several)
    again = [session(seed=1) for _ in range(2)]
    assert (again[0] == again[1]).all()
    assert not np.isin(session(seed=1, common=b"other"), again[0]).any()


def test_no_other_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is drawn comes from keyed streams; so it repeats when those do."""
    forbid_numpys_randomness(monkeypatch)
    c, actual = correlation_of(2, 3, 4), []
    for _ in range(2):
        two = PackedTwo(seed=3)
        shares = two.make(c, two.draw(c, 2))
        actual.append((wire(two).tobytes(), [x.tobytes() for x in shares]))
    assert actual[0] == actual[1]
