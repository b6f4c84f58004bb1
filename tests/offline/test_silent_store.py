"""Hints on the wire and on disk: what does not fit is refused, what is kept is used again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spu_llm.core.errors import PoolError, WireError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline.silent import hint, products
from spu_llm.offline.silent.cache import INSECURE
from spu_llm.offline.silent.ring import N
from tests.offline.silent_pair import Two, correlation_of, fixed, matrix

MATRIX, WEIGHTS = correlation_of(2, 5), matrix(1, 2, 5)
SIZE = 5 * 5 * N
PIECE = 20_000  # of a hint in one message, here

Session = Callable[[], Two]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_PIECE", PIECE)
    monkeypatch.setattr(os, "fsync", lambda number: None)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return lambda: Two(client_folder(tmp_path), provider_folder(tmp_path))


def client_folder(root: Path) -> Path:
    return root / "client" / INSECURE


def provider_folder(root: Path) -> Path:
    return root / "provider" / "version"


def set_up(two: Two) -> list[Any]:
    return two.outcomes(lambda rank, p: p.set_up([(MATRIX, fixed(rank, WEIGHTS))]))


def only(folder: Path, ending: str) -> Path:
    (actual,) = folder.glob(f"*{ending}")
    return actual


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---- the wire


@pytest.mark.parametrize("size", [0, 8 * N - 8, 8 * N + 8])
def test_a_key_has_its_length(size: int) -> None:
    two = Two()
    two.set_up((MATRIX, WEIGHTS))
    two.wires[CLIENT].change = lambda number, data: bytes(size)
    _, provider = two.outcomes(lambda rank, p: p.prepare(MATRIX, 1, fixed(rank, WEIGHTS)))
    assert isinstance(provider, WireError) and f"expected {8 * N}" in str(provider)
    assert two.products[PROVIDER].available(MATRIX) == 0


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b""])
def test_digests_and_pieces_have_their_lengths(
    session: Session, number: int, change: Callable[[bytes], bytes]
) -> None:
    two = session()
    two.wires[PROVIDER].change = lambda i, data: change(data) if i == number else data
    client, _ = set_up(two)
    assert isinstance(client, WireError) and "expected" in str(client)
    assert two.products[CLIENT].available(MATRIX) == 0


@pytest.mark.parametrize("held", [SIZE + 1, 2**63, 2**64 - 1])
def test_nobody_has_more_than_there_is(held: int) -> None:
    two = Two()
    two.wires[CLIENT].change = lambda number, data: held.to_bytes(8, "little")
    _, provider = set_up(two)
    assert isinstance(provider, WireError) and f"{held} bytes of a hint of {SIZE}" in str(provider)
    assert two.sent(PROVIDER) == [32]  # nothing was sent


@pytest.mark.parametrize("reply", [b"", bytes(7), bytes(16)])
def test_one_number_for_each_hint(reply: bytes) -> None:
    two = Two()
    two.wires[CLIENT].change = lambda number, data: reply
    assert isinstance(set_up(two)[PROVIDER], WireError)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("damage", ["first bit", "last bit", "order", "digest", "again"])
def test_a_damaged_hint_is_refused(session: Session, kept: bool, damage: str) -> None:
    two = session() if kept else Two()
    first: list[bytes] = []

    def change(number: int, data: bytes) -> bytes:
        first.append(data)
        changes = {
            ("first bit", 1): lambda: bytes([data[0] ^ 1]) + data[1:],
            ("last bit", 3): lambda: data[:-1] + bytes([data[-1] ^ 128]),
            ("order", 1): lambda: data[PIECE // 2 :] + data[: PIECE // 2],
            ("digest", 0): lambda: hashlib.sha256(data).digest(),
            ("again", 2): lambda: first[1],  # the piece before it
        }
        return changes.get((damage, number), lambda: data)()

    two.wires[PROVIDER].change = change
    client, _ = set_up(two)
    assert isinstance(client, PoolError) and "was dropped" in str(client)
    assert MATRIX.name not in two.products[CLIENT]._uses
    if kept:  # and the next session begins anew
        two = session()
        two.set_up((MATRIX, WEIGHTS))
        assert two.sent(PROVIDER) == [32, PIECE, PIECE, SIZE - 2 * PIECE]


# ---- kept


def test_a_hint_is_sent_once(session: Session, tmp_path: Path) -> None:
    first = session()
    first.set_up((MATRIX, WEIGHTS))
    assert sum(first.sent(PROVIDER)) == 32 + SIZE and first.sent(CLIENT) == [8]
    content = first.products[CLIENT]._uses[MATRIX.name].hint.tobytes()
    second = session()
    assert np.abs(second.errors(MATRIX, 3, WEIGHTS)).max() < 2**36
    assert second.sent(PROVIDER) == [32] and second.sent(CLIENT) == [8, 8 * N]
    assert second.wires[CLIENT].sent[0] == SIZE.to_bytes(8, "little")
    assert second.products[CLIENT]._uses[MATRIX.name].hint.tobytes() == content
    other = session()
    other.set_up((MATRIX, WEIGHTS + 1))
    assert sum(other.sent(PROVIDER)) == 32 + SIZE  # other weights: another hint
    kept = sorted(p.name for p in client_folder(tmp_path).iterdir())
    assert len(kept) == 2
    assert f"{hashlib.sha256(content).hexdigest()}.hint" in kept


def test_a_hint_is_the_same_when_it_is_made_again(session: Session, tmp_path: Path) -> None:
    sent = []
    for _ in range(2):
        two = session()
        two.set_up((MATRIX, WEIGHTS))
        sent.append(two.wires[PROVIDER].sent[0])
        only(provider_folder(tmp_path), ".hint").unlink()
    (provider_folder(tmp_path) / "key").unlink()
    two = session()
    two.set_up((MATRIX, WEIGHTS))
    assert sent[0] == sent[1] != two.wires[PROVIDER].sent[0]


def test_a_kept_hint_is_not_made_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session().set_up((MATRIX, WEIGHTS))
    monkeypatch.setattr(hint, "make", None)
    session().set_up((MATRIX, WEIGHTS))


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_what_has_come_is_not_sent_again(session: Session, tmp_path: Path, stop: int) -> None:
    """A download that breaks off before message `stop` of the provider."""
    two = session()
    two.wires[PROVIDER].change = lambda number, data: b"" if number == stop else data
    assert isinstance(set_up(two)[CLIENT], WireError)
    there = (stop - 1) * PIECE
    if there:
        assert only(client_folder(tmp_path), ".part").stat().st_size == there
    two = session()
    assert np.abs(two.errors(MATRIX, 1, WEIGHTS)).max() < 2**36
    assert two.wires[CLIENT].sent[0] == there.to_bytes(8, "little")
    assert sum(two.sent(PROVIDER)) == 32 + SIZE - there
    assert not list(client_folder(tmp_path).glob("*.part"))


def test_a_crash_before_the_last_step_costs_nothing(session: Session, tmp_path: Path) -> None:
    session().set_up((MATRIX, WEIGHTS))
    whole = only(client_folder(tmp_path), ".hint")
    whole.rename(whole.with_suffix(".part"))
    two = session()
    two.set_up((MATRIX, WEIGHTS))
    assert two.sent(PROVIDER) == [32] and whole.exists()


@pytest.mark.parametrize("damage", ["flipped", "longer", "other"])
def test_a_damaged_part_is_dropped(session: Session, tmp_path: Path, damage: str) -> None:
    session().set_up((MATRIX, WEIGHTS))
    whole = only(client_folder(tmp_path), ".hint")
    part, data = whole.with_suffix(".part"), whole.read_bytes()
    whole.unlink()
    part.touch(0o600)
    part.write_bytes({"flipped": b"\0" * 100, "longer": data + b"\0", "other": bytes(SIZE)}[damage])
    assert "start again" in str(set_up(session())[CLIENT])
    assert not part.exists()
    two = session()
    two.set_up((MATRIX, WEIGHTS))
    assert whole.read_bytes() == data


def test_a_damaged_file_is_named(session: Session, tmp_path: Path) -> None:
    session().set_up((MATRIX, WEIGHTS))
    whole, own = only(client_folder(tmp_path), ".hint"), only(provider_folder(tmp_path), ".hint")
    flip(whole, SIZE // 2)
    assert f"{whole} is damaged; remove it" in str(set_up(session())[CLIENT])
    whole.unlink()
    flip(own, 40)
    assert f"{own} is damaged; remove it" in str(set_up(session())[PROVIDER])
    os.truncate(own, SIZE)
    assert f"{own} is damaged; remove it" in str(set_up(session())[PROVIDER])
    os.truncate(provider_folder(tmp_path) / "key", 31)
    with pytest.raises(PoolError, match="key is damaged"):
        session()
