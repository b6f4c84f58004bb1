"""Carries the workers' loopback connections, and control messages, over one connection.

A worker believes that its peer is a port on this machine, or two: a door for SPU's link, and one
for messages of our own. Behind a port the relay opens a numbered stream to the other party's relay,
which connects to the same door of its own worker. Either side opens streams: the client odd ids,
the provider even ones, each once and rising.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from spu_llm.core.errors import PeerError, WireError
from spu_llm.net.frames import (
    ABORT,
    END,
    HEADER_BYTES,
    PREAMBLE,
    Frame,
    FrameParser,
    Kind,
    StreamType,
    encode,
    write_data_header,
)
from spu_llm.net.manifest import Role
from spu_llm.net.pipe import ByteBudget, WorkerPipe
from spu_llm.net.shaping import NetworkShape
from spu_llm.net.stream import ByteStream
from spu_llm.net.uplink import Counters, Uplink
from spu_llm.net.worker_side import WorkerSide

CHUNK_BYTES = 256 << 10
MAX_STREAMS = 64  # open at a time, for each side that opens
HELD_BYTES = 64 << 20  # for workers slower than the network
WORKER_CONNECT_S = 10.0
HOLD_S = 15.0
QUIET_S = 0.2

_RETRY_S = 0.05
_JOIN_S = 5.0


class Relay:
    """One connection to the peer, which it owns. Delays apply to what this side sends.

    The first thing that breaks the connection ends up in `failure`; `ended` is set then, or when
    the connection closes after `expect_end`. All threads are daemons and stop by `close`.
    """

    def __init__(self, stream: ByteStream, shape: NetworkShape, role: Role) -> None:
        self.role: Role = role
        self.failure: PeerError | None = None
        self.heard_worker = False  # the peer's: something that it sent
        self.ended = threading.Event()
        self._stream = stream
        self._counters = Counters()
        self._uplink = Uplink(stream, shape, self._counters)
        self._held = ByteBudget(HELD_BYTES)
        self._lock = threading.Lock()
        self._pipes: dict[int, WorkerPipe] = {}
        self._threads: set[threading.Thread] = set()
        self._next_own = 1 if role == "client" else 2
        self._parity = self._next_own % 2
        self._last_of_peer = 0
        self._side: WorkerSide | None = None  # once it is known
        self._worker_known = threading.Event()
        self._end_expected = False
        self._streams_allowed = threading.Event()
        self._streams_allowed.set()
        self._doors: Collection[StreamType] = tuple(StreamType)  # that the peer may open

    def hold_streams(self) -> None:
        """Take the peer's control messages alone until `allow_streams`: whoever sends more has to
        wait, `HOLD_S` at most.
        """
        self._streams_allowed.clear()

    def allow_streams(self, doors: Collection[StreamType] = tuple(StreamType)) -> None:
        """Let the peer open streams to `doors`, as many as there may be."""
        self._doors = doors
        self._streams_allowed.set()

    def start(self, on_control: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Greet the peer and begin.

        `on_control` gets the payload of each CONTROL frame, in order, and may raise `WireError`;
        `on_end` is called once, after `ended` is set, on whichever thread ended it. Neither may
        block.
        """
        self._on_control, self._on_end = on_control, on_end
        self._spawn("send", self._uplink.run, PREAMBLE)
        self._spawn("receive", self._receive)

    def open_worker_side(self, side: WorkerSide) -> None:
        """Carry what goes to and from the own worker, which is reached by `side`: owned from here.

        The worker need not listen yet: a stream waits `WORKER_CONNECT_S` for it from here on, or
        from when the stream was opened.
        """
        assert self._side is None, "the worker side is opened once"
        with self._lock:
            if self.ended.is_set():
                side.close()
                raise self.failure or PeerError("the session has ended")
            self._side = side
        self._worker_known.set()
        for door in StreamType:
            self._spawn(f"accept-{door.name.lower()}", self._accept, side, door)

    def send_control(self, payload: bytes, *, after_data: bool = False) -> None:
        """Queue a CONTROL frame, ahead of waiting data unless `after_data`. Never blocks."""
        frame = encode(Frame(Kind.CONTROL, 0, payload))
        if after_data:
            self._uplink.send(frame)
        else:
            self._uplink.send_express(frame)

    def drop_data(self) -> None:
        """Take no more from the worker, and forget what has not left yet."""
        self._uplink.stop_data(drop=True)

    def finish_data(self, timeout_s: float) -> None:
        """Queue what the worker still writes on its open streams, then take no more.

        Done when the worker has closed its connections, at once if it has exited; when it leaves
        them open but was silent for `QUIET_S`; or after `timeout_s`.
        """
        now = quiet_since = time.monotonic()
        deadline = now + timeout_s
        taken = -1
        while not self.ended.is_set() and now < min(deadline, quiet_since + QUIET_S):
            with self._lock:
                if all(pipe.sent_close for pipe in self._pipes.values()):
                    break
            time.sleep(0.005)
            now = time.monotonic()
            if self._uplink.taken_bytes != taken or self._uplink.full:
                quiet_since = now
            taken = self._uplink.taken_bytes
        self._uplink.stop_data(drop=False)

    def expect_end(self) -> None:
        """Let the end of the connection be no failure from now on."""
        self._end_expected = True

    def fail(self, error: PeerError) -> None:
        """End the connection for this reason, unless it has ended already."""
        self._end(None if self._end_expected else error)

    def snapshot(self) -> Counters:
        """Return the totals so far."""
        return replace(self._counters)

    @property
    def signs_of_life(self) -> int:
        """Return how many bytes were received so far."""
        return self._counters.wire_bytes_received

    @property
    def held_by_worker(self) -> bool:
        """Return whether receiving waits for the own worker, so that the peer cannot be heard."""
        return self._held.waiting

    def close(self) -> None:
        """Close everything and wait for the threads. Not for the relay's own threads."""
        self._end(None)
        with self._lock:
            pipes = list(self._pipes.values())
        for pipe in pipes:
            pipe.abort()
        deadline = time.monotonic() + _JOIN_S
        while True:
            with self._lock:
                thread = next(iter(self._threads), None)
            if thread is None or time.monotonic() > deadline:
                return
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- the connection

    def _receive(self) -> None:
        parser = FrameParser()
        while True:
            data = self._stream.recv_some(CHUNK_BYTES)
            if not data:
                break
            self._counters.wire_bytes_received += len(data)
            for frame in parser.feed(data):
                self._dispatch(frame)
            self._held.wait_below_limit()
        if not self._end_expected:
            parser.finish()
        raise PeerError("connection to the peer was lost")

    def _dispatch(self, frame: Frame) -> None:
        if frame.kind is Kind.DATA:
            self._got_data(frame)
            return
        if frame.kind is Kind.CONTROL:
            self._on_control(frame.payload)
            return
        if not self._streams_allowed.wait(HOLD_S):
            raise WireError("the peer opens streams before there is a session")
        if frame.kind is Kind.OPEN:
            self._got_open(frame.stream, StreamType(frame.payload[0]))
        else:
            self._got_close(frame.stream, frame.payload)

    def _got_data(self, frame: Frame) -> None:
        pipe = self._pipes.get(frame.stream) or self._known(frame.stream)
        if pipe is None:
            return  # crossed our ABORT
        if pipe.got_close:
            raise WireError(f"data after the end of stream {frame.stream}")
        self.heard_worker = True
        if pipe.frames is not None:
            pipe.frames.look(frame.payload)
        try:
            pipe.deliver(frame.payload)
        except OSError:
            self._close_pipe(pipe, ABORT)

    def _got_open(self, stream: int, door: StreamType) -> None:
        if stream % 2 == self._parity:
            raise WireError(f"the peer opened stream {stream}, an id of this side")
        if stream <= self._last_of_peer:
            raise WireError(f"the peer opened stream {stream} again")
        if door not in self._doors:
            raise WireError(f"the peer opened a stream for {door.name}, which this program lacks")
        self._last_of_peer = stream
        pipe = WorkerPipe(stream, door, self._held)
        with self._lock:
            if self.ended.is_set():
                return
            opened = sum(known % 2 != self._parity for known in self._pipes)
            # Streams already closed may still be writing to the worker, on two threads each.
            if opened >= MAX_STREAMS or len(self._threads) > 8 * MAX_STREAMS:
                raise WireError(f"the peer opened more than {MAX_STREAMS} streams")
            self._pipes[stream] = pipe
        self._run_pipe(pipe)

    def _got_close(self, stream: int, mode: bytes) -> None:
        pipe = self._known(stream)
        if pipe is None:
            return
        if mode == ABORT:
            with self._lock:
                self._pipes.pop(stream, None)
            pipe.abort()
            return
        with self._lock:
            if pipe.got_close:
                raise WireError(f"stream {stream} ended twice")
            pipe.got_close = True
            if pipe.sent_close:
                self._pipes.pop(stream, None)
        pipe.end()

    def _known(self, stream: int) -> WorkerPipe | None:
        """Return the pipe, or None when it is gone; `WireError` when it never was."""
        own = stream % 2 == self._parity
        if stream >= self._next_own if own else stream > self._last_of_peer:
            raise WireError(f"frame for stream {stream}, which is not open")
        return self._pipes.get(stream)

    # ---- the worker

    def _accept(self, side: WorkerSide, door: StreamType) -> None:
        while not self.ended.is_set():
            try:
                sock = side.accept(door)
            except OSError:
                return
            if sock is not None:
                self._open_own(door, sock)

    def _open_own(self, door: StreamType, sock: socket.socket) -> None:
        with self._lock:
            own = sum(known % 2 == self._parity for known in self._pipes)
            if own >= MAX_STREAMS or self.ended.is_set():
                sock.close()
                return
            pipe = WorkerPipe(self._next_own, door, self._held)
            self._next_own += 2
            self._pipes[pipe.stream] = pipe
            self._uplink.send(encode(Frame(Kind.OPEN, pipe.stream, bytes([door]))))
        self._run_pipe(pipe, sock)

    def _run_pipe(self, pipe: WorkerPipe, sock: socket.socket | None = None) -> None:
        self._spawn(f"up-{pipe.stream}", self._pump, pipe, sock)
        self._spawn(f"down-{pipe.stream}", self._drain, pipe)

    def _pump(self, pipe: WorkerPipe, sock: socket.socket | None) -> None:
        """Carry one stream from the worker to the peer; without `sock`, connect to it first."""
        buffer = bytearray(HEADER_BYTES + CHUNK_BYTES)
        view = memoryview(buffer)
        try:
            if not pipe.attach(sock or self._connect_worker(pipe)):
                return
            while count := pipe.recv_into(view[HEADER_BYTES:]):
                write_data_header(buffer, pipe.stream, count)
                if not self._uplink.send_data(view[: HEADER_BYTES + count]):
                    return
            self._close_pipe(pipe, END)
        except OSError:
            self._close_pipe(pipe, ABORT)
        finally:
            pipe.release()

    def _drain(self, pipe: WorkerPipe) -> None:
        try:
            pipe.write_loop()
        except OSError:
            self._close_pipe(pipe, ABORT)
        finally:
            pipe.release()

    def _connect_worker(self, pipe: WorkerPipe) -> socket.socket:
        while not (pipe.aborted or self._worker_known.wait(_RETRY_S)):
            pass  # a session may wait for its place, for as long as its supervisor says
        deadline = time.monotonic() + WORKER_CONNECT_S
        while not pipe.aborted and time.monotonic() < deadline:
            assert self._side is not None
            with contextlib.suppress(OSError):
                return self._side.connect(pipe.door)
            time.sleep(_RETRY_S)
        raise ConnectionError("no worker to connect to")

    def _close_pipe(self, pipe: WorkerPipe, mode: bytes) -> None:
        """Tell the peer that this side of a stream ended, unless both sides know already."""
        with self._lock:
            if self._pipes.get(pipe.stream) is not pipe:
                return
            if mode == ABORT or pipe.got_close:
                del self._pipes[pipe.stream]
            pipe.sent_close = True
            # Sent under the lock: an OPEN that uses the freed place must not overtake it.
            self._uplink.send(encode(Frame(Kind.CLOSE, pipe.stream, mode)))
        if mode == ABORT:
            pipe.abort()

    # ---- ending

    def _end(self, error: PeerError | None) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            self.failure = error
            self.ended.set()
            pipes = list(self._pipes.values())
            side = self._side
        self._streams_allowed.set()
        self._uplink.close()
        self._held.close()
        self._stream.close()
        if side is not None:
            side.close()
        for pipe in pipes:
            if error is None:
                pipe.end()  # what has arrived still goes to the worker, until close
            else:
                pipe.abort()
        self._on_end()

    def _spawn(self, name: str, body: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(
            target=self._run, args=(body, *args), name=f"relay-{self.role}-{name}", daemon=True
        )
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def _run(self, body: Callable[..., None], *args: Any) -> None:
        try:
            body(*args)
        except PeerError as error:
            self.fail(error)
        except Exception as error:
            # A thread that died in silence would leave the session hanging.
            self.fail(PeerError(f"the relay broke: {error!r}"))
            raise
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
