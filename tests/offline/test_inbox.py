"""The inbox of a pool: batches made outside the session that has it."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.errors import PoolError
from spu_llm.core.values import CLIENT
from spu_llm.offline import inbox, stock
from spu_llm.offline.files import INBOX
from spu_llm.offline.inbox import Parcel
from spu_llm.offline.opener_files import RESULTS
from tests.kit.dealing import TRIPLE
from tests.offline.inboxes import folder, put
from tests.offline.parties import RANKS, Parties

UNITS = TRIPLE.chunk


def waiting(parties: Parties, rank: int) -> list[Path]:
    return sorted((folder(parties, rank) / INBOX).glob("*/*"))


def again(parties: Parties) -> None:
    parties.end()
    parties.open()


def test_what_both_have_serves_the_next_session(parties: Parties) -> None:
    put(parties, *RANKS)
    assert parties.available(TRIPLE) == 0
    again(parties)
    assert parties.available(TRIPLE) == UNITS
    parties.take(TRIPLE, 5)
    assert not any(waiting(parties, rank) for rank in RANKS)
    again(parties)
    parties.take(TRIPLE, UNITS - 5)
    again(parties)
    assert parties.available(TRIPLE) == 0
    parties.end()


@pytest.mark.parametrize("first", RANKS)
def test_a_half_waits_for_the_other(parties: Parties, first: int, tmp_path: Path) -> None:
    put(parties, *RANKS)
    late = folder(parties, 1 - first) / INBOX
    shutil.move(late, tmp_path / "late")
    again(parties)
    assert parties.available(TRIPLE) == 0 and len(waiting(parties, first)) == 1
    shutil.move(tmp_path / "late", late)
    again(parties)
    assert parties.available(TRIPLE) == UNITS
    parties.take(TRIPLE, UNITS)
    parties.end()


def test_a_half_whose_other_never_comes_goes(parties: Parties) -> None:
    put(parties, CLIENT)
    again(parties)
    (path,) = waiting(parties, CLIENT)
    long_ago = time.time() - inbox.PATIENCE_S - 1
    os.utime(path, (long_ago, long_ago))
    again(parties)
    assert not waiting(parties, CLIENT) and parties.available(TRIPLE) == 0
    parties.end()


def test_an_old_batch_that_both_have_serves(parties: Parties) -> None:
    put(parties, *RANKS)
    for rank in RANKS:
        os.utime(waiting(parties, rank)[0], (0, 0))
    again(parties)
    assert parties.available(TRIPLE) == UNITS
    parties.end()


def test_a_copy_that_a_power_cut_left_is_removed(parties: Parties, tmp_path: Path) -> None:
    put(parties, *RANKS)
    for rank in RANKS:
        shutil.copytree(folder(parties, rank) / INBOX, tmp_path / f"copy {rank}")
    again(parties)
    for rank in RANKS:
        shutil.copytree(
            tmp_path / f"copy {rank}", folder(parties, rank) / INBOX, dirs_exist_ok=True
        )
    again(parties)
    assert parties.available(TRIPLE) == UNITS
    assert not any(waiting(parties, rank) for rank in RANKS)
    parties.end()


def test_halves_of_a_crash_go_in_time(parties: Parties) -> None:
    put(parties, CLIENT)
    (path,) = waiting(parties, CLIENT)
    half = path.rename(path.with_name(f".{path.name}.made"))
    again(parties)
    assert half.exists()
    os.utime(half, (0, 0))
    again(parties)
    assert not half.exists()
    parties.end()


def test_a_used_batch_is_refused(parties: Parties) -> None:
    parties.prepare(TRIPLE, UNITS)
    parties.take(TRIPLE, 1)
    parties.end()
    own = folder(parties, CLIENT)
    (path,) = (p for p in own.glob("*/*") if p.parent.name != INBOX)
    (own / INBOX).mkdir(0o700)
    shutil.move(path.parent, own / INBOX / path.parent.name)
    with pytest.raises(PoolError, match="used, and no session has taken it in"):
        parties.open()


def test_it_counts_as_stock(parties: Parties) -> None:
    put(parties, CLIENT)
    (kind,) = stock.kinds_in(folder(parties, CLIENT))
    assert (kind.name, kind.batches, kind.units) == (TRIPLE.name, 1, UNITS)
    parties.end()


def test_only_as_many_as_can_be_compared(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        put(parties, *RANKS, session=b"%d" % number)
    monkeypatch.setattr("spu_llm.offline.pool.MAX_BATCHES", 2)
    parties.end()
    parties.open()
    assert parties.available(TRIPLE) == 2 * UNITS
    assert [len(waiting(parties, rank)) for rank in RANKS] == [1, 1]
    parties.end()


def test_parcels_are_whole_and_come_once(parties: Parties, tmp_path: Path) -> None:
    put(parties, *RANKS)
    for rank in RANKS:
        away = tmp_path / f"away {rank}"
        folder(parties, rank).joinpath(INBOX).rename(away)
        other = tmp_path / f"other {rank}"
        other.mkdir(0o700)
        away.rename(other / INBOX)
        handed = inbox.hand_over(other)
        parcel = next(handed)
        assert not list((other / INBOX).glob("*/*"))
        assert next(handed, None) is None
        inbox.deliver(folder(parties, rank), parcel)
        with pytest.raises(PoolError):
            inbox.deliver(folder(parties, rank), parcel)
    again(parties)
    parties.take(TRIPLE, UNITS)
    parties.end()


def parcel_of(parties: Parties) -> Parcel:
    put(parties, CLIENT)
    (parcel,) = inbox.hand_over(folder(parties, CLIENT))
    return parcel


def test_a_used_parcel_is_refused(parties: Parties) -> None:
    parties.prepare(TRIPLE, UNITS)
    parties.take(TRIPLE, 1)
    parties.end()
    own = folder(parties, CLIENT)
    (path,) = (p for p in own.glob("*/*") if p.parent.name != INBOX)
    files = {name: (path / name).read_bytes() for name in (*inbox._FILES, RESULTS)}
    with pytest.raises(PoolError, match="is used already"):
        inbox.deliver(own, Parcel(path.parent.name, path.name, files))
    assert not list((own / INBOX).glob("*/*"))


@pytest.mark.parametrize("name", ["results.npy", "state.json"])
def test_a_link_is_not_handed_over(parties: Parties, tmp_path: Path, name: str) -> None:
    """Whoever makes batches may write in the folder, and not read what a link leads to."""
    put(parties, CLIENT)
    (path,) = waiting(parties, CLIENT)
    secret = (path / name).rename(tmp_path / "secret")
    (path / name).symlink_to(secret)
    with pytest.raises(PoolError, match="symbolic link"):
        next(inbox.hand_over(folder(parties, CLIENT)))
    parties.end()


@pytest.mark.parametrize("name", ["meta.json", "state.json"])
def test_a_damaged_parcel_is_refused(parties: Parties, name: str) -> None:
    parcel = parcel_of(parties)
    data = bytearray(parcel.files[name])
    data[len(data) // 2] ^= 1
    with pytest.raises(PoolError):
        inbox.deliver(
            folder(parties, CLIENT), replace(parcel, files=parcel.files | {name: bytes(data)})
        )
    assert not waiting(parties, CLIENT)
    parties.end()


@given(
    kind=st.sampled_from(["..", ".", "", "a/b", "/etc", "kind"]),
    id=st.sampled_from(["..", "", "0" * 31, "A" * 32, "0" * 32 + "/", "0" * 32]),
    files=st.dictionaries(
        st.sampled_from(["meta.json", "state.json", "results.npy", "../x", "rest.npy"]),
        st.binary(max_size=20),
    ),
)
def test_odd_parcels_leave_nothing(
    tmp_path_factory: pytest.TempPathFactory, kind: str, id: str, files: dict[str, bytes]
) -> None:
    home = tmp_path_factory.mktemp("home")
    own = home / "own"
    own.mkdir(0o700)
    with pytest.raises(PoolError):
        inbox.deliver(own, Parcel(kind, id, files))
    assert not [path for path in home.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["..", ".", "", "kind", "inbox"])
def test_a_parcel_stays_in_the_inbox(parties: Parties, kind: str) -> None:
    parcel = parcel_of(parties)
    with pytest.raises(PoolError, match="is no batch"):
        inbox.deliver(folder(parties, CLIENT), replace(parcel, kind=kind))
    inbox.deliver(folder(parties, CLIENT), parcel)
    parties.end()


def test_what_comes_in_the_midst_is_taken_in(parties: Parties) -> None:
    parties.take(TRIPLE, 3)
    put(parties, *RANKS)
    put(parties, CLIENT, session=b"half")
    arrived = [pool.arrived() for pool in parties.pools]
    for rank in RANKS:
        parties.pools[rank].take_in(arrived[1 - rank])
    assert parties.available(TRIPLE) == 2 * UNITS - 3
    assert [len(waiting(parties, rank)) for rank in RANKS] == [1, 0]
    parties.take(TRIPLE, 2 * UNITS - 3)
    again(parties)
    assert parties.available(TRIPLE) == 0
    parties.end()
