"""Independent pieces of work, run as tasks on the machines of a party's own cluster.

A task is lost with its machine or its process, and is run again elsewhere: whatever runs here gives
the same result each time, and leaves nothing behind. An error that the work raises is no loss: it
ends all of them.

XLA and BLAS divide sums among their threads, so that the last bits of a result depend on the number
of threads. A task has as many as the process that asks for it, on whatever machine it runs.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spu_llm.cluster.connection import knock, line_of, lost
from spu_llm.core.errors import InputError, PeerError, SpuLlmError
from spu_llm.core.jax_settings import settle

TRIES = 3  # of a task whose machine or process is lost
_LOOK_S = 1.0
_THREADS = ("NPROC", "OMP_NUM_THREADS")  # what XLA and what BLAS go by

Call = Callable[[], Any]


@dataclass(frozen=True)
class _Failed:
    """An error of the work: its class, and one line."""

    kind: type[SpuLlmError]
    words: str


def as_finished(
    ray: Any, address: str, calls: Sequence[Call], *, alone: bool = False
) -> Iterator[tuple[int, Any]]:
    """Run `calls` as tasks, in their order, as many at once as the cluster has cores; yield the
    number and the result of each as it finishes. alone: each has all cores of a machine. The error
    of a call is raised as SpuLlmError of its own class. PeerError when the head of the cluster is
    lost, or the same call `TRIES` times; whatever was yielded before is complete.
    """
    waiting, running = deque(range(len(calls))), dict[Any, tuple[int, str]]()
    lost_times: Counter[int] = Counter()
    task = ray.remote(max_retries=0, runtime_env={"env_vars": threads()})(_called)
    try:
        while waiting or running:
            _check_head(address)  # whatever is asked of Ray without it waits for it
            for place in _free(ray, running, alone)[: len(waiting)] if waiting else []:
                number = waiting.popleft()
                running[_placed(ray, task, place).remote(calls[number])] = number, place
            done, _ = ray.wait(list(running), timeout=_LOOK_S) if running else ([], [])
            for reference in done:
                number, _ = running.pop(reference)
                try:
                    outcome = ray.get(reference)
                except ray.exceptions.RayTaskError as exc:
                    raise SpuLlmError(f"task {number + 1}: {line_of(exc.cause)}") from None
                except ray.exceptions.RayError as exc:
                    lost_times[number] += 1
                    if lost_times[number] == TRIES:
                        raise lost(exc, f"task {number + 1}, {TRIES} times,") from None
                    waiting.appendleft(number)
                    continue
                if isinstance(outcome, _Failed):
                    raise outcome.kind(outcome.words)
                yield number, outcome
    finally:
        for reference in running:
            with suppress(Exception):  # nothing more is wanted of it, and its machine may be gone
                ray.cancel(reference, force=True)


def threads() -> dict[str, str]:
    """Return the settings that give another process as many threads as this one has."""
    cores = str(len(os.sched_getaffinity(0)))
    return {name: os.environ.get(name, cores) for name in _THREADS}


def _called(call: Call) -> Any:
    """Run the work in a worker of the cluster."""
    settle()
    try:
        return call()
    except SpuLlmError as exc:
        return _Failed(type(exc), str(exc))
    except Exception as exc:
        return _Failed(SpuLlmError, line_of(exc))


def _free(ray: Any, running: dict[Any, tuple[int, str]], alone: bool) -> list[str]:
    """Return a place for each task that may begin: the identity of a machine for it alone, or ""
    for a core of any.
    """
    machines = {
        node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]
    }
    if not any(machines.values()):
        raise InputError("--ray: the cluster has no cores; start its machines with --num-cpus")
    if alone:
        taken = {place for _, place in running.values()}
        return [node for node, cores in machines.items() if cores and node not in taken]
    return [""] * (int(sum(machines.values())) - len(running))


def _placed(ray: Any, task: Any, place: str) -> Any:
    """Return the task for its place. A machine's own cores are all that it can be asked for."""
    of_place = [n["Resources"].get("CPU", 0) for n in ray.nodes() if n["NodeID"] == place]
    if not any(of_place):  # none was asked for, or it has just gone: then any other does
        return task.options(num_cpus=1)
    (cores,) = of_place
    strategies = ray.util.scheduling_strategies
    return task.options(
        num_cpus=cores,
        scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(place, soft=False),
    )


def _check_head(address: str) -> None:
    """Raise PeerError where the head has gone: Ray would wait for it, then end this process."""
    try:
        knock(address)
    except OSError as exc:
        raise PeerError(
            f"the head of the cluster at {address} is lost ({exc.strerror or exc}); what is "
            "finished is kept"
        ) from None
