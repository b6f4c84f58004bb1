"""The peer's connection under mutual TLS 1.3: both sides are known before a byte of theirs counts.

The TLS engine works on memory, and the socket by itself, so that one thread can send while another
one receives: OpenSSL's own connection must not be used by two threads at a time.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
import time
from collections.abc import Callable

from spu_llm.core.errors import InputError, PeerError
from spu_llm.net.identity import Certificate, Identity, demanded_name, describe
from spu_llm.net.stream import TcpStream

HANDSHAKE_S = 5.0
HANDSHAKE_BYTES = 64 << 10  # of a client that is not known yet
CONTROL, DATA = "h2", "spu-llm"  # protocols that a connection is for: gRPC, or a session
_CHUNK_BYTES = 256 << 10
_RECORD_BYTES = 16 << 10  # the most that TLS has in one
_CLOSE_S = 0.3  # for what is on its way when a connection ends
# Fatal, "protocol version": OpenSSL says nothing to a peer that speaks no TLS; then this end does.
_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"
_GONE = "the peer closed the connection before it showed a certificate"
_PARTIAL_CHAIN = 0x80000  # X509_V_FLAG_PARTIAL_CHAIN: a pinned certificate need not be self-signed


class TlsStream:
    """A `ByteStream` (`spu_llm.net.stream`) to the party that `peer` describes.

    `protocol`: what it is for, CONTROL or DATA; None when the peer did not say.
    """

    def __init__(self, tcp: TcpStream, engine: ssl.SSLObject, memory: Memory, peer: Certificate):
        self.peer, self.protocol = peer, engine.selected_alpn_protocol()
        self._tcp, self._engine, self._memory = tcp, engine, memory
        self._lock = threading.Lock()  # of the engine and its memory
        self._order = threading.Lock()  # of what is sent
        self._room = memoryview(bytearray(_RECORD_BYTES))
        self._closed = False
        self._told: PeerError | None = None  # by the peer, in an alert
        self._heard = threading.Event()  # that, or that the connection has ended

    def recv_some(self, max_bytes: int) -> bytes:
        """See `ByteStream.recv_some`."""
        return self._received(max_bytes, self._tcp.recv_some)

    def recv_within(self, max_bytes: int, timeout_s: float) -> bytes:
        """Receive as `recv_some` does; PeerError when nothing comes within `timeout_s`."""
        deadline = time.monotonic() + timeout_s

        def more(at_most: int) -> bytes:
            return self._tcp.recv_within(at_most, deadline - time.monotonic())

        return self._received(max_bytes, more)

    def _received(self, max_bytes: int, more: Callable[[int], bytes]) -> bytes:
        """Return what `more` brings from the connection, decrypted."""
        try:
            while (data := self._opened(max_bytes)) is None:
                if not (record := more(_CHUNK_BYTES)):
                    data = b""
                    break
                with self._lock:
                    self._memory.incoming.write(record)
        except PeerError as error:
            self._told = error
            self._heard.set()
            raise
        if not data:
            self._heard.set()
        return data

    def _opened(self, max_bytes: int) -> bytes | None:
        """Return what is here already, decrypted: b"" at the end, None when more must come
        first.
        """
        with self._lock:
            # Asked first: that there is nothing to read costs an exception.
            if not (self._memory.incoming.pending or self._engine.pending()):
                return None
            try:
                # The stub of this overload says bytes.
                count = int(self._engine.read(min(max_bytes, _RECORD_BYTES), self._room))
            except ssl.SSLWantReadError:
                return None
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            except ssl.SSLError as error:
                raise PeerError(_complaint(error)) from error
            return bytes(self._room[:count])

    def send_all(self, data: bytes | memoryview) -> None:
        """See `ByteStream.send_all`."""
        self._send(data, self._tcp.send_all)

    def send_within(self, data: bytes | memoryview, timeout_s: float) -> None:
        """See `TcpStream.send_within`."""
        deadline = time.monotonic() + timeout_s

        def put(record: bytes) -> None:
            self._tcp.send_within(record, deadline - time.monotonic())

        self._send(data, put)

    def _send(self, data: bytes | memoryview, put: Callable[[bytes], None]) -> None:
        """Seal data, and send the records by `put`."""
        view = memoryview(data)
        with self._order:
            for start in range(0, len(view), _CHUNK_BYTES):
                record = self._sealed(view[start : start + _CHUNK_BYTES])
                try:
                    put(record)
                except PeerError as error:
                    # Why it has closed the connection may be on its way.
                    self._heard.wait(_CLOSE_S)
                    raise self._told or error from error

    def close(self) -> None:
        """See `ByteStream.close`. The peer hears that nothing was cut off, if it still reads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(ssl.SSLError, ValueError):
                self._engine.unwrap()
            last = self._memory.outgoing.read()
        if self._order.acquire(timeout=_CLOSE_S):
            try:
                self._tcp.send_last(last)
            finally:
                self._order.release()
        self._tcp.close()

    def _sealed(self, data: memoryview) -> bytes:
        with self._lock:
            if self._closed:
                raise PeerError("the connection to the peer is closed")
            try:
                written = self._engine.write(data)
            except ssl.SSLError as error:
                raise PeerError(_complaint(error)) from error
            assert written == len(data), "memory takes all of it"
            return self._memory.outgoing.read()


class Memory:
    """The two buffers that the TLS engine reads and writes in place of a socket."""

    def __init__(self) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()


def server_context(identity: Identity) -> ssl.SSLContext:
    """Return what a server meets clients with, who must show a certificate that is trusted."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.num_tickets = 0  # nothing is resumed
    context.set_alpn_protocols([CONTROL, DATA])
    return context


def client_context(identity: Identity, name: str | None, protocol: str = DATA) -> ssl.SSLContext:
    """Return what a client meets its provider with, whose certificate must be trusted, and be for
    `name` if there is one.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    context.set_alpn_protocols([protocol])
    context.check_hostname = name is not None
    context.hostname_checks_common_name = False
    return context


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= _PARTIAL_CHAIN
    try:
        _load_own(context, identity.pem)
        context.load_verify_locations(cadata=identity.anchors)
    except ssl.SSLError as error:  # a key too short, a digest too old
        reason = (error.reason or str(error)).lower().replace("_", " ")
        raise InputError(
            f"{identity.chain} or {identity.trust} cannot be used: {reason}; spu-llm keygen makes "
            "another certificate"
        ) from None
    return context


def _load_own(context: ssl.SSLContext, pem: bytes) -> None:
    """Give the context a certificate and its key, which OpenSSL takes from files alone: one in
    memory, since those on disk may be others by now.
    """
    with open(os.memfd_create("identity", os.MFD_CLOEXEC), "wb") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


class Meeting:
    """A server's end of a handshake, which never waits for the client: `step` goes on with what has
    come by now.
    """

    def __init__(self, tcp: TcpStream, context: ssl.SSLContext) -> None:
        self._tcp, self._memory = tcp, Memory()
        self._engine = context.wrap_bio(
            self._memory.incoming, self._memory.outgoing, server_side=True
        )
        self._came = 0

    def step(self) -> TlsStream | None:
        """Return the connection once the client is known, None until then. PeerError when it is
        none of those trusted, which it has been told: let that arrive.
        """
        data = self._tcp.recv_now(_RECORD_BYTES)
        if data is None:
            return None
        if not data:
            raise PeerError(_GONE)
        self._came += len(data)
        self._memory.incoming.write(data)
        done, out, error = _advanced(self._engine, self._memory)
        if error is not None:
            self._tcp.send_last(out or _ALERT)
            raise error
        self._tcp.send_last(out)
        if done:
            return TlsStream(self._tcp, self._engine, self._memory, _peer_of(self._engine))
        if self._came > HANDSHAKE_BYTES:
            raise PeerError(f"the peer sent {self._came} bytes and is not known yet")
        return None


def as_client(
    tcp: TcpStream,
    identity: Identity,
    host: str,
    protocol: str = DATA,
    timeout_s: float = HANDSHAKE_S,
) -> TlsStream:
    """Meet the provider at `host`; PeerError, with the connection closed, unless it is trusted."""
    memory, name = Memory(), demanded_name(identity, host)
    engine = client_context(identity, name, protocol).wrap_bio(
        memory.incoming, memory.outgoing, server_hostname=name
    )
    return _met(tcp, engine, memory, timeout_s)


def as_server(tcp: TcpStream, identity: Identity, timeout_s: float = HANDSHAKE_S) -> TlsStream:
    """Meet one client, and wait for it; PeerError, with the connection closed, unless it is
    trusted.
    """
    memory = Memory()
    engine = server_context(identity).wrap_bio(memory.incoming, memory.outgoing, server_side=True)
    return _met(tcp, engine, memory, timeout_s)


def _met(tcp: TcpStream, engine: ssl.SSLObject, memory: Memory, timeout_s: float) -> TlsStream:
    try:
        _shake_hands(tcp, engine, memory, time.monotonic() + timeout_s)
        return TlsStream(tcp, engine, memory, _peer_of(engine))
    except BaseException:
        tcp.close_after(_CLOSE_S)
        raise


def _shake_hands(tcp: TcpStream, engine: ssl.SSLObject, memory: Memory, deadline: float) -> None:
    while True:
        done, out, error = _advanced(engine, memory)
        if error is not None:
            with contextlib.suppress(PeerError):
                tcp.send_all(out or _ALERT)  # which tells the peer why
            raise error
        tcp.send_all(out)
        if done:
            return
        data = tcp.recv_within(_CHUNK_BYTES, deadline - time.monotonic())
        if not data:
            raise PeerError(_GONE)
        memory.incoming.write(data)


def _advanced(engine: ssl.SSLObject, memory: Memory) -> tuple[bool, bytes, PeerError | None]:
    """Go on with a handshake; return whether it is done, what the peer is to get, and what is
    wrong.
    """
    error: PeerError | None = None
    try:
        engine.do_handshake()
        done = True
    except ssl.SSLWantReadError:
        done = False
    except ssl.SSLError as exc:
        error, done = PeerError(_complaint(exc)), False
        error.__cause__ = exc
    return done, memory.outgoing.read(), error


def _peer_of(engine: ssl.SSLObject) -> Certificate:
    """Return whom a handshake that is done was with; PeerError when that cannot be read."""
    shown = engine.getpeercert(binary_form=True)
    assert shown is not None, "a certificate is required"
    try:
        return describe(shown)
    except ValueError as error:
        raise PeerError(f"the peer's certificate is malformed: {error}") from error


# What OpenSSL says, and what it means here: of our own judgement, and in the peer's alerts.
_REASONS = {
    "WRONG_VERSION_NUMBER": "the peer is not speaking TLS; was it started with --insecure?",
    "HTTP_REQUEST": "the peer is not speaking TLS, but HTTP",
    "UNSUPPORTED_PROTOCOL": "the peer does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer does not speak TLS 1.3",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer showed no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer demands a certificate; give --identity",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer does not trust this party's certificate; hand it over",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer does not accept this party's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this party's certificate has expired, says the peer",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the peer does not accept this party's certificate",
}


def _complaint(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    reason = error.reason or str(error)
    return _REASONS.get(reason, f"TLS with the peer failed: {reason.lower().replace('_', ' ')}")
