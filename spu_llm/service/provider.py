"""The provider: sessions with one client after another, for a private model."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.family import check_ranges, family_of
from models.hf import load_model
from models.tokenizer import TOKENIZER_FILE, Tokenizer
from spu_llm.core.errors import InputError, PeerError, SpuLlmError
from spu_llm.net import tls
from spu_llm.net.control import Control
from spu_llm.net.identity import Identity
from spu_llm.net.manifest import Manifest
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import NETWORKS
from spu_llm.net.stream import ByteStream, TcpStream, accept, listen
from spu_llm.offline.peer_directories import open_directory
from spu_llm.service import agreeing, programs
from spu_llm.service.supervisor import HANDSHAKE_S, Outcome, Worker, run_session
from spu_llm.service.worker import Task
from spu_llm.systems.program import Held


@dataclass(frozen=True)
class ServeOptions:
    model: Path
    host: str
    port: int
    network: str
    once: bool
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
    """Run what clients ask for with a private model, one session after another.

    `on_port` hears where it listens. A session that fails is reported through `say`; with `once`
    its error is raised instead.
    """
    # The weights too: what is wrong with them is said now, not in the middle of a session.
    config, params = load_model(options.model)
    check_ranges(family_of(config).fold(params, config), config)
    del params  # the worker reads its own
    stated = agreeing.of_provider(config, _tokenizer(options), options.network, options.jobs)
    if options.pool is not None:
        open_directory(options.pool)
    with listen(options.host, options.port) as listener:
        on_port(listener.getsockname()[1])
        while True:
            try:
                outcome = _serve_one(options, listener, stated)
                traffic = outcome.wire_sent + outcome.wire_received
                say(f"session finished, {traffic / 1e6:.1f} MB on the wire")
            except SpuLlmError as exc:
                if options.once:
                    raise
                say(f"session failed: {exc}")
            if options.once:
                return


def _tokenizer(options: ServeOptions) -> Tokenizer | None:
    """The model's, if it has one; only studies can do without."""
    if options.studies and not (options.model / TOKENIZER_FILE).exists():
        return None
    return Tokenizer.load(options.model)


def _serve_one(options: ServeOptions, listener: socket.socket, stated: Manifest) -> Outcome:
    stream, seen = _known(_accept(listener, options.exit_with_parent), options.identity)
    control = Control(Relay(stream, NETWORKS[options.network], "provider"))
    agreed = control.open_session(stated | seen, HANDSHAKE_S)
    try:
        own = Held(str(options.model), options.sampling_seed, options.disk_bytes)
        task = agreeing.task_of("provider", agreed, own, options.pool)
        _check(task, options)
    except InputError as exc:
        control.bye(str(exc), ok=False)
        raise
    worker = Worker(task.program)
    try:
        return run_session(control, worker, task, lambda event: None)
    finally:
        worker.stop()


def _known(tcp: TcpStream, identity: Identity | None) -> tuple[ByteStream, Manifest]:
    """The connection to a client, and both parties' certificates as the manifest states them."""
    if identity is None:
        return tcp, {}
    stream = tls.as_server(tcp, tls.server_context(identity))
    return stream, agreeing.certificates(client=stream.peer, provider=identity.own)


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
