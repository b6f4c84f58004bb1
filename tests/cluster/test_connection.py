"""Which clusters are joined, and how a head that is lost is noticed."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from spu_llm.cluster import connection
from spu_llm.cluster.connection import Head, check_tls, joined
from spu_llm.core.errors import InputError, PeerError


def ray_of(*machines: str, lost: tuple[str, ...] = ()) -> Any:
    nodes = [{"NodeManagerAddress": at, "Alive": at not in lost} for at in machines]
    return SimpleNamespace(nodes=lambda: nodes)


def test_machines_that_speak_in_the_clear_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    with pytest.raises(InputError, match="RAY_USE_TLS=1"):
        check_tls(ray_of("10.0.0.1", "10.0.0.2"))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_tls(ray_of("10.0.0.1", "10.0.0.2"))


@pytest.mark.parametrize(
    "ray",
    [ray_of("10.0.0.1", "10.0.0.1"), ray_of("10.0.0.1", "10.0.0.2", lost=("10.0.0.2",))],
    ids=["one machine", "one that is left"],
)
def test_one_machine_speaks_with_itself(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    check_tls(ray)


def test_a_dashboard_is_refused() -> None:
    with pytest.raises(InputError, match="--include-dashboard=false"):
        connection._check_closed(ray_of("10.0.0.1"), "10.0.0.1:6379", "10.0.0.1:8265")


@pytest.mark.parametrize(
    ("address", "words"), [("127.0.0.1:1", "nobody answers"), ("here", "must be HOST:PORT")]
)
def test_what_is_no_cluster_is_refused_at_once(address: str, words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(InputError, match=words), joined(address):
        pass
    assert time.monotonic() < begun + 20


def test_a_head_that_is_gone_for_a_while_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(connection.time, "monotonic", lambda: now[0])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = Head(f"127.0.0.1:{listener.getsockname()[1]}")
        now[0] = 2.0
        head.look()
    now[0] = 4.0
    head.look()  # not yet
    now[0] = 2.0 + connection.LOST_S + 1.5
    with pytest.raises(PeerError, match="does not answer any more"):
        head.look()
