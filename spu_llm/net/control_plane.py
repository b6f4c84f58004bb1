"""How a session is opened: both manifests compared, over gRPC, before there is one.

gRPC runs on connections of ours (`carry`), so that who may connect is judged in one place (`tls`)
and one port is open: its calls and a session's data come to the same one and are told apart by the
protocol that TLS negotiates, or in the clear by their first byte. Before it asks for a session, a
client asks how text of the model is written (`TextFormat`); where there are several models it says
which one by name, in both calls, and may ask for the names (`Models`). The provider answers a
client whose settings agree with its own by a ticket, good for one connection for data, for a while,
under the same certificate; what happens there is `control`'s and the relay's.

The standard health service (grpc.health.v1) answers beside it.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote

# The library prints its own complaints; ours go to the caller.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc  # noqa: E402
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # noqa: E402

from spu_llm.core.errors import (  # noqa: E402
    BusyError,
    InputError,
    LimitError,
    ManifestMismatch,
    NoAnswerError,
    PeerError,
    SpuLlmError,
    WantedError,
    WireError,
)
from spu_llm.net.carry import PrivateFolder, carry  # noqa: E402
from spu_llm.net.control import heard  # noqa: E402
from spu_llm.net.control_pb2 import (  # noqa: E402
    ModelInfo,
    ModelsAnswer,
    ModelsRequest,
    Opened,
    OpenRequest,
    TextFormatPart,
    TextFormatRequest,
    Value,
)
from spu_llm.net.frames import VERSION, check_preamble  # noqa: E402
from spu_llm.net.manifest import Manifest, Scalar  # noqa: E402
from spu_llm.net.stream import ByteStream  # noqa: E402

logging.getLogger("grpc").addHandler(logging.NullHandler())

SERVICE = "spu_llm.v1.Provider"
TICKET_BYTES = 32

_OPEN = f"/{SERVICE}/Open"
_TEXT_FORMAT = f"/{SERVICE}/TextFormat"
_MODELS = f"/{SERVICE}/Models"
_HEALTH = "/grpc.health.v1.Health/Check"
_MAX_MESSAGE = 2 << 20  # bytes; the largest manifest in ASCII fits
PART_BYTES = 1 << 20  # of a document, in one answer
_CALLS = 64  # at a time, one of a connection; a call waits for its request in a thread
_LIFE_S = 15.0  # of a connection, whatever the peer does or does not
_WORD_S = 1.0  # for why a connection has broken, where gRPC says that it has
_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.enable_http_proxy", 0),
]
_OF_SERVER = [("grpc.server_handshake_timeout_ms", 5_000), ("grpc.max_concurrent_streams", 1)]

# A client's manifest: the provider's manifest and a ticket.
Admit = Callable[[Mapping[str, object]], tuple[Manifest, bytes]]


@dataclass(frozen=True)
class Document:
    """A file that a provider gives out as it is: `content`, and its SHA-256 in hex."""

    digest: str
    content: bytes


# How text of the model of this name is written, for a client that may ask.
Tell = Callable[[str], Document]
# What the models are called, for a client that may ask.
Name = Callable[[], Sequence[str]]

# Errors whose words are the peer's to hear; their names go along, since a status may be gRPC's own.
_TOLD: dict[type[SpuLlmError], grpc.StatusCode] = {
    ManifestMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    InputError: grpc.StatusCode.INVALID_ARGUMENT,
    WireError: grpc.StatusCode.ABORTED,
    WantedError: grpc.StatusCode.ABORTED,
}
_ERROR = "spu-llm-error"


# ---- the provider


class _Health(health.HealthServicer):
    def Watch(self, request: object, context: grpc.ServicerContext) -> None:
        """Refuse a call that would keep its place for as long as the peer likes."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "call Check again")


@dataclass
class _Caller:
    admit: Admit
    tell: Tell
    name: Name
    answered: bool = False


class ControlServer:
    """Answers clients whose connections are handed to `serve`."""

    def __init__(self) -> None:
        self._folder = PrivateFolder()
        self._lock = threading.Lock()
        self._callers: dict[str, _Caller] = {}  # by the names of their sockets
        self._names = map(str, itertools.count(1))
        self._health = _Health()
        self._threads = ThreadPoolExecutor(_CALLS, thread_name_prefix="control")
        self._server = grpc.server(
            self._threads, options=[*_OPTIONS, *_OF_SERVER], maximum_concurrent_rpcs=_CALLS
        )
        calls = {
            "Open": grpc.unary_unary_rpc_method_handler(
                self._open, OpenRequest.FromString, Opened.SerializeToString
            ),
            "TextFormat": grpc.unary_unary_rpc_method_handler(
                self._text_format, TextFormatRequest.FromString, TextFormatPart.SerializeToString
            ),
            "Models": grpc.unary_unary_rpc_method_handler(
                self._models, ModelsRequest.FromString, ModelsAnswer.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, calls),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_insecure_port(f"unix:{self._folder.path('server')}")
        self._server.start()
        for name in ("", SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def serve(self, stream: ByteStream, admit: Admit, tell: Tell, name: Name) -> None:
        """Answer all calls that come over a connection, which is closed afterwards, or after
        _LIFE_S. Of what `admit`, `tell` or `name` raises the client gets the words where they are
        meant for it (`_TOLD`), else only that there was something. PeerError when the connection
        breaks before a call is answered.
        """
        sock = socket.socket(socket.AF_UNIX)
        with self._lock:
            own = next(self._names)
            self._callers[own] = caller = _Caller(admit, tell, name)
        try:
            # A name of its own, by which a call tells whose it is.
            sock.bind(self._folder.path(own))
            sock.connect(self._folder.path("server"))
            late = threading.Timer(_LIFE_S, stream.close)
            late.daemon = True
            late.start()
            try:
                carry(stream, sock)
            finally:
                late.cancel()
        except PeerError:
            if not caller.answered:  # else it may go as it likes
                raise
        finally:
            sock.close()
            with self._lock:
                del self._callers[own]
            self._folder.remove(own)

    def drain(self) -> None:
        """Tell whoever asks after this provider's health that it takes no more sessions."""
        self._health.enter_graceful_shutdown()

    def close(self) -> None:
        """End what is still being answered."""
        self._server.stop(0).wait()
        self._threads.shutdown()
        self._folder.close()

    def _open(self, request: OpenRequest, context: grpc.ServicerContext) -> Opened:
        with self._answering(context) as caller:
            own, ticket = caller.admit(_manifest(request.manifest))
        return Opened(manifest=_values(own), ticket=ticket)

    def _text_format(
        self, request: TextFormatRequest, context: grpc.ServicerContext
    ) -> TextFormatPart:
        with self._answering(context) as caller:
            text_format = caller.tell(request.model)
        end = request.offset + min(request.most, PART_BYTES)
        return TextFormatPart(
            digest=text_format.digest,
            size=len(text_format.content),
            part=text_format.content[request.offset : end],
        )

    def _models(self, request: ModelsRequest, context: grpc.ServicerContext) -> ModelsAnswer:
        with self._answering(context) as caller:
            names = caller.name()
        return ModelsAnswer(models=[ModelInfo(name=name) for name in names])

    @contextmanager
    def _answering(self, context: grpc.ServicerContext) -> Iterator[_Caller]:
        """Yield whoever calls; what is raised in the block becomes the call's answer."""
        name = unquote(context.peer()).rpartition("/")[2]
        try:
            caller = self._callers[name]
            caller.answered = True
            yield caller
        except Exception as error:
            if (status := _TOLD.get(type(error))) is None:  # type: ignore[arg-type]
                context.abort(grpc.StatusCode.INTERNAL, "the provider failed")
            context.set_trailing_metadata(((_ERROR, type(error).__name__),))
            context.abort(status, str(error))


# ---- the client


def ask_to_open(
    stream: ByteStream, own: Mapping[str, Scalar], timeout_s: float
) -> tuple[dict[str, object], bytes]:
    """Return the provider's manifest, not looked at yet, and a ticket; `stream` is closed then.

    ManifestMismatch when the provider sees a difference, InputError when it does not serve what is
    asked for, BusyError, and PeerError for all else that fails.
    """
    with _channel(stream) as channel:
        call = channel.unary_unary(_OPEN, OpenRequest.SerializeToString, Opened.FromString)
        opened: Opened = call(OpenRequest(manifest=_values(own)), timeout=timeout_s)
    if len(opened.ticket) != TICKET_BYTES:
        raise WireError(f"the peer gave a ticket of {len(opened.ticket)} bytes")
    return _manifest(opened.manifest), opened.ticket


def ask_for_format(
    stream: ByteStream, offset: int, most: int, timeout_s: float, model: str = ""
) -> tuple[str, int, bytes]:
    """Return the digest of the document that says how text is written, as the provider states it,
    the document's size in bytes, and up to `most` bytes of it from `offset` on (`PART_BYTES` in one
    answer); `stream` is closed then. `model`: its name, empty: the first one. Errors as of
    `ask_to_open`.
    """
    with _channel(stream) as channel:
        call = channel.unary_unary(
            _TEXT_FORMAT, TextFormatRequest.SerializeToString, TextFormatPart.FromString
        )
        asked = TextFormatRequest(offset=offset, most=most, model=model)
        part: TextFormatPart = call(asked, timeout=timeout_s)
    return part.digest, part.size, part.part


def ask_for_models(stream: ByteStream, timeout_s: float) -> list[str]:
    """Return what the provider calls its models, not looked at yet; `stream` is closed then. Errors
    as of `ask_to_open`.
    """
    with _channel(stream) as channel:
        call = channel.unary_unary(
            _MODELS, ModelsRequest.SerializeToString, ModelsAnswer.FromString
        )
        answer: ModelsAnswer = call(ModelsRequest(), timeout=timeout_s)
    return [model.name for model in answer.models]


def check_health(stream: ByteStream, timeout_s: float) -> bool:
    """Return whether the provider takes sessions, as it says itself; PeerError when it does not
    answer.
    """
    with _channel(stream) as channel:
        call = channel.unary_unary(
            _HEALTH,
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        answer = call(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def _channel(stream: ByteStream) -> Iterator[grpc.Channel]:
    """Yield gRPC over `stream`; what broke the stream is raised in place of gRPC's own error."""
    broken: list[PeerError] = []

    def run(listener: socket.socket) -> None:
        try:
            with listener:  # one connection: gRPC is not to try another one
                sock = listener.accept()[0]
            carry(stream, sock, _check_first)
        except PeerError as error:
            broken.append(error)
        except OSError:
            pass  # nobody came

    with closing(PrivateFolder()) as folder, closing(stream):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(folder.path("client"))
        listener.listen(1)
        thread = threading.Thread(target=run, args=(listener,), name="control", daemon=True)
        thread.start()
        try:
            with grpc.insecure_channel(f"unix:{folder.path('client')}", _OPTIONS) as channel:
                yield channel
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                thread.join(_WORD_S)
                raise (broken[0] if broken else _translated(error)) from error
            raise _translated(error) from error
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            stream.close()
            thread.join()


def _check_first(data: bytes) -> None:
    """Raise WireError when a peer does not answer as gRPC does, with a frame of settings."""
    if data[:1] != b"\0":
        check_preamble(data[:8])
        raise WireError("the peer sent a session's data before there was a session")


def _translated(error: grpc.RpcError) -> SpuLlmError:
    code, said = error.code(), heard(error.details() or "")
    match dict(error.trailing_metadata() or ()).get(_ERROR):
        case ManifestMismatch.__name__:
            return ManifestMismatch(said)
        case BusyError.__name__:
            return BusyError(said)
        case InputError.__name__:
            return InputError(f"the provider refused: {said}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return ManifestMismatch(
            "the provider lacks a call that this side makes: it is older, maybe of a wire version "
            f"below {VERSION}, this side's; run the same version of spu-llm on both sides"
        )
    if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
        return NoAnswerError("the peer accepts the connection but does not answer")
    return PeerError(f"the provider refused: {said}")


# ---- manifests


def _values(manifest: Mapping[str, Scalar]) -> dict[str, Value]:
    return {name: _value(scalar) for name, scalar in manifest.items()}


def _value(scalar: Scalar) -> Value:
    match scalar:
        case None:
            return Value()
        case bool():
            return Value(flag=scalar)
        case int():
            return Value(integer=scalar)
        case float():
            return Value(real=scalar)
        case _:
            return Value(text=scalar)


def _manifest(values: Mapping[str, Value]) -> dict[str, object]:
    """Return what a peer stated; `manifest.agree` judges it."""
    return {name: _scalar(value) for name, value in values.items()}


def _scalar(value: Value) -> object:
    kind = value.WhichOneof("kind")
    return None if kind is None else getattr(value, kind)
