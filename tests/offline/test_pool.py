"""The pool: every unit once, matching at both parties, in memory and on disk."""

from __future__ import annotations

import json
import os
import queue
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.core.channel import MemoryChannel
from spu_llm.core.correlation import cut, evaluate
from spu_llm.core.errors import PoolError
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline import files as pool_files
from spu_llm.offline import stock
from spu_llm.offline.pool import Pool
from spu_llm.runtime.party_session import PartySession, SessionOptions
from spu_llm.runtime.spu_runtime import create_memory_link
from tests.kit.dealing import CORRELATIONS, GATE, TRIPLE, Made, dealer, refuses
from tests.offline.parties import RANKS, Parties, batch_folder

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from(CORRELATIONS), st.integers(0, 40)),
        st.tuples(st.just("prepare"), st.sampled_from(CORRELATIONS), st.integers(0, 40)),
        st.tuples(st.just("lease"), st.sampled_from(CORRELATIONS), st.integers(0, 40)),
        st.tuples(st.just("reopen"), st.booleans(), st.booleans()),
        st.tuples(
            st.just("alone"),
            st.sampled_from(RANKS),
            st.sampled_from(CORRELATIONS),
            st.integers(0, 12),
            st.booleans(),
            st.booleans(),
        ),
    ),
    max_size=12,
)


@settings(max_examples=80)
@given(ACTIONS)
def test_units_match_and_come_once(threads: ThreadPoolExecutor, actions: list[Any]) -> None:
    """Whatever the parties prepare and take, and however their sessions end."""
    with tempfile.TemporaryDirectory() as root:
        parties = Parties(threads, Path(root))
        parties.open()
        # What was leased and put back is leased again as a whole.
        leased = dict.fromkeys((c.name for c in CORRELATIONS), 0)
        for kind, *rest in actions:
            before = {c.name: parties.available(c) for c in CORRELATIONS}
            if kind == "take":
                correlation, units = rest
                parties.take(correlation, units)
                missing = max(0, units - before[correlation.name])
                made = -(-missing // correlation.chunk) * correlation.chunk
                assert parties.available(correlation) == before[correlation.name] + made - units
            elif kind == "prepare":
                parties.prepare(*rest)
                assert parties.available(rest[0]) >= rest[1]
            elif kind == "lease":
                correlation, units = rest
                parties.both(lambda r, pool: pool.lease(correlation, units))  # noqa: B023
                assert parties.available(correlation) == before[correlation.name]
                leased[correlation.name] = max(leased[correlation.name], units)
            elif kind == "reopen":
                parties.end(*rest)
                parties.open()
                for c in CORRELATIONS:
                    lost = before[c.name] - parties.available(c)
                    most = leased[c.name] + pool_files.slice_units(c.chunk)
                    assert lost == 0 if all(rest) else 0 <= lost < most
            else:
                rank, correlation, units, *clean = rest
                parties.take_alone(rank, correlation, units)
                parties.end(*clean)
                parties.open()
        parties.end()


def test_what_is_leased_is_taken_without_the_disk(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the end of a batch, and in the middle of a slice; and it is used up on disk before."""
    parties.prepare(TRIPLE, 32)
    parties.take(TRIPLE, 3)
    parties.both(lambda r, pool: pool.lease(TRIPLE, 16))
    ends = [state["used"] for state in states(parties, CLIENT)]
    assert sum(ends) >= 3 + 16
    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "open", "unlink"):
            patch.setattr(os, name, refuses)
        for units in (1, 4, 11):
            parties.take(TRIPLE, units)
    parties.take(TRIPLE, 13)
    parties.end()


def test_what_is_leased_and_not_taken_is_put_back(parties: Parties) -> None:
    parties.prepare(TRIPLE, 16)
    parties.both(lambda r, pool: pool.lease(TRIPLE, 9))
    parties.take(TRIPLE, 2)
    parties.end()
    parties.open()
    assert parties.available(TRIPLE) == 14
    parties.take(TRIPLE, 14)
    parties.end()


@pytest.mark.parametrize("clean", [True, False])
def test_what_was_put_back_over_several_slices_comes_back_whole(
    parties: Parties, clean: bool
) -> None:
    """One unit of it leased: the others must not be forgotten, nor mixed up."""
    parties.prepare(TRIPLE, 16)
    parties.both(lambda r, pool: pool.lease(TRIPLE, 9))
    parties.take(TRIPLE, 2)
    parties.end()
    parties.open()
    parties.take(TRIPLE, 1)
    parties.end(clean, clean)
    parties.open()
    left = parties.available(TRIPLE)
    assert left == 13 if clean else 0 < left <= 7
    for _ in range(left):
        parties.take(TRIPLE, 1)
    parties.end()


def test_fewer_units_than_asked_for_never_leave(parties: Parties) -> None:
    """An operation would hide several words by one mask."""
    parties.prepare(TRIPLE, 16)
    parties.both(lambda r, pool: pool.lease(TRIPLE, 4))
    (batch,) = parties.pools[CLIENT]._batches[TRIPLE.name]
    assert batch.held is not None
    batch.held = cut(batch.held, 1)
    with pytest.raises(PoolError, match="not those on record"):
        parties.pools[CLIENT].take(TRIPLE, 4)
    with pytest.raises(PoolError, match="not those on record"):
        parties.pools[CLIENT].close()
    parties.pools[PROVIDER].close()


def test_what_is_leased_is_lost_with_the_process(parties: Parties) -> None:
    parties.prepare(TRIPLE, 16)
    parties.both(lambda r, pool: pool.lease(TRIPLE, 9))
    parties.end(False, True)
    parties.open()
    assert parties.available(TRIPLE) <= 16 - 9
    parties.take(TRIPLE, parties.available(TRIPLE))
    parties.end()


def states(parties: Parties, rank: int) -> list[dict[str, Any]]:
    directory = parties.directories[rank]
    assert directory is not None
    return [json.loads(path.read_text()) for path in directory.rglob("state.json")]


def test_in_memory(threads: ThreadPoolExecutor) -> None:
    parties = Parties(threads)
    parties.open()
    for correlation in CORRELATIONS:
        assert parties.available(correlation) == 0
        for units in (0, 1, 5, 40, 2):
            client, provider = parties.take(correlation, units)
            masks = [a + b for a, b in zip(client.masks, provider.masks, strict=True)]
            if correlation is not GATE:
                (expected,) = evaluate(correlation, masks)
                np.testing.assert_array_equal(client.results[0] + provider.results[0], expected)
            assert client.masks[0].shape == (units, *correlation.masks[0].shape)
        assert parties.pools[CLIENT].stored_bytes(correlation) == 0
    assert parties.pools[CLIENT].inventory() == b"{}"
    parties.end()
    with pytest.raises(PoolError, match="closed"):
        parties.pools[CLIENT].take(TRIPLE, 0)


def test_what_cannot_be_made_costs_nothing_that_is_there(parties: Parties) -> None:
    parties.prepare(TRIPLE, 16)
    for pool in parties.pools:
        pool._make = refuses
    with pytest.raises(PoolError, match="nothing more is made"):
        parties.take(TRIPLE, 17)
    assert parties.available(TRIPLE) == 16
    parties.take(TRIPLE, 16)
    parties.end()


def test_nothing_serves_before_the_inventories_are_compared(parties: Parties) -> None:
    parties.prepare(TRIPLE, 16)
    parties.end()
    pool = Pool(CLIENT, Prg.from_os(), refuses, session=b"s", directory=parties.directories[CLIENT])
    assert pool.available(TRIPLE) == 0 and len(json.loads(pool.inventory())) == 1
    with pytest.raises(PoolError):
        pool.take(TRIPLE, 1)
    pool.close()
    parties.open()
    assert parties.available(TRIPLE) == 16
    parties.end()


def test_what_only_one_party_has_is_dropped(parties: Parties) -> None:
    """Also from disk: it must not come back when the peer's directory does."""
    parties.prepare(TRIPLE, 16)
    parties.prepare(GATE, 11)
    parties.end()
    shutil.rmtree(batch_folder(parties, PROVIDER))
    kept = batch_folder(parties, CLIENT)
    parties.open()
    assert parties.available(TRIPLE) == 0 and parties.available(GATE) == 11
    assert not kept.exists()
    parties.end()


@pytest.mark.parametrize("rolled_back", RANKS)
def test_an_old_copy_of_one_side_is_burnt(
    parties: Parties, rolled_back: int, tmp_path: Path
) -> None:
    parties.prepare(TRIPLE, 32)
    parties.take(TRIPLE, 1)
    parties.end()
    directory = parties.directories[rolled_back]
    assert directory is not None
    shutil.copytree(directory, tmp_path / "copy")
    parties.open()
    parties.take(TRIPLE, 20)
    parties.end()
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "copy", directory)
    directory.chmod(0o700)
    parties.open()
    assert parties.available(TRIPLE) == 11
    parties.take(TRIPLE, 11)
    parties.end()


def test_a_peer_that_went_back_cannot_bring_units_back(parties: Parties) -> None:
    parties.take(TRIPLE, 5)
    parties.end()
    pool = Pool(CLIENT, Prg.from_os(), refuses, session=b"s", directory=parties.directories[CLIENT])
    pool.resume(json.dumps(dict.fromkeys(json.loads(pool.inventory()), 0)).encode())
    assert pool.available(TRIPLE) == 11
    units = parties.made.units_of(CLIENT, pool.take(TRIPLE, 11))
    assert not set(units) & set(parties.gone)
    pool.close()


def test_what_a_disk_has_no_room_for_ends_with_the_session(parties: Parties) -> None:
    """At one party; the other one's half goes when they meet next. No unit comes twice."""
    batch = parties.pools[PROVIDER].growth_bytes(TRIPLE, 1)
    limit(parties, PROVIDER, 2 * batch)
    parties.prepare(TRIPLE, 64)
    assert parties.pools[PROVIDER].room() < batch  # type: ignore[operator]
    assert [kept(parties, rank) for rank in RANKS] == [4, 2]
    parties.both(lambda rank, pool: pool.lease(TRIPLE, 50))
    parties.take(TRIPLE, 40)
    parties.end()
    parties.open()
    assert parties.available(TRIPLE) == 0  # the two on disk are used up
    assert [kept(parties, rank) for rank in RANKS] == [0, 0]
    limit(parties, CLIENT, batch - 1)
    parties.prepare(TRIPLE, 16)
    parties.take(TRIPLE, 16)
    parties.end(False, True)
    parties.open()
    assert parties.available(TRIPLE) == 0
    parties.end()


@pytest.mark.parametrize(("room", "left"), [(None, 13), (10_000, 13), (100, 10)])
def test_units_that_there_is_no_room_for_are_not_put_back(
    parties: Parties, room: int | None, left: int
) -> None:
    parties.prepare(TRIPLE, 16)
    parties.both(lambda rank, pool: pool.lease(TRIPLE, 6))
    parties.take(TRIPLE, 3)
    parties.pools[PROVIDER].room = lambda: room
    parties.end()
    parties.open()
    assert parties.available(TRIPLE) == left
    parties.take(TRIPLE, left)
    parties.end()


def test_what_is_used_up_leaves_room(parties: Parties) -> None:
    pool, batch = parties.pools[PROVIDER], parties.pools[PROVIDER].growth_bytes(TRIPLE, 1)
    limit(parties, PROVIDER, 2 * batch)
    parties.prepare(TRIPLE, 32)
    parties.take(TRIPLE, 32)
    parties.prepare(TRIPLE, 16)
    assert kept(parties, PROVIDER) == 1 and batch / 2 < pool.room() < 2 * batch  # type: ignore[operator]
    parties.end()


def limit(parties: Parties, rank: int, size: int) -> None:
    """Bound what this party's correlated randomness may take from now on, beside what it does."""
    directory = parties.directories[rank]
    assert directory is not None
    budget = stock.Budget(directory, stock.file_bytes(directory) + size)
    parties.pools[rank].room = lambda: stock.room_in([budget])


def test_files_grow_within_every_budget(tmp_path: Path) -> None:
    """Whoever wrote them: other sessions at the same time, too."""
    inner = tmp_path / "of one"
    inner.mkdir()
    budgets = [stock.Budget(tmp_path, 100), stock.Budget(inner, 30)]
    assert stock.room_in([]) is None and stock.room_in(budgets) == 30
    (tmp_path / "of another").write_bytes(bytes(80))
    assert stock.room_in(budgets) == 20
    (inner / "a").write_bytes(bytes(25))
    assert stock.room_in(budgets) == 0 and stock.room_in(budgets[1:]) == 5


def kept(parties: Parties, rank: int) -> int:
    """Batches in a party's directory."""
    directory = parties.directories[rank]
    assert directory is not None
    return sum(kind.batches for kind in stock.kinds_in(directory))


def test_sessions_resume(tmp_path: Path) -> None:
    """Two party sessions over one link after the other; then one without a directory, and one with
    little disk: what the provider has left of it is told to both.
    """
    made = Made()
    told: list[int | None] = []

    def run(name: str, directories: list[Path | None], limit: int | None = None) -> list[int]:
        ends = MemoryChannel.pair()
        actual: queue.Queue[tuple[int, int]] = queue.Queue()
        budgets = [] if limit is None else [stock.Budget(tmp_path / "provider", limit)]

        def party(rank: int) -> None:
            link = create_memory_link(rank, name)
            session = PartySession(
                link,
                SpuConfig(),
                SessionOptions(
                    pool_dir=directories[rank], budgets=budgets if rank == PROVIDER else ()
                ),
                profile=False,
            )
            session.preprocessing.pool._make = dealer(rank, ends[rank], made)
            actual.put((rank, session.preprocessing.available(TRIPLE)))
            told.append(session.tell(PROVIDER, session.preprocessing.pool.room()))
            session.party.take(TRIPLE, 3)
            session.close()

        running = [threading.Thread(target=party, args=(rank,)) for rank in RANKS]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
        return [count for _, count in sorted(actual.get(timeout=1) for _ in RANKS)]

    both: list[Path | None] = [tmp_path / "client", tmp_path / "provider"]
    assert run("pool 1", both) == [0, 0]
    assert run("pool 2", both) == [13, 13]
    # A peer without a directory, or another one, leaves what belongs to this pair as it is.
    assert run("pool 3", [both[0], None]) == [0, 0]
    assert run("pool 4", [both[0], tmp_path / "other"]) == [0, 0]
    assert run("pool 5", both) == [10, 10]
    assert set(told) == {None}
    used = stock.file_bytes(tmp_path / "provider")
    assert run("pool 6", both, used + 1000) == [7, 7]
    assert run("pool 7", both, 1) == [4, 4]
    assert told[-4:] == [1000, 1000, 0, 0]
