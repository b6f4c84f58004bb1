"""Independent work as tasks of a cluster: its results, its errors, and what is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from spu_llm.cluster import tasks  # noqa: E402
from spu_llm.cluster.connection import joined  # noqa: E402
from spu_llm.core.errors import InputError, PeerError, SpuLlmError  # noqa: E402
from tests.cluster.machines import machines  # noqa: E402


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., list[tuple[int, Any]]]]:
    """Yield what runs calls on a cluster of a machine with two cores and one with one."""
    with machines(1) as nodes:
        nodes.add(num_cpus=2)

        def all_of(calls: list[tasks.Call], alone: bool = False) -> list[tuple[int, Any]]:
            with joined(nodes.address) as ray:
                return list(tasks.as_finished(ray, nodes.address, calls, alone=alone))

        yield all_of


def _squared(x: int) -> tuple[int, dict[str, str]]:
    return x * x, {name: os.environ[name] for name in tasks.threads()}


def _raise(error: Exception) -> None:
    raise error


def _slept(seconds: float) -> tuple[str, float, float]:
    """Return the machine, and when the work began and ended."""
    import ray

    begun = time.time()
    time.sleep(seconds)
    return ray.get_runtime_context().get_node_id(), begun, time.time()


def _meet(folder: Path, count: int, name: str) -> None:
    """Return once `count` are at work at the same time."""
    (folder / name).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is alone")
        time.sleep(0.05)


def _die_once(marker: Path) -> int:
    """End this process, unless the file says that one has been ended."""
    if not marker.exists():
        marker.touch()
        os._exit(3)
    return 7


def test_each_call_gives_its_result_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    actual = run([partial(_squared, x) for x in range(9)])
    threads = {"NPROC": "3", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    assert sorted(actual) == [(x, (x * x, threads)) for x in range(9)]
    assert run([]) == []


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (InputError("--texts must be 4"), InputError, "^--texts must be 4$"),
        (ValueError("odd\nand more"), SpuLlmError, "^ValueError: odd$"),
    ],
)
def test_an_error_of_the_work_ends_it(
    run: Any, error: Exception, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as raised:
        run([partial(_raise, error), *[partial(time.sleep, 0.1)] * 5])
    assert type(raised.value) is kind


def test_work_whose_process_is_lost_is_done_again(run: Any, tmp_path: Path) -> None:
    assert run([partial(_die_once, tmp_path / "marker")]) == [(0, 7)]
    with pytest.raises(PeerError, match="^task 1, 3 times, was lost: "):
        run([partial(os._exit, 3)])


def test_a_machine_has_one_task_that_is_to_be_alone(run: Any) -> None:
    actual = [of for _, of in run([partial(_slept, 0.4)] * 5, alone=True)]
    by_machine: dict[str, list[tuple[float, float]]] = {}
    for machine, begun, ended in sorted(actual, key=lambda of: of[1]):
        by_machine.setdefault(machine, []).append((begun, ended))
    assert len(by_machine) == 2
    for times in by_machine.values():
        assert all(a[1] <= b[0] for a, b in zip(times, times[1:], strict=False))


def test_other_tasks_have_a_core_each(run: Any, tmp_path: Path) -> None:
    assert run([partial(_meet, tmp_path, 3, name) for name in "abc"])


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_work_of_a_lost_machine_is_done_elsewhere(alone: bool) -> None:
    with machines(2) as nodes, joined(nodes.address) as ray:
        calls = [partial(_slept, 2.0)] * 6
        actual = {}
        for number, (machine, _, _) in tasks.as_finished(ray, nodes.address, calls, alone=alone):
            assert number not in actual
            actual[number] = machine
            if len(actual) == 2:
                assert len(set(actual.values())) == 2
                nodes.lose(nodes.nodes[0])
        assert sorted(actual) == list(range(6))


@pytest.mark.slow
def test_a_lost_head_ends_the_work_in_one_line() -> None:
    with machines(1, num_cpus=2) as nodes, joined(nodes.address) as ray:
        with pytest.raises(PeerError, match="the head of the cluster at .* is lost") as raised:
            for _ in tasks.as_finished(
                ray, nodes.address, [partial(_slept, s) for s in (0.1, 30.0)]
            ):
                nodes.lose_head()
        assert "\n" not in str(raised.value)
