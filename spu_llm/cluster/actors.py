"""The actors that a front door starts, as Ray knows them, and how long it waits for each.

No call waits for Ray longer than it is told to. Actors die with this process, and none is started
again by Ray.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from spu_llm.cluster.connection import check_tls, kill
from spu_llm.cluster.door import Door
from spu_llm.cluster.hosting import Host
from spu_llm.cluster.weights import Holder
from spu_llm.core.errors import BusyError, SpuLlmError, WorkerError

NO_ROOM = "no machine of the provider has room for a session; try again later"
_HEAD_S = 5.0  # for the head of the cluster to say which machines there are
SESSION_BYTES = 1 << 30  # of memory that Ray keeps free for a session, beside the weights


class Actors:
    """Starts actors in the cluster that `ray` has joined."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._host = ray.remote(num_cpus=1, max_restarts=0, memory=SESSION_BYTES)(_Host)
        self._door = ray.remote(num_cpus=0, max_restarts=0)(_Door)
        self._holder = ray.remote(num_cpus=0, max_restarts=0)(_Holder)

    def check_closed(self) -> None:
        """Raise InputError where machines have joined the cluster that speak in the clear,
        BusyError when the head, which knows, does not answer.
        """
        outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def look() -> None:
            try:
                check_tls(self._ray)
                outcome.put(None)
            except Exception as exc:
                outcome.put(exc)

        # Without the head, Ray would wait for it.
        threading.Thread(target=look, name="check-closed", daemon=True).start()
        try:
            error = outcome.get(timeout=_HEAD_S)
        except queue.Empty:
            raise BusyError(NO_ROOM) from None
        if error is not None:
            raise error

    def machines(self) -> dict[str, str]:
        """Return the addresses of the machines that may run sessions, by the ids of their nodes."""
        return {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
        }

    def own_place(self) -> tuple[str, str]:
        """Return the id of the node that this process belongs to, and the node's address."""
        return self._ray.get_runtime_context().get_node_id(), self._ray.util.get_node_ip_address()

    def door(self, node: str) -> Any:
        """Start a door on a node."""
        from ray.util import scheduling_strategies as strategies

        strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return self._door.options(scheduling_strategy=strategy).remote()

    def host(self, without: Sequence[str], node: str | None = None) -> Any:
        """Start an actor for a session, which takes a core, on a node, or else on any that has room
        but none of the nodes `without`; it waits for room.
        """
        from ray.util import scheduling_strategies as strategies

        strategy: Any = "DEFAULT"
        if node is not None:
            strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        elif without:
            strategy = strategies.NodeLabelSchedulingStrategy(
                hard={"ray.io/node-id": strategies.NotIn(*without)}
            )
        return self._host.options(scheduling_strategy=strategy).remote()

    def holder(self, node: str, nbytes: int) -> Any:
        """Start a holder of weights of that size on a node; it waits for memory there."""
        from ray.util import scheduling_strategies as strategies

        strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return self._holder.options(scheduling_strategy=strategy, memory=nbytes).remote()

    def answer(self, call: Any, timeout_s: float) -> Any:
        """Return a call's answer. TimeoutError when it takes longer, WorkerError when the actor is
        lost, the error of ours that it raised.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(call, timeout=max(0.0, timeout_s))
        except errors.GetTimeoutError:
            raise TimeoutError from None
        except errors.RayTaskError as exc:
            if isinstance(exc.cause, SpuLlmError):
                raise exc.cause from None
            raise WorkerError(f"a machine of the cluster failed: {exc.cause!r}") from None
        except errors.RayError as exc:
            first = str(exc).strip().splitlines()[:1]
            raise WorkerError(f"a machine of the cluster was lost: {''.join(first)[:200]}") from exc

    def kill(self, actor: Any) -> None:
        """End an actor, or its waiting for room."""
        kill(self._ray, actor)


class _Placed:
    """Actor that says where it is."""

    def place(self) -> tuple[str, str]:
        """Return the id of the node that it is on, and the node's address."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


class _Host(_Placed, Host):
    pass


class _Door(Door):
    pass


class _Holder(_Placed, Holder):
    pass
