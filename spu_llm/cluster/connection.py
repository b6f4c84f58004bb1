"""This process's way into its party's own Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spu_llm.core.errors import InputError, PeerError
from spu_llm.net.address import host_and_port

NAMESPACE = "spu-llm"
_TLS = "RAY_USE_TLS"
_ANSWER_S = 5.0


@contextmanager
def joined(address: str) -> Iterator[Any]:
    """Yield Ray, connected to the cluster whose head is at `address` (HOST:PORT) until the block
    ends. InputError where Ray is not installed, where no cluster answers, or where what passes
    between its machines is open to others.
    """
    ray = imported()
    _check_answers(address)
    try:
        context = ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as exc:
        first = str(exc).strip().splitlines()[:1]
        raise InputError(
            f"--ray {address}: no cluster answers there: {''.join(first)[:200]}; start one with "
            f"`ray start --head --include-dashboard=false`"
        ) from None
    try:
        _check_closed(ray, address, context.dashboard_url)
        yield ray
    finally:
        ray.shutdown()


def imported() -> Any:
    """Return Ray; InputError, which says how to get it, where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise InputError("--ray needs Ray: pip install 'spu-llm[cluster]'") from None
    return ray


def _check_answers(address: str) -> None:
    """Raise InputError where nobody listens at `address`: Ray would try for minutes."""
    try:
        socket.create_connection(host_and_port(address, "--ray"), _ANSWER_S).close()
    except OSError as exc:
        raise InputError(
            f"--ray {address}: nobody answers there ({exc.strerror or exc}); start a cluster with "
            "`ray start --head --include-dashboard=false`, and give the address that it prints"
        ) from None


def _check_closed(ray: Any, address: str, dashboard: str) -> None:
    """Raise InputError for a cluster that others than its party can read or command."""
    if dashboard:
        raise InputError(
            f"--ray {address}: its dashboard at {dashboard} runs what anybody asks it to; start "
            "the head with --include-dashboard=false"
        )
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(nodes) > 1 and os.environ.get(_TLS) != "1":
        raise InputError(
            f"--ray {address}: its machines speak in the clear; start all of them, and this "
            f"command, with {_TLS}=1 and certificates (docs/how-to/cluster.md)"
        )


def lost(exc: BaseException, what: str) -> PeerError:
    """Return, for an error of Ray's, the one that a user reads: `what` was lost, and how."""
    first = str(exc).strip().splitlines()[:1]
    return PeerError(f"{what} was lost: {type(exc).__name__}: {''.join(first)[:200]}")
