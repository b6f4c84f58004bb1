"""A server's connections until it is known whose they are.

One thread looks after all of them and waits for none: a stranger, whatever it says or leaves
unsaid, costs a socket for `HANDSHAKE_S`. When `PLACES` are taken, whoever comes gets the place of
the oldest connection of the address that holds most, so that one address keeps out neither others
nor, as long as a handshake is done before so many more have come, whoever is known behind the same
address. In the clear nobody can be told from another one: there the first byte is enough.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from spu_llm.core.errors import PeerError
from spu_llm.net import tls
from spu_llm.net.crowd import Crowd, origin_of
from spu_llm.net.frames import CALLS_BYTE
from spu_llm.net.identity import Certificate, Identity
from spu_llm.net.stream import TcpStream
from spu_llm.net.tls import HANDSHAKE_S, Meeting, TlsStream

PLACES = 256
_AT_ONCE = 32  # accepted before those that are there are heard again
_LOOK_S = 0.1  # between two looks at who is late
_CLOSE_S = 0.3  # for a refusal to arrive
_DISCARD_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class Met:
    """A connection that is not a stranger's: in TLS, to `peer`, which knows this party as `own`; in
    the clear, to whoever has said something. `door`: the machine of this party that has passed it
    on, which is for calls then; "": none.
    """

    tcp: TcpStream | TlsStream
    stream: TcpStream | TlsStream
    peer: Certificate | None
    own: Certificate | None
    origin: str
    door: str = ""

    @property
    def caller(self) -> str:
        """Return whom the connection counts for: a certificate, or in the clear, where it comes
        from.
        """
        return self.origin if self.peer is None else self.peer.fingerprint

    @property
    def for_calls(self) -> bool:
        """Return whether the connection is for calls; else it is for a session's data."""
        if self.door:
            return True
        if isinstance(self.stream, TlsStream):
            return self.stream.protocol == tls.CONTROL
        return self.stream.look() == CALLS_BYTE


@dataclass(eq=False)
class _Guest:
    """A connection whose peer is not known yet, or was refused and is `leaving`."""

    tcp: TcpStream
    meeting: Meeting | None  # in the clear: none
    own: Certificate | None
    origin: str
    until: float
    leaving: bool = False


class Entrance:
    """Meets those who connect to `listener`, which it owns. `refused` hears why somebody was not
    let in; in `own_user_only`, other users of this machine are not heard at all.
    """

    def __init__(
        self,
        listener: socket.socket,
        identity: Identity | None,
        refused: Callable[[PeerError], None],
        own_user_only: bool = False,
    ) -> None:
        self._listener, self._refused, self._own_user_only = listener, refused, own_user_only
        self._guests = Crowd[_Guest](PLACES)
        self._selector = selectors.DefaultSelector()
        self._next_look = 0.0
        self.renew(identity)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def renew(self, identity: Identity | None) -> None:
        """Meet whoever connects from here on as `identity`. InputError when TLS cannot use it:
        then all stays as it was.
        """
        context = None if identity is None else tls.server_context(identity)
        self._under: tuple[ssl.SSLContext | None, Certificate | None] = (
            context,
            None if identity is None else identity.own,
        )

    def wait(self, seconds: float) -> list[Met]:
        """Return who has been met; waits so long for somebody to say something."""
        arrived: list[Met] = []
        events = self._selector.select(min(seconds, _LOOK_S) if len(self._guests) else seconds)
        for key, _ in events:
            if key.data is not None and (met := self._heard(key.data)) is not None:
                arrived.append(met)
        # Last: whoever has come to the end of a handshake is not put out by those.
        if any(key.data is None for key, _ in events):
            self._accept()
        self._send_late_ones_away()
        return arrived

    def close(self) -> None:
        """Close the port, and all connections that were not met."""
        self._listener.close()
        for guest in self._guests.all():
            self._drop(guest)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                tcp = TcpStream(self._listener.accept()[0])
            except BlockingIOError:
                return
            except ConnectionError:  # a caller that has gone
                continue
            except OSError:  # as many files as this process may have
                time.sleep(_LOOK_S)
                return
            if not self._own_user_only or tcp.of_own_user():
                self._admit(tcp)

    def _admit(self, tcp: TcpStream) -> None:
        context, own = self._under
        meeting = None if context is None else Meeting(tcp, context)
        guest = _Guest(tcp, meeting, own, origin_of(tcp.host), time.monotonic() + HANDSHAKE_S)
        if (gone := self._guests.enter(guest, guest.origin)) is not None:
            self._close(gone)
        self._selector.register(tcp, selectors.EVENT_READ, guest)

    def _heard(self, guest: _Guest) -> Met | None:
        """Go on with one that has said something: return it when that was enough."""
        try:
            if guest.leaving:
                if guest.tcp.recv_now(_DISCARD_BYTES) == b"":
                    self._drop(guest)
                return None
            stream = _spoke(guest.tcp) if guest.meeting is None else guest.meeting.step()
        except PeerError as error:
            if guest.leaving:
                self._drop(guest)
            else:
                self._refuse(guest, error)
            return None
        if stream is None:
            return None
        self._guests.leave(guest)
        self._selector.unregister(guest.tcp)
        peer = stream.peer if isinstance(stream, TlsStream) else None
        return Met(guest.tcp, stream, peer, guest.own, guest.origin)

    def _refuse(self, guest: _Guest, error: PeerError) -> None:
        """Send a guest away, and let the reason arrive: unread bytes here would make it lost."""
        self._refused(error)
        guest.leaving, guest.until = True, time.monotonic() + _CLOSE_S
        guest.tcp.end_sending()

    def _send_late_ones_away(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        for guest in self._guests.all():
            if guest.until < now:
                if not guest.leaving:
                    self._refused(PeerError("the peer did not answer in time"))
                self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        self._guests.leave(guest)
        self._close(guest)

    def _close(self, guest: _Guest) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.tcp)
        guest.tcp.close()


def _spoke(tcp: TcpStream) -> TcpStream | None:
    first = tcp.look()
    if first == b"":
        raise PeerError("the peer closed the connection before it said anything")
    return None if first is None else tcp
