"""Polynomials of silent products: exact products, and the distributions of what is drawn."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.core.prg import Prg
from spu_llm.offline import rlwe
from spu_llm.offline.silent import hint, ring
from spu_llm.offline.silent.ring import N
from tests.offline.silent_pair import chi_square, looks_uniform

TOP = np.uint64(1 << 63)


def coefficient(a: np.ndarray, s: np.ndarray, n: int) -> int:
    """Compute the coefficient of X^n in a s modulo X^N + 1: words wrap, so this is exact."""
    signed = np.concatenate([s[n::-1], -s[:n:-1]]).astype(np.int64).view(np.uint64)
    return int((a * signed).sum(dtype=np.uint64))


def polynomial(kind: str, seed: int) -> np.ndarray:
    drawn = Prg.from_seed(seed, "words").words((N,)) >> np.uint64(10) << np.uint64(10)
    extreme = {
        "uniform": drawn,
        "lowest": np.full(N, TOP),
        "highest": np.full(N, TOP - np.uint64(1 << 10)),
        "minus one": np.full(N, np.uint64(2**64 - 2**10)),
        "alternating": np.where(np.arange(N) % 2, TOP, TOP - np.uint64(1 << 10)),
        "one word": np.where(np.arange(N) == seed % N, drawn, np.uint64(0)),
    }
    return extreme[kind]


KINDS = ["uniform", "lowest", "highest", "minus one", "alternating", "one word"]
SMALL = ["ternary", "ones", "minus ones", "zero", "last"]


def small(kind: str, seed: int) -> np.ndarray:
    last = np.zeros(N)
    last[-1] = 1
    extreme = {"ones": np.ones(N), "minus ones": -np.ones(N), "zero": np.zeros(N), "last": last}
    drawn = ring.ternary(Prg.from_seed(seed, "ternary"), 1)[0]
    return extreme.get(kind, drawn)


@settings(max_examples=60)
@given(st.sampled_from(KINDS), st.sampled_from(SMALL), st.integers(0, 10**6))
def test_exact_product(kind: str, small_kind: str, seed: int) -> None:
    a, s = polynomial(kind, seed), small(small_kind, seed)
    actual = ring.exact_product(a[None], ring.transform(s))[0]
    for n in (0, 1, N // 2, N - 1, seed % N):
        assert int(actual[n]) == coefficient(a, s, n)


def test_every_row_has_its_own_factor() -> None:
    prg = Prg.from_seed(1, "rows")
    a, s = ring.public("rows", 0, 3), ring.ternary(prg, 3)
    actual = ring.exact_product(a, ring.transform(s))
    for row in range(3):
        assert int(actual[row, 5]) == coefficient(a[row], s[row], 5)
    same = ring.exact_product(a, ring.transform(s[0]))
    assert (same[0] == actual[0]).all() and int(same[2, 7]) == coefficient(a[2], s[0], 7)


def test_rounding_is_far_from_a_wrong_integer() -> None:
    """Before it is rounded, a sum is off by less than 2^-14; half would be too much."""
    s = ring.transform(ring.ternary(Prg.from_seed(2, "margin"), 32))
    limbs = (ring.public("margin", 0, 32) >> np.uint64(37)).astype(np.float64)
    sums = rlwe.inverse(ring.transform(limbs) * s)
    assert np.abs(sums - np.rint(sums)).max() < 2.0**-14


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(SMALL),
    st.integers(0, N - 1),
    st.integers(0, 70),
    st.integers(0, 10**6),
)
def test_some_coefficients(kind: str, small_kind: str, start: int, count: int, seed: int) -> None:
    """Those of whole products, whichever factor the columns are of, and of a hint's rows."""
    window = slice(start, min(start + count, N))
    rows = np.stack([polynomial(kind, seed), polynomial("uniform", seed + 1)])
    s = small(small_kind, seed)
    whole = ring.exact_product(rows, ring.transform(s))[:, window]
    of_small = ring.columns(s, window)
    np.testing.assert_array_equal(ring.words_times(rows, of_small), whole)
    for words, wanted in zip(rows, whole, strict=True):
        of_words = ring.halves(ring.columns(words, window))
        np.testing.assert_array_equal(ring.small_times(s[None], of_words), wanted[None])
    hints = rows >> np.uint64(24) << np.uint64(24)
    kept = hints.view(np.uint8).reshape(2, N, 8)[..., 3:]
    whole = ring.exact_product(hints, ring.transform(s))[:, window]
    np.testing.assert_array_equal(hint.times(kept, of_small), whole)


@pytest.mark.parametrize("word", [None, 2**64 - 1, 2**63, 2**32 - 1, 2**32])
def test_words_of_64_bits(word: int | None) -> None:
    """Products of keys P, all of whose bits count, with u: as sums that wrap say."""
    prg = Prg.from_seed(8, "key")
    key = prg.words((N,)) if word is None else np.full(N, word, np.uint64)
    u = np.concatenate([ring.ternary(prg, 2), np.ones((1, N)), -np.ones((1, N))])
    for start in (0, N - 3):
        actual = ring.small_times(u, ring.halves(ring.columns(key, slice(start, start + 3))))
        for row, small_row in zip(actual, u, strict=True):
            wanted = [coefficient(key, small_row, n) for n in range(start, start + 3)]
            assert [int(x) for x in row] == wanted


def test_rows_of_a_kept_hint(tmp_path: Path) -> None:
    """A slice of a file that is mapped, behind its digest; no rows are none."""
    prg = Prg.from_seed(9, "kept")
    content = prg.words((3, N, 5)).view(np.uint8)[..., :5].copy()
    (tmp_path / "hint").write_bytes(bytes(32) + content.tobytes())
    mapped = np.memmap(tmp_path / "hint", np.uint8, "r")[32:].reshape(content.shape)
    small_columns = ring.columns(ring.ternary(prg, 1)[0], slice(N - 2, N))
    whole = hint.times(content, small_columns)
    np.testing.assert_array_equal(hint.times(mapped[1:], small_columns), whole[1:])
    assert hint.times(mapped[:0], small_columns).shape == (0, 2)


def test_ternary() -> None:
    """Uniform on three values: one seed in a million would fail."""
    drawn = ring.ternary(Prg.from_seed(4, "ternary"), 200)
    assert drawn.shape == (200, N) and drawn.dtype == np.float64
    counts = np.array([(drawn == v).sum() for v in (-1, 0, 1)])
    assert counts.sum() == drawn.size
    assert chi_square(counts, drawn.size / 3) < 2 * math.log(1e6)
    # Neighbours, and the same place of neighbouring rows, are independent.
    for pairs in (3 * drawn[:, :-1] + drawn[:, 1:], 3 * drawn[:-1] + drawn[1:]):
        counts = np.bincount(pairs.astype(int).reshape(-1) + 4, minlength=9)
        assert chi_square(counts, pairs.size / 9) < 45  # 8 degrees of freedom: 4e-7


def test_rejected_bytes_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Prg):
        calls = 0

        def words(self, shape: tuple[int, ...]) -> np.ndarray:
            self.calls += 1
            data = np.full(8 * shape[0], 255, np.uint8)
            data[::3] = self.calls
            return data.view(np.uint64)

    prg = Counting(bytes(32))
    drawn = ring.ternary(prg, 1)[0]
    assert prg.calls == 3 and set(drawn) == {-1.0, 0.0, 1.0}
    assert drawn[0] == 0 and drawn[-1] == -1  # 1 and 3, less one, mod 3


def test_noise() -> None:
    """Centred binomial, 21 pairs of coins."""
    words = ring.noise(Prg.from_seed(5, "noise"), (200, N))
    assert not (words & np.uint64((1 << 10) - 1)).any()
    drawn = words.view(np.int64) >> np.int64(10)
    assert np.abs(drawn).max() <= 21
    assert abs(drawn.mean()) < 5 * 3.24 / math.sqrt(drawn.size)
    assert abs(drawn.var() / 10.5 - 1) < 5 * math.sqrt(2 / drawn.size)
    values = np.arange(-13, 14)
    distribution = np.array([math.comb(42, 21 + v) / 2**42 for v in values])
    counts = np.array([(drawn == v).sum() for v in values])
    assert chi_square(counts, distribution * drawn.size) < 75  # 26 degrees of freedom: 1e-6


def ctr(key: bytes) -> bytes:
    """Return the first 8 N bytes of AES-256 in counter mode, from a counter of zero on."""
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * N))


def test_public_strings() -> None:
    words = ring.public("some label", 3, 2)
    for row, number in zip(words, (3, 4), strict=True):
        plain = np.frombuffer(ctr(hashlib.sha256(b"some label %d" % number).digest()), "<u8")
        assert (row >> np.uint64(10) == plain >> np.uint64(10)).all()
    assert not (words & np.uint64((1 << 10) - 1)).any()
    assert (ring.public("some label", 0, 5)[3:] == words).all()


def test_public_strings_do_not_change() -> None:
    """Hints are kept for ever: another string needs another `hint.VERSION`."""
    a = hint.public_inputs(hint.Matrix("layer 768 64", 768, 64), 700, 1)
    sums = [hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in (a, hint.public_key_base())]
    assert sums == ["926cc7889d3d15c5", "2578b5806dab667f"]


def test_public_strings_of_different_labels_differ() -> None:
    matrices = [hint.Matrix(name, 20, 2) for name in ("w 1", "w 11", "w", "v 1")]
    rows = np.concatenate([hint.public_inputs(x, 0, 20) for x in matrices])
    rows = np.concatenate([rows, hint.public_key_base()[None]])
    assert len({row[:4].tobytes() for row in rows}) == len(rows)
    assert looks_uniform(rows.view(np.uint8).reshape(-1, 8)[:, 2:])
