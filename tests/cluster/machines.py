"""A cluster of Ray's on this machine, whose nodes stand for a party's machines."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.paths import ROOT
from tests.kit.patience import END_S, eventually
from tests.kit.processes import MARKER, STUB, Process, all_processes

_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
_OBJECTS = {"object_store_memory": 100 * 1024 * 1024}


@dataclass
class Machines:
    """Nodes, which share this machine's address. `nodes`: all but the head, which has no cores."""

    cluster: Any
    mark: str
    nodes: list[Any] = field(default_factory=list)
    headless: bool = False

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, **resources: Any) -> Any:
        """Add a machine with one core."""
        self.nodes.append(self.cluster.add_node(**({"num_cpus": 1} | _OBJECTS | resources)))
        return self.nodes[-1]

    def add_with_cache(self, cache: Path) -> Any:
        """Add a machine that keeps what it has made in a directory of its own."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(cache))
            return self.add()

    def lose(self, node: Any) -> None:
        """Kill a machine's processes without a word."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def lose_head(self) -> None:
        """Kill the process that keeps the cluster together."""
        self.cluster.head_node.kill_gcs_server(check_alive=False)
        self.headless = True

    def processes(self) -> list[Process]:
        """Return all processes of the cluster, and all that they have started."""
        return [p for p in all_processes() if f"{MARKER}={self.mark}" in p.environ]

    def workers(self) -> list[Process]:
        """Return the workers of sessions on these machines."""
        return [p for p in self.processes() if p.is_worker]

    def node_of(self, worker: Process) -> Any:
        """Return the node that a worker runs on."""
        actor = next(p for p in self.processes() if p.pid == worker.parent)
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in self.nodes}
        return raylets[actor.parent]


@contextmanager
def machines(count: int, stub: str | None = None, **resources: Any) -> Iterator[Machines]:
    """Yield so many machines, on which workers do what `stub` says (`tests.kit.stub`). At the end
    nothing of them is left.
    """
    utils = pytest.importorskip("ray.cluster_utils")
    mark = uuid.uuid4().hex
    env = {MARKER: mark, "PYTHONPATH": f"{STUB}:{ROOT}", "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {} if stub is None else {"SPU_LLM_STUB": stub}
    objects = {name: resources.get(name, size) for name, size in _OBJECTS.items()}
    head = {"num_cpus": 0, "include_dashboard": False} | objects
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        made = Machines(utils.Cluster(initialize_head=True, head_node_args=head), mark)
        try:
            for _ in range(count):
                made.add(**resources)
            yield made
        finally:
            made.cluster.shutdown()
            for process in made.processes() if made.headless else ():
                if process.argv.startswith(_AGENTS):  # which wait for the head for minutes
                    process.send(signal.SIGKILL)
            gone = eventually(lambda: not made.processes(), END_S)
            left = [f"{p.pid} {p.argv[:200]!r}" for p in made.processes()]
            for process in made.processes():
                os.kill(process.pid, signal.SIGKILL)
    assert gone, "left running:\n" + "\n".join(left)
