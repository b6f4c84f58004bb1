"""Producers go on, or end in one line, where something else fills Ray's object store."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spu_llm.cluster.connection import joined
from spu_llm.core.errors import PeerError
from spu_llm.offline.files import INBOX
from tests.cluster.machines import machines
from tests.cluster.stub_producers import Stub, arrived, make
from tests.kit.dealing import TRIPLE

STORE_BYTES, BATCH_BYTES, BATCHES = 80 << 20, 4 << 20, 30
PIECE_BYTES = 512 << 10  # of what fills a store, until no batch has room


class Large(Stub):
    """Makes batches that are objects of the store, for their size."""

    batch = replace(TRIPLE, chunk=BATCH_BYTES // 16)  # two words a unit


class Filler:
    """Holds what fills the store of its machine, mapped, so that Ray cannot move it to disk."""

    def fill(self) -> int:
        """Return how many bytes it holds."""
        import ray

        self._held: list[Any] = []
        with suppress(ray.exceptions.RayError):  # full before that
            for _ in range((STORE_BYTES - BATCH_BYTES // 2) // PIECE_BYTES):
                reference = ray.put(np.zeros(PIECE_BYTES, np.uint8))
                self._held.append((reference, ray.get(reference)))
        return sum(array.nbytes for _, array in self._held)


def filled(ray: Any) -> list[Any]:
    """Fill the stores of all machines; they are full for as long as what is returned is held."""
    strategies = ray.util.scheduling_strategies
    fillers = []
    for node in ray.nodes():
        place = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        filler = ray.remote(num_cpus=0)(Filler)
        fillers.append(filler.options(scheduling_strategy=place).remote())
    assert all(held > STORE_BYTES // 2 for held in ray.get([f.fill.remote() for f in fillers]))
    return fillers


def ids(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / INBOX).glob("*/*"))


@pytest.mark.slow
def test_producers_go_on_beside_a_full_store(tmp_path: Path) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        machines(1, object_store_memory=STORE_BYTES) as nodes,
        joined(nodes.address) as ray,
    ):
        patch.setattr("spu_llm.cluster.producing.OTHERS_S", 30.0)
        holding = filled(ray)
        made, heard = make((ray, nodes.address), Large, tmp_path / "peer", (BATCHES,), pairs=1)
        assert holding
    assert made.batches == arrived(tmp_path / "peer") == BATCHES
    assert len(set(ids(tmp_path / "peer"))) == BATCHES
    assert "failed" not in str(heard)


@pytest.mark.slow
def test_a_full_store_on_a_full_disk_ends_in_a_line(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Of the disk that Ray moves objects to: it takes it for full.
        patch.setenv("RAY_local_fs_capacity_threshold", "0.000001")
        with machines(1, object_store_memory=STORE_BYTES) as nodes, joined(nodes.address) as ray:
            holding = filled(ray)
            with pytest.raises(PeerError, match="its machine failed: .*(Full|OutOfDisk)") as told:
                made, _ = make((ray, nodes.address), Large, tmp_path / "peer", (BATCHES,), pairs=1)
                assert made.batches < BATCHES, "the store was not full"
                raise PeerError(f"{made.batches} of {BATCHES} batches came")
            assert holding
    print(told.value)
    assert "\n" not in str(told.value)
    assert len(set(ids(tmp_path / "peer"))) == arrived(tmp_path / "peer")
