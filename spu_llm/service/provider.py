"""The provider: sessions with its clients, some of them at the same time, for a private model.

Every session has a thread, which owns its connection and its worker process; who connects while all
places are taken is told so and may try again. SIGTERM closes the port and lets sessions come to
their end, for a while; whatever else ends this process ends them at once, and their clients hear
why. (With `once`, SIGTERM does, too.)
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.family import check_ranges, family_of
from models.hf import load_model
from models.tokenizer import TOKENIZER_FILE, Tokenizer
from spu_llm.core.errors import InputError, PeerError, SpuLlmError, WantedError
from spu_llm.net import tls
from spu_llm.net.control import Control
from spu_llm.net.identity import Identity
from spu_llm.net.manifest import Manifest
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import NETWORKS
from spu_llm.net.stream import ByteStream, TcpStream, accept, listen
from spu_llm.offline.peer_directories import open_directory
from spu_llm.service import agreeing, programs
from spu_llm.service.supervisor import HANDSHAKE_S, Look, Outcome, Worker, run_session
from spu_llm.service.worker import Task
from spu_llm.systems.program import Held

MAX_HANDSHAKES = 64  # connections that have no place yet, and of one address
HANDSHAKES_OF_ONE = 8
ACCEPT_AGAIN_S = 0.1
DRAIN_S = 60.0  # for sessions to come to their end
STOP_S = 10.0  # for them to tell their clients that they do not


@dataclass(frozen=True)
class ServeOptions:
    model: Path
    host: str
    port: int
    network: str
    once: bool
    sessions: int  # at a time
    studies: bool  # also take part in measurements, which open more than a completion does
    pool: Path | None  # where material outlives a session
    disk_bytes: int | None  # that it may take there, of all clients together
    jobs: int  # cores that make material, if the client gives as many
    identity: Identity | None  # None: any client, in the clear
    exit_with_parent: bool  # end when the process that started this one has gone
    sampling_seed: int | None = None  # fixes the provider's joint randomness


def serve(
    options: ServeOptions, say: Callable[[str], None], on_port: Callable[[int], None]
) -> None:
    """Run what clients ask for with a private model.

    `on_port` hears where it listens. A session that fails is reported through `say`; with `once`
    there is one, and its error is raised instead.
    """
    # The weights too: what is wrong with them is said now, not in the middle of a session.
    config, params = load_model(options.model)
    check_ranges(family_of(config).fold(params, config), config)
    del params  # the workers read their own
    stated = agreeing.of_provider(config, _tokenizer(options), options.network, options.jobs)
    if options.pool is not None:
        open_directory(options.pool)
    with _Sessions(options, stated, say) as all_, listen(options.host, options.port) as listener:
        on_port(listener.getsockname()[1])
        while True:
            tcp = _accept(listener, options.exit_with_parent)
            if options.once:
                all_.run(tcp)
                return
            all_.start(tcp)


class _Sessions:
    """Those under way. Left in the end: with patience after SIGTERM, else at once."""

    def __init__(
        self, options: ServeOptions, stated: Manifest, say: Callable[[str], None]
    ) -> None:
        self._options, self._stated, self._print = options, stated, say
        identity = options.identity
        self._context = None if identity is None else tls.server_context(identity)
        self._places = threading.BoundedSemaphore(options.sessions)
        self._lock, self._printing = threading.Lock(), threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._waiting: dict[threading.Thread, str] = {}  # without a place: their clients' addresses
        self._stop = threading.Event()

    def __enter__(self) -> _Sessions:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, SystemExit):  # SIGTERM; another one ends the waiting
                self._join(DRAIN_S)
        finally:
            self._stop.set()
            self._join(STOP_S)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with self._lock:
                thread = next(iter(self._threads), None)
            if thread is None:
                return
            thread.join(left)

    def start(self, tcp: TcpStream) -> None:
        """Run a session in a thread of its own; who comes too often is not even heard."""
        host = tcp.host
        with self._lock:
            alike = sum(other == host for other in self._waiting.values())
            if len(self._waiting) >= MAX_HANDSHAKES or alike >= HANDSHAKES_OF_ONE:
                tcp.close()
                return
            thread = threading.Thread(target=self._run_and_say, args=(tcp,), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # as many threads as this process may have
                tcp.close()
                return
            self._threads.add(thread)
            self._waiting[thread] = host

    def _run_and_say(self, tcp: TcpStream) -> None:
        try:
            self.run(tcp)
        except SpuLlmError as exc:
            self._say(f"session failed: {exc}")
        except Exception as exc:  # of this program; other sessions go on
            self._say(f"session failed: {type(exc).__name__}: {exc}")
        finally:
            self._wait_no_more()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _wait_no_more(self) -> None:
        with self._lock:
            self._waiting.pop(threading.current_thread(), None)

    def run(self, tcp: TcpStream) -> None:
        """One session, to its end; what was wrong with it is raised."""
        options = self._options
        stream, seen = self._known(tcp)
        relay = Relay(stream, NETWORKS[options.network], "provider")
        relay.hold_streams()
        with closing(Control(relay)) as control:
            # Nobody gets a place before it has said what it wants.
            agreed = control.open_session(self._stated | seen, HANDSHAKE_S)
            if not self._places.acquire(blocking=False):
                busy = f"the provider is busy with {options.sessions} sessions; try again later"
                control.bye(busy, ok=False)
                raise PeerError("one client too many was sent away")
            self._wait_no_more()
            relay.allow_streams()
            try:
                outcome = _run(options, control, agreed, self._look)
            finally:
                self._places.release()
        traffic = outcome.wire_sent + outcome.wire_received
        self._say(f"session finished, {traffic / 1e6:.1f} MB on the wire")

    def _known(self, tcp: TcpStream) -> tuple[ByteStream, Manifest]:
        """The connection to a client, and both parties' certificates as the manifest states them.
        """
        identity = self._options.identity
        if identity is None or self._context is None:
            return tcp, {}
        stream = tls.as_server(tcp, self._context)
        return stream, agreeing.certificates(client=stream.peer, provider=identity.own)

    def _say(self, line: str) -> None:
        with self._printing:
            self._print(line)

    def _look(self) -> None:
        if self._stop.is_set():
            raise WantedError("the provider is shutting down")


def _tokenizer(options: ServeOptions) -> Tokenizer | None:
    """The model's, if it has one; only studies can do without."""
    if options.studies and not (options.model / TOKENIZER_FILE).exists():
        return None
    return Tokenizer.load(options.model)


def _run(options: ServeOptions, control: Control, agreed: Manifest, look: Look) -> Outcome:
    try:
        own = Held(str(options.model), options.sampling_seed, options.disk_bytes)
        task = agreeing.task_of("provider", agreed, own, options.pool)
        _check(task, options)
    except InputError as exc:
        control.bye(str(exc), ok=False)
        raise
    worker = Worker(task.program)
    try:
        return run_session(control, worker, task, lambda event: None, look)
    finally:
        worker.stop()


def _check(task: Task, options: ServeOptions) -> None:
    """InputError when this provider does not run what the client asks for; of a study its worker
    says so: to import it takes seconds.
    """
    if task.program not in programs.STUDIES:
        agreeing.job_of(programs.find(task.program), task)
    elif not options.studies:
        raise InputError(f"{task.program} is a study; the provider must be started with --studies")


def _accept(listener: socket.socket, exit_with_parent: bool) -> TcpStream:
    while True:
        try:
            return accept(listener, timeout_s=1.0)
        except TimeoutError:
            # Standard input is a pipe whose other end the parent holds and never writes to.
            if exit_with_parent and select.select([0], [], [], 0)[0]:
                raise PeerError("the process that started this provider has gone") from None
        except OSError:  # a caller that has gone, or as many files as this process may have
            time.sleep(ACCEPT_AGAIN_S)
