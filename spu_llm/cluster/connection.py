"""This process's way into its party's own Ray cluster."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from spu_llm.core.errors import InputError, PeerError
from spu_llm.net.address import host_and_port

NAMESPACE = "spu-llm"
_TLS = "RAY_USE_TLS"
# How long Ray waits for a head that is gone before it ends the process: this program outlives it,
# and `Head` says so.
_PATIENCE, _PATIENCE_S = "RAY_gcs_rpc_server_reconnect_timeout_s", "86400"
_ANSWER_S = 5.0
LOST_S = 5.0  # without an answer of the head
_LOOK_S = 1.0
_KILL_S = 2.0
_ACTION_BYTES = 512  # more than a sigaction has


@contextmanager
def joined(address: str) -> Iterator[Any]:
    """Yield Ray, connected to the cluster whose head is at `address` (HOST:PORT) until the block
    ends. InputError where Ray is not installed, where no cluster answers, or where what passes
    between its machines is open to others.
    """
    ray = imported()
    _check_answers(address)
    terminate = _Terminate()
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
    terminate.restore()
    _silence(ray)
    try:
        _check_closed(ray, address, context.dashboard_url)
        yield ray
    finally:
        ray.shutdown()
        terminate.restore()


class _Terminate:
    """Action of this program by SIGTERM, which Ray takes, and leaves to the system's default: its
    compiled part does so on any thread, below what Python knows of.
    """

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)
        self._action = ctypes.create_string_buffer(_ACTION_BYTES)
        self._libc = ctypes.CDLL(None)
        self._libc.sigaction(signal.SIGTERM, None, self._action)

    def restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)
        self._libc.sigaction(signal.SIGTERM, self._action, None)


def _silence(ray: Any) -> None:
    """End the thread that prints what Ray says of lost processes, which this program tells by
    itself: once the head is lost, that thread takes a whole core.
    """
    with suppress(AttributeError):  # a version of Ray that has no such thread
        driver = ray._private.worker.global_worker
        driver.threads_stopped.set()
        driver.gcs_error_subscriber.close()


def imported() -> Any:
    """Return Ray; InputError, which says how to get it, where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(_PATIENCE, _PATIENCE_S)
    try:
        import ray
    except ImportError:
        raise InputError(
            "--ray needs Ray: install the wheel's extra `cluster` (docs/how-to/cluster.md)"
        ) from None
    return ray


class Head:
    """The head of a cluster, as this process sees whether it is there."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._answered = self._looked = time.monotonic()

    def look(self) -> None:
        """Raise PeerError when the head has not answered for `LOST_S`; to be called often."""
        now = time.monotonic()
        if now < self._looked + _LOOK_S:
            return
        self._looked = now
        try:
            knock(self._address, _LOOK_S)
            self._answered = now
        except OSError:
            if now > self._answered + LOST_S:
                raise PeerError(
                    f"the head of the cluster at {self._address} does not answer any more; start "
                    "it again, and what was not done is done then"
                ) from None


def knock(address: str, timeout_s: float = _ANSWER_S) -> None:
    """Raise OSError where nobody listens at the address of a head, InputError where it is none."""
    socket.create_connection(host_and_port(address, "--ray"), timeout_s).close()


def _check_answers(address: str) -> None:
    """Raise InputError where nobody listens at `address`: Ray would try for minutes."""
    try:
        knock(address)
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
    check_tls(ray)


def check_tls(ray: Any) -> None:
    """Raise InputError for a cluster whose machines speak in the clear with each other."""
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(nodes) > 1 and os.environ.get(_TLS) != "1":
        raise InputError(
            "--ray: the machines of the cluster speak in the clear; start all of them, and this "
            f"command, with {_TLS}=1 and certificates (docs/how-to/cluster.md)"
        )


def kill(ray: Any, actor: Any) -> None:
    """End an actor, on a thread: without the cluster's head, Ray would wait for it."""

    def end() -> None:
        with suppress(Exception):
            ray.kill(actor)

    ending = threading.Thread(target=end, name="kill", daemon=True)
    ending.start()
    ending.join(_KILL_S)


def lost(exc: BaseException, what: str) -> PeerError:
    """Return, for an error of Ray's, the one that a user reads: `what` was lost, and how."""
    return PeerError(f"{what} was lost: {line_of(exc)}")


def line_of(exc: BaseException) -> str:
    """Return an error of Ray's, or one that it passes on, as one line."""
    first = str(exc).strip().splitlines()[:1]
    return f"{type(exc).__name__}: {''.join(first)[:300]}"
