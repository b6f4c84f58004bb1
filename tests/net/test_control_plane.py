"""Opening a session: what is agreed on, who is refused, what those get who are no provider."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spu_llm.core.errors import (
    BusyError,
    InputError,
    ManifestMismatch,
    NoAnswerError,
    PeerError,
    PoolError,
    SpuLlmError,
    WantedError,
    WireError,
)
from spu_llm.net import control_plane
from spu_llm.net.control_pb2 import OpenRequest
from spu_llm.net.control_plane import (
    PART_BYTES,
    ControlServer,
    Document,
    ask_for_format,
    ask_for_models,
    ask_to_open,
    check_health,
)
from spu_llm.net.frames import PREAMBLE
from spu_llm.net.manifest import Manifest, agree, with_nonce
from spu_llm.net.stream import TcpStream
from tests.kit.paths import ROOT
from tests.kit.patience import SOON_S, eventually

from .conftest import Bench

TICKET = bytes(range(32))
ASK_S = SOON_S


class Provider:
    """Answers over connections as a provider does that compares manifests with `stated`."""

    def __init__(self, bench: Bench) -> None:
        self.stated: Manifest = {"jobs": 1}
        self.document = b"a document"
        self.told: list[str] = []  # the models whose document was asked for
        self.names: list[str] = []
        self.error: SpuLlmError | None = None
        self.agreed: list[Manifest] = []
        self.failed: list[PeerError] = []
        self.server = ControlServer()
        self._bench = bench

    def _admit(self, asked: Mapping[str, object]) -> tuple[Manifest, bytes]:
        if self.error is not None:
            raise self.error
        stated = with_nonce(self.stated)
        self.agreed.append(agree(asked, stated))
        return stated, TICKET

    def _tell(self, model: str) -> Document:
        self.told.append(model)
        if self.error is not None:
            raise self.error
        return Document("d" * 64, self.document)

    def _name(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return self.names

    def connect(self) -> TcpStream:
        client, ours = self._bench.streams()

        def run() -> None:
            try:
                self.server.serve(ours, self._admit, self._tell, self._name)
            except PeerError as error:
                self.failed.append(error)

        threading.Thread(target=run, daemon=True).start()
        return client


@pytest.fixture(scope="module", autouse=True)
def grpc_itself() -> Iterator[None]:
    """Yield gRPC's own threads and descriptors come with its first use and stay."""
    made = Bench()
    with made.cleanup:
        idle = Provider(made)
        with closing(idle.server):
            asked(idle)
            yield


@pytest.fixture
def provider(bench: Bench) -> Iterator[Provider]:
    made = Provider(bench)
    with closing(made.server):
        yield made


def asked(provider: Provider, **fields: Any) -> Manifest:
    own = with_nonce({"jobs": 1, **fields})
    theirs, ticket = ask_to_open(provider.connect(), own, ASK_S)
    assert ticket == TICKET
    return agree(own, theirs)


def test_both_compute_the_same_settings(provider: Provider) -> None:
    provider.stated |= {"a": 1, "model.layers": 3}
    fields = {"a": 1, "request.n": 2, "request.t": 0.7, "request.q": None, "request.b": True}
    actual = asked(provider, **fields)
    assert provider.agreed == [actual]
    assert {k: v for k, v in actual.items() if k != "session"} == {
        "jobs": 1,
        "model.layers": 3,
        **fields,
    }
    assert asked(provider, **fields)["session"] != actual["session"]


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"a": 2}, "a: client has 1, provider has 2"),
        ({"a": True}, "a: client has 1, provider has true"),
        ({"a": 1.0}, "a: client has 1, provider has 1.0"),
        ({}, "a: client has 1, provider has no value"),
    ],
)
def test_a_difference_is_named_with_both_values(
    provider: Provider, stated: Manifest, said: str
) -> None:
    provider.stated |= stated
    with pytest.raises(ManifestMismatch, match=f"^settings differ: {said}$"):
        asked(provider, a=1)
    assert provider.agreed == []


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (BusyError("busy with 4"), BusyError, "^busy with 4$"),
        (InputError("no such study"), InputError, "^the provider refused: no such study$"),
        (WireError("no nonce"), PeerError, "^the provider refused: no nonce$"),
        (WantedError("shutting down"), PeerError, "^the provider refused: shutting down$"),
        (WireError("a\x1b[2Jb"), PeerError, r"^the provider refused: a␛\[2Jb$"),
        (PoolError("/srv/pool is full"), PeerError, "^the provider refused: the provider failed$"),
    ],
)
def test_a_refusal_says_why(
    provider: Provider, error: SpuLlmError, kind: type[SpuLlmError], said: str
) -> None:
    provider.error = error
    with pytest.raises(kind, match=said):
        asked(provider)


def test_a_document_comes_in_parts(provider: Provider) -> None:
    provider.document = bytes(range(256)) * 5000
    size = len(provider.document)
    assert ask_for_format(provider.connect(), 0, 0, ASK_S) == ("d" * 64, size, b"")
    _, _, first = ask_for_format(provider.connect(), 0, size, ASK_S)
    _, _, rest = ask_for_format(provider.connect(), len(first), size, ASK_S)
    assert len(first) == PART_BYTES
    assert first + rest == provider.document
    assert ask_for_format(provider.connect(), 10, 5, ASK_S)[2] == provider.document[10:15]
    for offset in (size, (1 << 64) - 1):
        assert ask_for_format(provider.connect(), offset, 5, ASK_S)[2] == b""


def test_a_document_may_be_refused(provider: Provider) -> None:
    provider.error = InputError("this model has no tokenizer")
    with pytest.raises(InputError, match="^the provider refused: this model has no tokenizer$"):
        ask_for_format(provider.connect(), 0, 5, ASK_S)


def test_a_document_is_of_the_model_that_is_named(provider: Provider) -> None:
    ask_for_format(provider.connect(), 0, 5, ASK_S)
    ask_for_format(provider.connect(), 0, 5, ASK_S, "large")
    assert provider.told == ["", "large"]


@pytest.mark.parametrize("names", [[], ["small", "large"]])
def test_models_are_named_in_their_order(provider: Provider, names: list[str]) -> None:
    provider.names = names
    assert ask_for_models(provider.connect(), ASK_S) == names


def test_names_may_be_refused(provider: Provider) -> None:
    provider.error = BusyError("busy with 4")
    with pytest.raises(BusyError, match="^busy with 4$"):
        ask_for_models(provider.connect(), ASK_S)


def test_a_provider_without_the_call_is_of_an_older_version(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "_TEXT_FORMAT", f"/{control_plane.SERVICE}/Unheard")
    with pytest.raises(ManifestMismatch, match="wire version below 5.* the same version"):
        ask_for_format(provider.connect(), 0, 0, ASK_S)


def test_the_health_service_answers(provider: Provider) -> None:
    assert check_health(provider.connect(), ASK_S)
    provider.server.drain()
    assert not check_health(provider.connect(), ASK_S)


def test_many_at_once(provider: Provider) -> None:
    provider.stated |= {"a": 1}
    collected: list[Manifest] = []
    threads = [
        threading.Thread(target=lambda: collected.append(asked(provider, a=1))) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ASK_S)
    assert len({one["session"] for one in collected}) == len(threads)


# ---- a peer that is something else


def of_raw(bench: Bench, answer: Callable[[socket.socket], object]) -> TcpStream:
    """Return a connection to whoever does `answer`."""
    worker = bench.worker(answer)
    return TcpStream(bench.dial(worker.port))


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x15\x03\x01\x00\x02\x02\x46", "the peer is speaking TLS; give --identity"),
        (b"HTTP/1.1 400 Bad Request\r\n", "the peer does not speak spu-llm"),
        (PREAMBLE[:-1] + b"\x01", "the peer speaks wire version 1, this side speaks 5"),
        (PREAMBLE, "a session's data before there was a session"),
        (b"", "does not answer"),
        (b"\0\0\0\x07\0\0\0\0\0", "does not answer"),
    ],
)
def test_a_peer_that_is_no_provider(bench: Bench, sent: bytes, said: str) -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(sent)

    started = time.monotonic()
    with pytest.raises(PeerError, match=said):
        ask_to_open(of_raw(bench, answer), with_nonce({"jobs": 1}), ASK_S)
    assert time.monotonic() - started < ASK_S


def test_a_silent_peer_is_given_up(bench: Bench) -> None:
    with pytest.raises(NoAnswerError):
        ask_to_open(of_raw(bench, lambda sock: time.sleep(1.0)), {"jobs": 1}, 0.3)


def test_a_connection_that_has_gone(bench: Bench) -> None:
    client, provider = bench.streams()
    provider.close()
    client.close()
    with pytest.raises(PeerError):
        ask_to_open(client, with_nonce({"jobs": 1}), ASK_S)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(min_size=1, max_size=400))
def test_whatever_a_client_sends_others_are_answered(provider: Provider, data: bytes) -> None:
    """Also behind HTTP/2's own greeting."""
    for start in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        with closing(provider.connect()) as stream:
            try:
                stream.send_all(start + data)
            except PeerError:
                pass
    assert asked(provider)["jobs"] == 1


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300))
def test_a_request_of_any_bytes_is_none_or_compared(data: bytes) -> None:
    """It decodes to a manifest whose every value is a scalar, or protobuf refuses it."""
    from google.protobuf.message import DecodeError

    try:
        request = OpenRequest.FromString(data)
    except DecodeError:
        return
    manifest = control_plane._manifest(request.manifest)
    assert all(isinstance(v, str | int | float | bool | None) for v in manifest.values())
    with pytest.raises((WireError, ManifestMismatch)):
        agree(manifest, with_nonce({"jobs": 1, "wire": 3}))


@given(
    st.dictionaries(
        st.text(max_size=80),
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 63) - 1)
        | st.floats(allow_nan=False)
        | st.text(),
    )
)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    request = OpenRequest(manifest=control_plane._values(manifest))
    back = control_plane._manifest(OpenRequest.FromString(request.SerializeToString()).manifest)
    assert back == manifest
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in manifest.items()}


def test_a_manifest_too_large_is_refused(provider: Provider) -> None:
    fields = {f"request.{i}": "x" * 1000 for i in range(600)}
    with pytest.raises(PeerError, match="larger than max|message too|refused") as error:
        asked(provider, **fields)
    assert not isinstance(error.value, BusyError)
    assert asked(provider)["jobs"] == 1


def test_connections_leave_nothing(provider: Provider) -> None:
    """The fixture looks at threads and descriptors; here at the names of their sockets."""
    folder = Path(provider.server._folder._folder.name)
    for _ in range(3):
        asked(provider)
    assert eventually(lambda: [path.name for path in folder.iterdir()] == ["server"])


def test_the_messages_are_those_of_their_description(tmp_path: Path) -> None:
    """`make proto` would change nothing."""
    root = ROOT
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={root}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            str(root / "spu_llm/net/control.proto"),
        ],
        check=True,
    )
    for name in ("control_pb2.py", "control_pb2.pyi"):
        assert (tmp_path / "spu_llm/net" / name).read_text() == (
            root / "spu_llm/net" / name
        ).read_text()
