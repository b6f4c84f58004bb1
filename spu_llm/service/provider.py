"""The provider: sessions with its clients, some of them at the same time, for a private model.

Every session has a thread, which owns its connection and its worker process; who connects while all
places are taken is told so and may try again. SIGTERM closes the port and lets sessions come to
their end, for a while; whatever else ends this process ends them at once, and their clients hear
why. (With `once`, SIGTERM does, too.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from spu_llm.core.errors import (
    BusyError,
    InputError,
    LimitError,
    PeerError,
    SpuLlmError,
    WantedError,
)
from spu_llm.core.freed import give_back
from spu_llm.core.settings import OWN
from spu_llm.net.control import Control
from spu_llm.net.control_plane import ControlServer, Document
from spu_llm.net.entrance import Entrance, Met
from spu_llm.net.identity import Certificate, Identity
from spu_llm.net.manifest import Manifest, agree, with_nonce
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import shape_of
from spu_llm.net.stream import Metered, listen
from spu_llm.offline.object_store import FsspecStore, url_of
from spu_llm.offline.peer_directories import directory_of, open_directory
from spu_llm.service import agreeing, journal, listening, programs
from spu_llm.service.admission import AdmissionControl, Admitted
from spu_llm.service.journal import Log, Record, Session
from spu_llm.service.limits import Accounts, Moves, Quotas
from spu_llm.service.listening import UNADMITTED_BYTES, Callers, Strangers
from spu_llm.service.renewing import Renewal
from spu_llm.service.served_models import ServedModels, loaded
from spu_llm.service.supervisor import HANDSHAKE_S, SessionWorker, run_session
from spu_llm.service.task import Task
from spu_llm.service.workers import Elsewhere, Workers, WorkersHere
from spu_llm.systems.program import Job, ProviderInputs
from spu_llm.systems.served import ServedSystem

CALL_BYTES = 8 << 20  # of a connection for calls: manifests or a document's parts, and gRPC's own
REFUSAL_BYTES = 256 << 10  # the same, once the client has moved all that it may
DRAIN_S = 60.0  # for sessions to come to their end
STOP_S = 10.0  # for them to tell their clients that they do not


@dataclass(frozen=True)
class ServeOptions:
    # Directories by name. A client that names none gets the first; a single one may be named "".
    models: Mapping[str, Path]
    host: str
    port: int
    network: str
    once: bool
    sessions: int  # at a time
    quotas: Quotas
    studies: bool  # also take part in measurements, which open more than a completion does
    pool: Path | None  # where correlated randomness outlives a session
    disk_bytes: int | None  # that it may take there, of all clients together
    jobs: int  # cores that make correlated randomness, if the client gives as many
    identity: Identity | None  # None: any client, in the clear
    exit_with_parent: bool  # end when the process that started this one has gone
    sampling_seed: int | None = None  # fixes the provider's joint randomness
    system_prompt: str = ""  # before every prompt, after what is public: no client gets to know it
    prefix_pad: int = 1  # so many rows, or a multiple, it takes in the client's eyes
    system: ServedSystem = field(default_factory=ServedSystem)
    ranges: Path | None = None  # of activations; None: those beside the model
    backend: str = OWN  # what computes forwards (`spu_llm.core.settings`)

    @staticmethod
    def rehearsal(model: Path, **changed: Any) -> ServeOptions:
        """Return the options of one session on this machine, in the clear, at a port that is free;
        `changed`: fields that are otherwise.
        """
        fields: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "network": "local",
            "once": True,
            "sessions": 1,
            "quotas": Quotas(),
            "studies": False,
            "pool": None,
            "disk_bytes": None,
            "jobs": 1,
            "identity": None,
            "exit_with_parent": False,
        }
        return ServeOptions({"": model}, **(fields | changed))


# Options that may change while a provider runs, for sessions that begin then. All else is what it
# was started for: its models, where it listens, what every client is told at the beginning.
RENEWED = ("identity", "sessions", "quotas", "disk_bytes")


def serve(
    options: ServeOptions,
    log: Log,
    on_port: Callable[[int], None],
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    renewal: Renewal[ServeOptions] | None = None,
    workers: Workers | None = None,
) -> None:
    """Run what clients ask for with private models.

    `on_port` hears where it listens, `on_event` what workers of this provider tell it. `log` gets a
    record of each session and refusal, on whichever thread; what it raises before a session's
    worker has its task ends the session. With `once` there is one session, whose error is raised.
    New sessions run under what `renewal` reads (`RENEWED`). `workers`: where they have their
    workers; None: on this machine.
    """
    # What is wrong is said now, not in the middle of a session.
    with loaded(options) as models:
        _serve(options, models, log, on_port, on_event, renewal, workers or WorkersHere())


def _serve(
    options: ServeOptions,
    models: ServedModels,
    log: Log,
    on_port: Callable[[int], None],
    on_event: Callable[[dict[str, Any]], None],
    renewal: Renewal[ServeOptions] | None,
    workers: Workers,
) -> None:
    if options.pool is not None:
        open_directory(options.pool)
        if (url := url_of(options.pool)) is not None:
            FsspecStore(url).check()
    workers.open(models)
    sessions = _Sessions(options, models, log, on_event, workers)
    with (
        closing(options.system) as system,
        sessions as all_,
        listen(options.host, options.port) as listener,
        closing(
            Entrance(listener, options.identity, all_.refused, options.exit_with_parent)
        ) as entrance,
    ):
        system.open(models.first.tokenizer, studies=options.studies)

        def renew(renewed: ServeOptions) -> None:
            entrance.renew(renewed.identity)
            workers.renew(renewed.identity)
            all_.renew(renewed)

        workers.listen(all_)
        on_port(listener.getsockname()[1])
        listening.listen(
            entrance,
            all_.start,
            options.exit_with_parent,
            look=lambda: None if renewal is None else renewal.look(renew),
            over=lambda: options.once and all_.over,
        )
    if options.once and all_.error is not None:
        raise all_.error


class _Sessions:
    """The sessions under way. At the end of the block they are left: with patience after SIGTERM,
    else at once. `over`: set when the first session has ended, or was refused, with `error` unless
    all was well.
    """

    def __init__(
        self,
        options: ServeOptions,
        models: ServedModels,
        log: Log,
        on_event: Callable[[dict[str, Any]], None],
        workers: Workers | None = None,
    ) -> None:
        self._options, self._models, self._log = options, models, log
        self._on_event, self._workers = on_event, workers or WorkersHere()
        places = 1 if options.once else options.sessions
        self._places = AdmissionControl(places, options.quotas)
        self._accounts = Accounts(options.quotas)
        self._control = ControlServer()
        self._callers = Callers(self._run_and_say)
        self.start = self._callers.start
        self.refused = Strangers(self.note_stranger).refused
        self._lock = threading.Lock()
        self._elsewhere, self._changed = 0, threading.Condition()
        self._stop, self._closing = threading.Event(), False
        self.over = False
        self.error: SpuLlmError | None = None

    def __enter__(self) -> _Sessions:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            # SIGTERM; another one ends the waiting.
            if isinstance(error, SystemExit) and not self._options.once:
                self._closing = True
                self._note(Record(journal.STOPPING))
                self._control.drain()
                self._join(DRAIN_S)
        finally:
            self._stop.set()
            self._join(STOP_S)
            self._control.close()

    def _join(self, seconds: float) -> None:
        """Wait until all sessions have ended and are logged, `seconds` at most."""
        deadline = time.monotonic() + seconds
        self._callers.join(seconds)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._elsewhere, max(0.0, deadline - time.monotonic())
            )

    def renew(self, options: ServeOptions) -> None:
        """Run new sessions under these options, as far as they can change (`RENEWED`)."""
        renewed = replace(self._options, **{name: getattr(options, name) for name in RENEWED})
        self._options = renewed
        if not renewed.once:
            self._places.renew(renewed.sessions, renewed.quotas)
        self._accounts.renew(renewed.quotas)

    def _run_and_say(self, met: Met) -> None:
        try:
            self._run(met)
        except Exception as exc:  # also one of this program's own; other sessions go on
            self._note_refused(_as_ours(exc), met.peer)

    def _note_refused(self, error: SpuLlmError, client: Certificate | None) -> None:
        busy = isinstance(error, BusyError)
        words = "one client too many was sent away" if busy else f"session failed: {error}"
        self._note(journal.refused(error, words, client))

    def note_stranger(self, words: str) -> None:
        """See `workers.Sessions`."""
        self._note(Record(journal.REFUSED, words))

    def _note(self, record: Record) -> None:
        """Log a record that nothing depends on; with `once`, failures are raised, not printed."""
        quiet = self._options.once and record.event != journal.FINISHED
        words = "" if quiet else record.words[: journal.MAX_WORDS]
        with suppress(WantedError):
            self._log(replace(record, words=words))

    def _end_once(self, error: SpuLlmError | None) -> None:
        """Note that a session has ended or was refused; strangers cannot cause this."""
        with self._lock:
            if not (self.over or isinstance(error, BusyError)):
                self.error, self.over = error, True

    def _run(self, met: Met) -> None:
        """Serve a connection to its end; raise what was wrong."""
        if met.for_calls:
            self._answer(met)
            return
        metered = Metered(met.stream, UNADMITTED_BYTES)
        relay = Relay(metered, shape_of(self._options.network), "provider")
        relay.hold_streams()
        with closing(Control(relay)) as control:
            admitted = self._entered(control, met)

            def work(session: Session) -> None:
                self._callers.settled(met)
                metered.most = None  # from here on, the client's account counts
                relay.allow_streams(programs.doors(programs.find(admitted.task.program)))
                self._work(control, admitted, session)

            self._run_admitted(admitted, relay, work)

    def run_elsewhere(self, one: Elsewhere) -> None:
        """See `workers.Sessions`."""
        with self._changed:
            self._elsewhere += 1
        try:
            self._run_elsewhere(one)
        finally:
            with self._changed:
                self._elsewhere -= 1
                self._changed.notify_all()

    def _run_elsewhere(self, one: Elsewhere) -> None:
        try:
            admitted = self._places.enter(one.shown, one.client)
        except PeerError as exc:
            one.refuse(exc)
            seen = one.snapshot()
            self._accounts.enter(one.client, seen.wire_bytes_sent + seen.wire_bytes_received)
            self._note_refused(exc, one.client)
            return

        def work(session: Session) -> None:
            with self._accounts.watching(admitted.client, one, one) as watch:

                def look() -> None:
                    self._look()
                    watch()

                def begin() -> None:
                    self._log(journal.begun(session))
                    admitted.begin()

                try:
                    try:
                        _check_door(admitted.task)  # the ticket may be of another port
                    except InputError as exc:
                        raise PeerError(str(exc)) from None
                    one.run(session, admitted, look, begin)
                except Exception as exc:
                    one.refuse(_as_ours(exc))
                    raise

        self._run_admitted(admitted, one, work)

    def _run_admitted(
        self, admitted: Admitted, moves: Moves, work: Callable[[Session], None]
    ) -> None:
        """Run a session, whose bytes `moves` counts, by `work`, and log how it ended."""
        session = Session.of(admitted.client, admitted.task.program, admitted.task.agreed)
        started, error = time.monotonic(), None
        try:
            work(session)
        except Exception as exc:
            error = _as_ours(exc)
        finally:
            self._end_once(error)
            self._places.leave(admitted)
        seen = moves.snapshot()
        if isinstance(error, BusyError):
            self._note(journal.no_room(session, error))
            return
        traffic = seen.wire_bytes_sent, seen.wire_bytes_received
        self._note(journal.ended(session, time.monotonic() - started, traffic, error))

    def _work(self, control: Control, admitted: Admitted, session: Session) -> None:
        """Run a session to its end; raise what ended it before."""
        worker = self._started(control, admitted, session)
        try:
            with self._accounts.watching(admitted.client, control.relay, worker) as watch:

                def look() -> None:
                    self._look()
                    watch()

                def begin() -> None:
                    self._log(journal.begun(session))
                    admitted.begin()

                run_session(control, worker, admitted.task, self._on_event, look, begin)
        finally:
            worker.stop()
            give_back()  # what passed between peer and worker

    def _started(self, control: Control, admitted: Admitted, session: Session) -> SessionWorker:
        """Return the session's worker; the client hears why there is none."""

        def look() -> None:
            self._look()
            control.check()

        try:
            return self._workers.start(session, admitted, look)
        except SpuLlmError as exc:
            busy = isinstance(exc, BusyError)
            told = busy or isinstance(exc, WantedError)
            words = str(exc) if told else "the provider's worker failed"
            control.bye(words, ok=False, busy=busy)
            raise

    def _entered(self, control: Control, met: Met) -> Admitted:
        """Return the session that a client shows the ticket of. PeerError when there is none."""
        try:
            # Nobody gets a place before it has said what it wants.
            shown = control.take_ticket(HANDSHAKE_S)
            try:
                return self._places.enter(shown, met.peer)
            except PeerError as exc:
                control.bye(str(exc), ok=False)
                raise
        except PeerError:
            seen = control.relay.snapshot()
            self._accounts.enter(met.peer, seen.wire_bytes_sent + seen.wire_bytes_received)
            raise

    def _answer(self, met: Met) -> None:
        """Answer calls, which move no more than they need, and count as a session's bytes do."""
        try:
            self._accounts.check(met.peer)
            most = CALL_BYTES
        except LimitError:  # which the client is to hear
            most = REFUSAL_BYTES
        metered = Metered(met.stream, most, partial(self._accounts.enter, met.peer))
        admit = partial(self._admit, client=met.peer, own=met.own, door=bool(met.door))
        tell, name = partial(self._tell, met.peer), partial(self._names, met.peer)
        self._control.serve(metered, admit, tell, name)

    def _tell(self, client: Certificate | None, model: str) -> Document:
        """Return how a model's text is written. Called on a thread of the control plane."""
        self._check_caller(client)
        text = self._models.find(model).text
        if text is None:
            raise InputError(
                "the provider's model has no tokenizer: it is served for studies alone"
            )
        return Document(text.digest, text.document)

    def _names(self, client: Certificate | None) -> list[str]:
        """Return the models' names. Called on a thread of the control plane."""
        self._check_caller(client)
        return self._models.names

    def _check_caller(self, client: Certificate | None) -> None:
        if self._closing:
            raise BusyError("the provider takes no more sessions")
        self._accounts.check(client)

    def _admit(
        self,
        asked: Mapping[str, object],
        client: Certificate | None,
        own: Certificate | None = None,
        door: bool = False,
    ) -> tuple[Manifest, bytes]:
        """Compare a client's manifest with this provider's. `own`: the certificate of this provider
        that the client has seen; `door`: it asks at another machine's port. Called on a thread of
        the control plane; what is raised goes to the client.
        """
        options = self._options
        try:
            if self._closing or (self._options.once and (self.over or self._places.taken)):
                raise BusyError("the provider takes no more sessions")
            self._accounts.check(client)
            seen: Manifest = {}
            if client is not None and own is not None:
                seen = agreeing.certificates(client=client, provider=own)
            pool, budgets = _disk(options, client)
            name, echoed = agreeing.asked_model(asked)
            model = self._models.find(name)
            offer = options.system.offer(_folder(options.system.directory, client))
            stated = with_nonce(
                model.stated | echoed | seen | agreeing.pool_id("provider", seen, pool)
            )
            agreed = agree(asked, stated)
            correlations = agreeing.peer_folder("provider", agreed, pool)
            held = ProviderInputs(
                str(model.directory),
                options.sampling_seed,
                budgets,
                model.weights,
                list(model.own_text),
                offer.served,
            )
            task = agreeing.task_of("provider", agreed, held, correlations, model.hints)
            job = _check(task, options)
            if door:
                _check_door(task)
            # It begins when the client comes: who is admitted and does not come leaves no trace.
            begin = partial(offer.begin, job)
            return stated, self._places.admit(task, client, begin, offer.writes)
        except Exception as exc:
            error = _as_ours(exc)
            self._note_refused(error, client)
            self._end_once(error)
            raise

    def _look(self) -> None:
        if self._stop.is_set():
            raise WantedError("the provider is shutting down")


def _disk(options: ServeOptions, client: Certificate | None) -> tuple[Path | None, dict[str, int]]:
    """Return where correlated randomness of this client is kept, and what it, or what a system
    keeps of the client, may take there and with all other clients'.
    """
    root = options.system.directory if options.pool is None else options.pool
    own = _folder(root, client)
    if root is None or own is None:
        return None, {}
    if options.pool is not None:
        open_directory(own)
    limits = {root: options.disk_bytes}
    if client is not None:
        limits[own] = options.quotas.of(client).disk_bytes
    budgets = {str(at): limit for at, limit in limits.items() if limit is not None}
    return None if options.pool is None else own, budgets


def _folder(root: Path | None, client: Certificate | None) -> Path | None:
    """Return a client's own directory in `root`; without certificates all clients have one."""
    return root if root is None or client is None else directory_of(root, client.fingerprint)


def _check_door(task: Task) -> None:
    """Raise InputError for a session that has no place at another machine's port."""
    if not agreeing.makes_beside(task):
        raise InputError(
            "this port of the provider takes sessions of producers alone (prepare or gateway, "
            "--door); for all else connect to the port of serve --listen"
        )


def _as_ours(exc: Exception) -> SpuLlmError:
    return exc if isinstance(exc, SpuLlmError) else SpuLlmError(f"{type(exc).__name__}: {exc}")


def _check(task: Task, options: ServeOptions) -> Job[Any, Any] | None:
    """Return the job that is asked for, InputError when this provider does not run it. Of a study,
    None: its worker checks it, since to import it takes seconds.
    """
    study = task.program in programs.STUDIES
    if study and not options.studies:
        raise InputError(f"{task.program} is a study; the provider must be started with --studies")
    options.system.check_program(task.program)
    if study:
        return None
    job = agreeing.job_of(programs.find(task.program), task)
    options.system.admit(job)
    return job
