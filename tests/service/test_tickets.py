"""A place with a provider: given for a ticket, which is good once, for a while, for one party."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

import pytest

from models.tokenizer import Tokenizer
from spu_llm.core.errors import BusyError, ManifestMismatch, PeerError
from spu_llm.core.settings import SpuConfig
from spu_llm.net import tls
from spu_llm.net.control import Control
from spu_llm.net.control_plane import ask_to_open
from spu_llm.net.identity import Certificate
from spu_llm.net.manifest import agree, with_nonce
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import NETWORKS
from spu_llm.service import admission, agreeing
from spu_llm.service.admission import AdmissionControl
from spu_llm.service.client import Server, connected
from spu_llm.service.limits import Quota, Quotas
from spu_llm.service.provider import ServeOptions, _Sessions
from spu_llm.service.served_models import ServedModel, ServedModels
from spu_llm.service.task import Task
from spu_llm.systems.decoding.records import COMPLETION
from spu_llm.systems.decoding.request import Request
from tests.kit.models import PRIVATE
from tests.kit.pair import Pair
from tests.kit.patience import END_S, eventually
from tests.kit.processes import Start
from tests.kit.tap import Tap

TASK = Task("provider", "completion", {}, {}, 1)
ONE, OTHER = (Certificate(f * 64, f, datetime.now(timezone.utc)) for f in "ab")


def of_one(sessions: int) -> Quotas:
    """Return quotas that give each certificate so many sessions."""
    return Quotas(Quota(sessions=sessions))


def test_a_ticket_is_good_once() -> None:
    held = AdmissionControl(2, of_one(2))
    ticket = held.admit(TASK, ONE)
    with pytest.raises(PeerError, match="not known"):
        held.enter(bytes(32), ONE)
    session = held.enter(ticket, ONE)
    assert session.task is TASK and session.client == ONE
    with pytest.raises(PeerError, match="not known, was used"):
        held.enter(ticket, ONE)


def test_a_ticket_is_for_one_certificate() -> None:
    held = AdmissionControl(2, of_one(2))
    ticket = held.admit(TASK, ONE)
    with pytest.raises(PeerError, match="given to another certificate"):
        held.enter(ticket, OTHER)
    with pytest.raises(PeerError, match="not known"):
        held.enter(ticket, ONE)
    assert not held.taken


def test_a_ticket_expires_and_its_place_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    held = AdmissionControl(1, of_one(1))
    late = held.admit(TASK, None)
    with pytest.raises(BusyError, match="busy with 1 sessions"):
        held.admit(TASK, None)
    now = admission.time.monotonic()
    monkeypatch.setattr(admission.time, "monotonic", lambda: now + admission.TICKET_S + 1)
    assert not held.taken
    held.admit(TASK, None)
    with pytest.raises(PeerError, match="has expired"):
        held.enter(late, None)


def test_so_many_sessions_and_so_many_of_one_certificate() -> None:
    held = AdmissionControl(3, of_one(2))
    first = held.enter(held.admit(TASK, ONE), ONE)
    held.admit(TASK, ONE)
    with pytest.raises(BusyError, match="this certificate has 2 sessions"):
        held.admit(TASK, ONE)
    held.admit(TASK, OTHER)
    with pytest.raises(BusyError, match="busy with 3"):
        held.admit(TASK, OTHER)
    held.leave(first)
    held.admit(TASK, ONE)


def test_after_the_one_session_no_other_is_admitted(pair: Pair) -> None:
    """Also in the moment before the port is closed, when its place is free again."""
    options = ServeOptions.rehearsal(pair.private)
    tokenizer = Tokenizer.load(pair.private)
    stated = agreeing.of_provider(PRIVATE, tokenizer, "local", 1)
    request = agreeing.of_client(COMPLETION, Request(5, 5, 1, 0.7), tokenizer, "local", 1)
    models = ServedModels([ServedModel("", pair.private, 0, Path("hints"), stated)])
    with _Sessions(options, models, lambda line: None, lambda event: None) as sessions:
        _, ticket = sessions._admit(with_nonce(request), None)
        sessions._places.leave(sessions._places.enter(ticket, None))
        sessions._end_once(None)
        with pytest.raises(BusyError, match="no more sessions"):
            sessions._admit(with_nonce(request), None)


@pytest.fixture
def shown(pair: Pair) -> Callable[[int, bytes], Control]:
    """Shows a ticket to the provider on a port, as a client does."""

    def show(port: int, ticket: bytes) -> Control:
        stream, _ = connected(Server("127.0.0.1", port, "local"), tls.DATA)
        control = Control(Relay(stream, NETWORKS["local"], "client"))
        control.show_ticket(ticket)
        return control

    return show


def test_a_ticket_used_again_is_refused_also_after_a_restart(
    start: Start, pair: Pair, shown: Callable[[int, bytes], Control]
) -> None:
    server = start(*pair.serve(), stub="client:decoding:holds")
    port = server.until_listening()
    stated = agreeing.of_client(
        COMPLETION, Request(5, 5, 1, 0.7), Tokenizer.load(pair.public), "local", 1
    )
    stream, _ = connected(Server("127.0.0.1", port, "local"), tls.CONTROL)
    _, ticket = ask_to_open(stream, with_nonce(stated), END_S)

    def assert_refused(port: int, shown_again: bytes) -> None:
        with closing(shown(port, shown_again)) as control:
            assert control.ended.wait(END_S)
            with pytest.raises(PeerError, match="the ticket is not known, was used"):
                control.check()

    assert_refused(port, bytes(32))
    with closing(shown(port, ticket)) as session:
        # The provider hears its connections side by side: this one has to be in first.
        assert eventually(lambda: any(p.is_worker for p in server.processes()), END_S)
        assert_refused(port, ticket)
        assert not session.ended.is_set()  # the one that it was for goes on
    server.until("stderr", "session failed: connection to the peer was lost")
    again = start(*pair.serve(), stub="")
    assert_refused(again.until_listening(), ticket)


@pytest.mark.slow
def test_a_session_played_back_is_refused(start: Start, pair: Pair) -> None:
    """Every byte that a client has sent, to the provider that it was for, in the clear. What it has
    called earns another ticket, for another session: with another nonce of the provider's.
    """
    server = start(*pair.serve(), stub="client:decoding:holds")
    port = server.until_listening()
    with Tap(port) as tap:
        client = start(*pair.generate(tap.port), stub="client:decoding:holds")
        client.until_phase("decoding")
        client.send(signal.SIGINT)
        client.wait(END_S)
        calls, data = (bytes(seen["client"]) for seen in (tap.calls, tap.wire))
    assert b"ticket" in data
    # A connection a call, each with its preface.
    begins = [m.start() for m in re.finditer(rb"PRI \* HTTP/2\.0", calls)]
    assert begins
    connections = [calls[i:j] for i, j in zip(begins, [*begins[1:], len(calls)], strict=True)]
    *called, last = (_answer(port, replayed) for replayed in (*connections, data))
    answers = [b"".join(called), last]
    (ticket,) = re.findall(rb'"ticket": "([0-9a-f]{64})"', data)
    assert bytes.fromhex(ticket.decode()) not in answers[0] and b"nonce" in answers[0]
    assert b"the ticket is not known, was used" in answers[1]
    server.until("stderr", "the ticket is not known")
    assert not [p for p in server.processes() if p.is_worker]


def _answer(port: int, replayed: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), END_S) as sock:
        sock.settimeout(END_S)
        sock.sendall(replayed)
        return b"".join(iter(lambda: _received(sock), b""))


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except (ConnectionError, TimeoutError):
        return b""


def test_what_sessions_run_on_is_compared() -> None:
    """Field by field: ring, fixed point, protocol, oblivious transfer, versions."""
    tokenizer = None
    provider = agreeing.of_provider(PRIVATE, tokenizer, "local", 1)
    fields = SpuConfig().manifest()
    versions = {"wire", "protocols", "silent", "packed", "transfers", "jax.version"}
    assert {*versions, *fields} <= provider.keys() and len(fields) >= 5
    for name in (*fields, *versions):
        client = agreeing.of_client(COMPLETION, Request(5, 5, 1, 0.7), tokenizer, "local", 1)
        client[name] = "another"
        with pytest.raises(ManifestMismatch, match=f'differ: {name}: client has "another", prov'):
            agree(with_nonce(client), with_nonce(provider))
