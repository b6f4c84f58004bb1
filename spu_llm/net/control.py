"""What the two supervisors say to each other during a session: the ticket that it was opened with
(`control_plane`), signs of life, and goodbye.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from spu_llm.core.errors import BusyError, PeerError, WireError
from spu_llm.core.json_values import names_once
from spu_llm.core.printable import one_line
from spu_llm.net.relay import Relay

SILENCE_S = 9.0  # without a byte from the peer, after which it counts as dead
BYE_WAIT_S = 5.0

# Heartbeats within SILENCE_S. So many because a party whose machine gives it a twentieth of a core
# sends few of them, and late: one that arrives is enough.
_BEATS = 18
_MAX_MESSAGE = 16 << 10  # bytes
_MAX_REASON = 2000


@dataclass(frozen=True)
class Bye:
    """Why the peer ended the session; `ok` when it had finished its work, `busy` when it had no
    room for it.
    """

    reason: str
    ok: bool
    busy: bool = False


class Control:
    """The control side of a relay, which it starts and closes.

    `ended` is set when the peer says goodbye or the connection fails; `check` then says which.
    `progress` may be raised by the owner and goes out with each heartbeat; `peer_progress` is what
    the peer has said of itself.
    """

    def __init__(self, relay: Relay, silence_s: float = SILENCE_S) -> None:
        """Start the relay. silence_s: without a byte from the peer, after which it counts as
        dead.
        """
        self.relay = relay
        self.ended = threading.Event()
        self.peer_bye: Bye | None = None
        self.progress = self.peer_progress = 0
        self._silence_s = silence_s
        self._ticket: bytes | None = None
        self._heard = threading.Event()  # their ticket, or the end
        self._bye_answered = threading.Event()
        self._heartbeat: threading.Thread | None = None
        relay.start(self._receive, self._relay_ended)

    def show_ticket(self, ticket: bytes) -> None:
        """Begin the session that the provider gave this ticket for, and the heartbeat."""
        self._send({"type": "ticket", "ticket": ticket.hex()})
        self._start_heartbeat()

    def take_ticket(self, timeout_s: float) -> bytes:
        """Return the client's ticket, not looked at yet, and start the heartbeat.

        `PeerError` when none comes within `timeout_s` or the session ends first.
        """
        self._heard.wait(timeout_s)
        if self._ticket is None:
            self.check()
            raise PeerError(f"the peer showed no ticket within {timeout_s:g} s")
        self._start_heartbeat()
        return self._ticket

    def check(self) -> None:
        """Raise the `PeerError` that ended the session, a peer's unhappy goodbye included: at a
        client that has heard nothing of the provider's worker, `BusyError` where there was no room
        for one. Later, and at a provider, a peer that says so has no more weight than any other.
        """
        bye, waits = self.peer_bye, self.relay.role == "client" and not self.relay.heard_worker
        if bye is not None and bye.busy and waits:
            raise BusyError(bye.reason)
        if bye is not None and not bye.ok:
            raise PeerError(f"the peer ended the session: {bye.reason}")
        if self.relay.failure is not None:
            raise self.relay.failure
        if self.peer_bye is not None and self._heartbeat is None:
            raise PeerError(f"the peer ended the session early: {self.peer_bye.reason}")

    def bye(self, reason: str, ok: bool, *, data_first: bool = False, busy: bool = False) -> None:
        """End the session and close the relay. busy: for lack of room, so that the peer may try
        again.

        With `ok` or `data_first` all that the worker has written is sent first; else what has not
        left is dropped. Each of that and the peer's confirmation is waited for up to `BYE_WAIT_S`;
        that it does not come is no error.
        """
        if ok or data_first:
            self.relay.finish_data(BYE_WAIT_S)
        else:
            self.relay.drop_data()
        message: dict[str, object] = {"type": "bye", "reason": reason[:_MAX_REASON], "ok": ok}
        if busy:  # a version that does not know it reads past it
            message["busy"] = True
        self._send(message, after_data=ok or data_first)
        if not self.relay.ended.is_set():
            self._bye_answered.wait(BYE_WAIT_S)
        self.close()

    def close(self) -> None:
        """Close the relay without a word. The peer sees a lost connection."""
        self.relay.close()
        if self._heartbeat is not None:
            self._heartbeat.join()

    def _send(self, message: Mapping[str, object], *, after_data: bool = False) -> None:
        self.relay.send_control(json.dumps(message).encode(), after_data=after_data)

    # ---- on the relay's threads

    def _receive(self, payload: bytes) -> None:
        message = _decode(payload)
        match message.get("type"):
            case "ping":
                self._got_ping(message.get("progress"))
            case "ticket":
                self._got_ticket(message.get("ticket"))
            case "bye":
                self._got_bye(message)
            case "bye-answer":
                self.relay.expect_end()
                self._bye_answered.set()
            case other:
                raise WireError(f"control message of unknown type {str(other)[:80]!a}")

    def _got_ping(self, progress: object) -> None:
        # Any byte received is a sign of life; this says whether the peer's worker gets on.
        if type(progress) is not int:
            raise WireError("control message with a heartbeat that is malformed")
        self.peer_progress = progress

    def _got_ticket(self, ticket: object) -> None:
        if not isinstance(ticket, str) or self._ticket is not None or self.relay.role == "client":
            raise WireError("control message with a ticket that is malformed or repeated")
        try:
            self._ticket = bytes.fromhex(ticket)
        except ValueError:
            raise WireError("control message with a ticket that is not in hex") from None
        self._heard.set()

    def _got_bye(self, message: Mapping[str, object]) -> None:
        reason, ok, busy = message.get("reason"), message.get("ok"), message.get("busy", False)
        said = isinstance(reason, str) and isinstance(ok, bool) and isinstance(busy, bool)
        if not said or (ok and busy) or self.peer_bye is not None:
            raise WireError("control message with a goodbye that is malformed or repeated")
        self.peer_bye = Bye(heard(str(reason)), ok is True, busy is True)
        # The peer closes only once it has this, so its goodbye cannot be lost to a reset.
        self.relay.expect_end()
        self._send({"type": "bye-answer"})
        self._set_ended()

    def _relay_ended(self) -> None:
        self._bye_answered.set()
        self._set_ended()

    def _set_ended(self) -> None:
        self.ended.set()
        self._heard.set()

    # ---- heartbeat

    def _start_heartbeat(self) -> None:
        self._heartbeat = threading.Thread(
            target=self._beat, name=f"heartbeat-{self.relay.role}", daemon=True
        )
        self._heartbeat.start()

    def _beat(self) -> None:
        """Send heartbeats, and end the session when the peer is silent for too long.

        Silence is counted in looks of this loop, not in seconds: when this process is starved or
        was paused, its looks are late, and what the peer sent meanwhile is still to be read. Any
        byte is a sign of life. Waiting data delays no heartbeat, which overtakes it.
        """
        silent, seen = 0, -1
        while silent < _BEATS:
            self._send({"type": "ping", "progress": self.progress})
            if self.relay.ended.wait(self._silence_s / _BEATS):
                return
            before, seen = seen, self.relay.signs_of_life
            silent = 0 if seen != before or self.relay.held_by_worker else silent + 1
        self.relay.fail(PeerError(f"peer stalled: no heartbeat for {self._silence_s:g} s"))


def _decode(payload: bytes) -> dict[str, object]:
    if len(payload) > _MAX_MESSAGE:
        raise WireError(f"control message of {len(payload)} bytes; at most {_MAX_MESSAGE}")
    try:
        message = json.loads(
            payload.decode(), parse_constant=_refuse_constant, object_pairs_hook=names_once
        )
    except (ValueError, RecursionError) as error:
        raise WireError("control message that is not JSON") from error
    if not isinstance(message, dict):
        raise WireError("control message that is not a JSON object")
    return message


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def heard(text: str) -> str:
    """Return words of a peer as one harmless line of bounded length."""
    return one_line(text[:_MAX_REASON])
