"""A cluster of several machines' raylets on this one, whose traffic is all on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spu_llm.cluster import connection

_SMALL = {"object_store_memory": 100 * 1024 * 1024}


@contextmanager
def cluster_of(*cores: int) -> Iterator[Any]:
    """Yield a cluster with a machine for each number of cores, the head first."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": cores[0], "include_dashboard": False, **_SMALL}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    # Its machines speak in the clear here, within this one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_check_closed", lambda *told: None)
        try:
            for count in cores[1:]:
                cluster.add_node(num_cpus=count, **_SMALL)
            yield cluster
        finally:
            cluster.shutdown()


def lose(cluster: Any, machine: Any) -> threading.Thread:
    """Kill a machine, all its processes at once, without waiting until that is done."""
    killing = threading.Thread(
        target=lambda: cluster.remove_node(machine, allow_graceful=False), daemon=True
    )
    killing.start()
    return killing
