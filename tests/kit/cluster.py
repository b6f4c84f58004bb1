"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spu_llm.cluster.connection import imported

STORE_BYTES = 100 << 20


class Nodes:
    """A head without a core of its own, and nodes with a core each."""

    def __init__(self, cluster: Any, count: int) -> None:
        self._cluster = cluster
        self.nodes = [self.add() for _ in range(count)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)

    def lose(self, node: Any) -> None:
        """End a node as a power cut does."""
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_head(self) -> None:
        """End what keeps the cluster together."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)


@contextmanager
def cluster_of(count: int) -> Iterator[Nodes]:
    """Yield a cluster with that many nodes beside its head."""
    imported()
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_LOG_TO_STDERR", "0")
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield Nodes(cluster, count)
    finally:
        cluster.shutdown()
