"""A model's weights on a machine of the cluster, and who has no room for them."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.hf import load_model
from models.resident import digest, place
from spu_llm.cluster.holders import Holders
from spu_llm.cluster.shared_hints import SharedHints, folder_here, keep_key
from spu_llm.cluster.weights import HeldWeights, Holder, ServedWeights, opened
from spu_llm.core.errors import InputError, WorkerError
from spu_llm.service.provider import ServeOptions
from tests.kit.pair import Pair


def served(directory: Path) -> ServedWeights:
    config, params = load_model(directory)
    weights = place(params, config)
    try:
        return ServedWeights(directory, None, digest(weights), os.fstat(weights).st_size, place)
    finally:
        os.close(weights)


def test_held_weights_are_opened_to_read_alone(pair: Pair) -> None:
    of = served(pair.private)
    held = Holder().hold(of)
    descriptor = opened(held)
    try:
        assert digest(descriptor) == of.digest and held.nbytes == of.nbytes
        with pytest.raises(OSError):
            os.write(descriptor, b"x")
        with pytest.raises((OSError, ValueError)):
            mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
        os.close(held.descriptor)


def test_a_machine_with_other_weights_is_refused(pair: Pair, tmp_path: Path) -> None:
    of = served(pair.private)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InputError, match="other weights than at the front door"):
        Holder().hold(replace(of, directory=pair.public))
    with pytest.raises(InputError, match=f"there is no {tmp_path / 'none'}"):
        Holder().hold(replace(of, directory=tmp_path / "none"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_weights_that_are_not_sealed_are_refused() -> None:
    descriptor = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    held = HeldWeights(os.getpid(), descriptor, 4)
    try:
        os.write(descriptor, b"half")
        with pytest.raises(WorkerError, match="not sealed"):
            opened(held)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        os.close(opened(held))
        with pytest.raises(WorkerError, match="not whole"):
            opened(replace(held, nbytes=5))
    finally:
        os.close(descriptor)
    with pytest.raises(WorkerError, match="cannot be opened"):
        opened(held)


def test_an_ordinary_file_is_no_weights(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"half")
    with (tmp_path / "file").open("rb") as file:
        with pytest.raises(WorkerError, match="not sealed"):
            opened(HeldWeights(os.getpid(), file.fileno(), 4))


def test_all_machines_make_hints_from_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    one = SharedHints.of(tmp_path / "own" / "version")
    for machine in ("a", "b"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        folder = folder_here(one.folder)
        folder.mkdir(parents=True, mode=0o700)
        keep_key(folder, one.key)
        keys.append((folder / "key").read_bytes())
    assert keys[0] == keys[1] == one.key == SharedHints.of(tmp_path / "own" / "version").key
    other = SharedHints.of(tmp_path / "other" / "version")
    assert other.folder != one.folder and one.key.hex() not in repr(one)


class FakeActors:
    """A cluster whose machines answer as told: `room` by node, `loads` what a holder answers."""

    def __init__(self, room: dict[str, bool], loads: list[Any]) -> None:
        self.room, self.loads, self.started, self.killed = room, loads, 0, 0

    def machines(self) -> dict[str, str]:
        return {node: f"machine-{node}" for node in self.room}

    def holder(self, node: str, nbytes: int) -> Any:
        self.started += 1
        there: list[Any] = [None if self.room[node] else TimeoutError()]
        call = SimpleNamespace(remote=lambda *args: there[0])
        load = SimpleNamespace(remote=lambda *args: self.loads.pop(0) if self.room[node] else None)
        return SimpleNamespace(place=call, hold=load)

    def answer(self, call: Any, timeout_s: float) -> Any:
        if isinstance(call, Exception):
            raise call
        return call

    def kill(self, actor: Any) -> None:
        self.killed += 1


def holders(pair: Pair, actors: FakeActors, tmp_path: Path) -> tuple[Holders, Any]:
    config, params = load_model(pair.private)
    weights = place(params, config)
    one = SimpleNamespace(directory=pair.private, weights=weights, hints=tmp_path / "h" / "v")
    actual: Any = actors
    return Holders(actual, ServeOptions.rehearsal(pair.private)), SimpleNamespace(all=[one])


def test_a_machine_without_memory_is_left_out(pair: Pair, tmp_path: Path) -> None:
    held = HeldWeights(1, 2, 3)
    actors = FakeActors({"small": False, "large": True}, [held])
    made, models = holders(pair, actors, tmp_path)
    assert made.open(models) == ["machine-large"]
    model = models.all[0].weights
    assert made.without_room(model) == ["small"] and actors.killed == 1
    assert made.held("large", "machine-large", model) == held and actors.started == 2
    os.close(model)


def test_a_cluster_without_room_is_refused(pair: Pair, tmp_path: Path) -> None:
    made, models = holders(pair, FakeActors({"small": False}, []), tmp_path)
    with pytest.raises(InputError, match="no machine of the cluster has a core and the memory"):
        made.open(models)
    os.close(models.all[0].weights)


def test_a_machine_with_another_model_is_named(pair: Pair, tmp_path: Path) -> None:
    wrong = InputError("there is no /model; copy the model there")
    made, models = holders(pair, FakeActors({"a": True}, [wrong]), tmp_path)
    with pytest.raises(InputError, match="^machine machine-a of the cluster: there is no /model"):
        made.open(models)
    os.close(models.all[0].weights)


def test_a_lost_holder_is_started_again_once(pair: Pair, tmp_path: Path) -> None:
    lost, held = WorkerError("lost"), HeldWeights(1, 2, 3)
    made, models = holders(pair, FakeActors({"a": True}, [lost, held]), tmp_path)
    assert made.open(models) == ["machine-a"]
    os.close(models.all[0].weights)
    made, models = holders(pair, FakeActors({"a": True}, [lost, lost]), tmp_path)
    with pytest.raises(WorkerError, match="machine-a of the cluster does not keep the model"):
        made.open(models)
    os.close(models.all[0].weights)
