"""The client: one session with a provider."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.family import ModelConfig
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError, NoAnswerError, PeerError, SpuLlmError
from spu_llm.core.freed import give_back
from spu_llm.core.settings import OWN
from spu_llm.net import tls
from spu_llm.net.control import Control
from spu_llm.net.control_plane import ask_to_open
from spu_llm.net.identity import Certificate, Identity
from spu_llm.net.manifest import Manifest, agree, with_nonce
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import shape_of
from spu_llm.net.stream import ByteStream, connect
from spu_llm.offline.defaults import HINT_CACHE_BYTES
from spu_llm.offline.object_store import store_of
from spu_llm.offline.peer_directories import open_directory
from spu_llm.offline.silent.cache import HintCache, peer_folder
from spu_llm.offline.silent.store import default_directory
from spu_llm.service import agreeing, programs
from spu_llm.service.hint_room import HintRoom
from spu_llm.service.supervisor import Look, SessionOutcome, Worker, kept_folders, run_session
from spu_llm.systems.program import Nothing, Program

CONNECT_S = 20.0
OPEN_S = 6.0

OnEvent = Callable[[dict[str, Any], Relay], None]


@dataclass(frozen=True)
class Server:
    """The address where a provider listens, the network to emulate on the way there, who is trusted
    there (None: whoever answers, in the clear), what computes forwards (`spu_llm.core.settings`),
    and the name of the model that is asked for (empty: the first one).
    """

    host: str
    port: int
    network: str
    identity: Identity | None = None
    backend: str = OWN
    served_model: str = ""


def run_as_client(
    server: Server,
    program: Program,
    request: Any,
    inputs: Any = Nothing(),
    on_event: OnEvent = lambda event, relay: None,
    *,
    tokenizer: Tokenizer | None = None,
    text_format: str | None = None,
    reads: Sequence[Path] = (),
    writes: Sequence[Path] = (),
    pool: Path | None = None,
    hint_cache: int = HINT_CACHE_BYTES,
    jobs: int = 1,
    wrap: Callable[[ByteStream], ByteStream] = lambda stream: stream,
    look: Look = lambda: None,
    hears: Callable[[Callable[..., None]], None] = lambda tell: None,
) -> tuple[SessionOutcome, Manifest]:
    """Run `program` with the provider at `server`; return the outcome and the agreed settings.

    `request` is told to the provider, `inputs` stay here. `tokenizer`: of the client, where the
    program has text; `text_format`: the digest of what it is from, if that is the provider's
    (`first_contact`), which must state the same now. `reads`, `writes`: files and directories of
    its worker. `hint_cache`: bytes that hints of all providers may take; InputError where this
    one's take more. `jobs`: cores that make correlated randomness, if the provider gives as many.
    `wrap` may put a recorder around the connection. `look` is called while the workers are at it.
    `hears` gets what says something to the worker while it runs (`Worker.tell`).
    """
    assert (tokenizer is not None) == program.text
    if pool is not None:
        open_directory(pool)
    stated = agreeing.of_client(
        program,
        request,
        tokenizer,
        server.network,
        jobs,
        backend=server.backend,
        model=server.served_model,
    )
    agreed, ticket = open_session(server, stated, pool)
    correlations = agreeing.peer_folder("client", agreed, pool)
    hints = peer_folder(default_directory("client"), agreeing.pair_of(agreed))
    # Begins with its slow imports when the provider's does.
    worker = Worker(
        programs.place_of(program.name),
        reads=reads,
        writes=[*kept_folders(hints, correlations), *writes],
        confined=program.name not in programs.STUDIES,
        objects=None if correlations is None else store_of(correlations),
    )
    room = HintRoom(HintCache(hints, hint_cache), worker)
    try:
        stream, provider = connected(server, tls.DATA)
        relay = Relay(wrap(stream), shape_of(server.network), "client")
        relay.allow_streams(programs.doors(program))
        control = Control(relay)
        control.show_ticket(ticket)
        try:
            _check_same(agreed, provider)
            if text_format is not None:
                agreeing.check_text_format(agreed, text_format)
            config, before = agreeing.stated_model(agreed)
            agreeing.check_request(program, request, config, before)
            if tokenizer is not None:
                _check_vocabulary(tokenizer, config)
        except SpuLlmError as exc:
            control.bye(str(exc), ok=False)
            raise
        task = agreeing.task_of("client", agreed, inputs, correlations, hints)

        def heard(event: dict[str, Any]) -> None:
            if not room.heard(event):
                on_event(event, control.relay)

        hears(worker.tell)
        outcome = run_session(control, worker, task, heard, look)
    finally:
        worker.stop()
        room.close()
        give_back()  # what passed between peer and worker; a gateway has many sessions
    return outcome, agreeing.without_ids(agreed)


def connected(server: Server, protocol: str) -> tuple[ByteStream, Certificate | None]:
    """Return a connection to the provider, for calls or for data (`tls.CONTROL`, `tls.DATA`), and
    its certificate. PeerError when there is none, or not with whom this party trusts.
    """
    tcp = connect(server.host, server.port, CONNECT_S)
    if server.identity is None:
        return tcp, None
    stream = tls.as_client(tcp, server.identity, server.host, protocol)
    return stream, stream.peer


def open_session(
    server: Server, stated: Manifest, pool: Path | None = None
) -> tuple[Manifest, bytes]:
    """Return the settings agreed on with the provider, and the ticket for the session's data.
    ManifestMismatch, InputError or PeerError when there is none.
    """
    stream, provider = connected(server, tls.CONTROL)
    seen: Manifest = {}
    if provider is not None and server.identity is not None:
        seen = agreeing.certificates(client=server.identity.own, provider=provider)
    stated = with_nonce(stated | seen | agreeing.pool_id("client", seen, pool))
    with answering(server):
        theirs, ticket = ask_to_open(stream, stated, OPEN_S)
    return agree(stated, theirs), ticket


@contextmanager
def answering(server: Server) -> Iterator[None]:
    """Raise PeerError, which names the server, where it does not answer a call."""
    try:
        yield
    except NoAnswerError as exc:
        raise PeerError(
            f"{server.host}:{server.port} accepts the connection but does not answer: "
            "no spu-llm provider, or one with too many connections; try again later"
        ) from exc


def _check_same(agreed: Manifest, provider: Certificate | None) -> None:
    """Raise PeerError when another party answers than the one that gave the ticket."""
    if provider is not None and agreed["certificate.provider"] != provider.fingerprint:
        raise PeerError(f"another provider answers now: {provider}")


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise InputError when the provider's model lacks tokens of the tokenizer, or has others."""
    if config.vocab_size != tokenizer.vocab_size:
        raise InputError(
            f"the provider states a model of {config.vocab_size} tokens, but its tokenizer has "
            f"{tokenizer.vocab_size}; it must serve the model with the tokenizer that belongs to it"
        )
