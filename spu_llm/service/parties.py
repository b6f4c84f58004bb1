"""The two roles as commands: `serve` (provider), `generate` (client), and `demo` (both)."""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models.family import ModelConfig, check_ranges, config_from, family_of
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError, PeerError, SpuLlmError
from spu_llm.core.settings import SpuConfig
from spu_llm.net.control import Control
from spu_llm.net.manifest import Manifest, Scalar, source_digest
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import NETWORKS
from spu_llm.net.stream import ByteStream, Listener, TcpStream, connect, listen
from spu_llm.offline.peer_directories import open_directory
from spu_llm.service import programs
from spu_llm.service.supervisor import Outcome, Worker, python_command, run_session
from spu_llm.service.watch import WAIT_S
from spu_llm.systems.decoding.request import Request

CONNECT_S = 20.0
# A provider greets as soon as it accepts; one that is busy leaves the client waiting.
GREETING_S = 6.0
HANDSHAKE_S = 10.0
PROVIDER_EXIT_S = 2.0
# How long SPU waits for one message: the supervisors judge first, and say why.
LINK_TIMEOUT_MS = int(1000 * (WAIT_S + 60))


def _shared_manifest(tokenizer: Tokenizer, network: str) -> Manifest:
    return {
        "version": version("spu-llm"),
        "sources": source_digest(),
        "jax.version": version("jax"),
        "tokenizer": tokenizer.digest,
        "network": network,
        **SpuConfig().manifest(),
    }


def _job(agreed: Manifest) -> dict[str, Any]:
    """What both workers are told, taken from the settings both sides agreed on."""

    def part(prefix: str) -> dict[str, Any]:
        return {k.removeprefix(prefix): v for k, v in agreed.items() if k.startswith(prefix)}

    request = part("request.")
    if "program" not in request:
        raise InputError("the client asks for no program")
    program = request.pop("program")
    return {
        "program": program,
        "model": part("model."),
        "request": request,
        "spu": asdict(programs.spu_config(program)),
        "timeout_ms": LINK_TIMEOUT_MS,
    }


# ---- provider


@dataclass(frozen=True)
class ServeOptions:
    model: Path
    host: str
    port: int
    network: str
    once: bool
    studies: bool  # also take part in measurements, which open more than a completion does
    pool: Path | None  # where material outlives a session
    exit_with_parent: bool  # set by `demo`: end when the process that started this one has gone
    sampling_seed: int | None = None  # set by `demo --seed`: fixes the provider's joint randomness


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve completions with a private model, one session after another.

    A session that fails is reported through `say`; with `once` its error is raised instead.
    """
    # The weights too: what is wrong with them is said now, not in the middle of a session.
    config, params = load_model(options.model)
    check_ranges(family_of(config).fold(params, config), config)
    del params  # the worker reads its own
    tokenizer = Tokenizer.load(options.model)
    if options.pool is not None:
        open_directory(options.pool)
    listener = listen(options.host, options.port)
    try:
        print(f"serving {options.model} on {options.host}:{listener.port}", flush=True)
        while True:
            try:
                outcome = _serve_one(options, listener, config, tokenizer)
                traffic = outcome.wire_sent + outcome.wire_received
                say(f"session finished, {traffic / 1e6:.1f} MB on the wire")
            except SpuLlmError as exc:
                if options.once:
                    raise
                say(f"session failed: {exc}")
            if options.once:
                return
    finally:
        listener.close()


def _serve_one(
    options: ServeOptions, listener: Listener, config: ModelConfig, tokenizer: Tokenizer
) -> Outcome:
    stream = _accept(listener, options.exit_with_parent)
    control = Control(Relay(stream, NETWORKS[options.network], "provider"))
    fields = _shared_manifest(tokenizer, options.network)
    fields |= {f"model.{k}": v for k, v in config.asdict().items()}
    agreed = control.open_session(fields, HANDSHAKE_S)
    try:
        own = {
            "model_dir": str(options.model),
            "sampling_seed": options.sampling_seed,
            "pool_dir": _text(options.pool),
        }
        job = _job(agreed) | own
        _check_request(job, config, options)
    except InputError as exc:
        control.bye(str(exc), ok=False)
        raise
    worker = Worker()
    try:
        return run_session("provider", control, worker, job, lambda event: None)
    finally:
        worker.stop()


def _check_request(job: dict[str, Any], config: ModelConfig, options: ServeOptions) -> None:
    """InputError when this provider does not run what the client asks for."""
    program = job["program"]
    if program == programs.COMPLETION:
        Request.from_peer(job["request"]).check(config)
    elif program == programs.PREPARATION:
        if options.pool is None:
            raise InputError(
                "the provider keeps no material made ahead; it must be started with --pool"
            )
        check_preparation(job["request"], config)
    elif program not in programs.STUDIES:
        raise InputError(f"the client asks for an unknown program {program!r}")
    elif not options.studies:
        raise InputError(f"{program} is a study; the provider must be started with --studies")


def check_preparation(fields: Mapping[str, Any], config: ModelConfig) -> None:
    """InputError when a completion with these fields does not fit the model, or has not so many
    steps to prepare.
    """
    rest = dict(fields)
    steps = rest.pop("steps", None)
    request = Request.from_peer(rest)
    request.check(config)
    most = request.limit(config) - 1
    if type(steps) is not int or not 0 <= steps <= most:
        raise InputError(
            f"--steps must be 0 to {most}, the most that such a completion takes, found {steps!r}"
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _accept(listener: Listener, exit_with_parent: bool) -> TcpStream:
    while True:
        try:
            return listener.accept(timeout_s=1.0)
        except TimeoutError:
            # Standard input is a pipe whose other end the parent holds and never writes to.
            if exit_with_parent and select.select([0], [], [], 0)[0]:
                raise PeerError("the process that started this provider has gone") from None


# ---- client


@dataclass(frozen=True)
class Server:
    """Where a provider listens, and the network to emulate on the way there."""

    host: str
    port: int
    network: str


@dataclass(frozen=True)
class GenerateOptions:
    """`draft_seed` fixes the drafts; `sampling_seed` also acceptance and bonus draws."""

    prompt: str
    draft_model: Path
    server: Server
    max_new_tokens: int
    draft_length: int
    temperature: float
    verify: str = "token"
    top_k: int = 0
    top_p: float = 1.0
    show_progress: bool = False
    stop: tuple[str, ...] = field(default=())
    draft_seed: int | None = None
    sampling_seed: int | None = None
    pool: Path | None = None  # where material outlives the session
    # On the monotonic clock: what the first token's and all elapsed seconds are counted from.
    started: float = field(default_factory=time.monotonic, compare=False)


def generate(
    options: GenerateOptions,
    on_event: Callable[[dict[str, Any], Relay], None],
) -> dict[str, Any]:
    """Complete a prompt with a provider's private model; returns the `--json` object."""
    tokenizer, prompt, request = check_request(options)
    draft_vocab = load_config(options.draft_model).vocab_size if options.draft_length else None
    if options.pool is not None:
        open_directory(options.pool)

    def check(agreed: Manifest) -> None:
        config = model_config(agreed)
        request.check(config)
        check_vocabulary(tokenizer, config)
        if draft_vocab not in (None, config.vocab_size):
            raise InputError(
                f"the draft model has {draft_vocab} tokens, but the provider's model "
                f"{config.vocab_size}; choose another --draft-model, or --standard"
            )

    job = {
        "prompt": prompt,
        "draft_dir": str(options.draft_model),
        "stop": list(options.stop),
        "draft_seed": options.draft_seed,
        "sampling_seed": options.sampling_seed,
        "pool_dir": _text(options.pool),
    }
    first_token: list[float] = []

    def watch(event: dict[str, Any], relay: Relay) -> None:
        if event["event"] in ("text", "step") and not first_token:
            first_token.append(time.monotonic() - options.started)
        on_event(event, relay)

    outcome, agreed = run_as_client(
        options.server, tokenizer, programs.COMPLETION, asdict(request), job, watch, check=check
    )
    return _summary(options, outcome, agreed, first_token[0])


def run_as_client(
    server: Server,
    tokenizer: Tokenizer,
    program: str,
    request: Mapping[str, Scalar],
    job: dict[str, Any],
    on_event: Callable[[dict[str, Any], Relay], None],
    wrap: Callable[[ByteStream], ByteStream] = lambda stream: stream,
    check: Callable[[Manifest], None] = lambda agreed: None,
) -> tuple[Outcome, Manifest]:
    """Run `program` with the provider at `server`; the outcome and the agreed settings.

    `request` is told to the provider; `job` holds the client's own inputs and stays here. `wrap`
    may put a recorder around the connection, `check` refuse the agreed settings with InputError.
    """
    worker = Worker()  # its slow imports overlap with the handshake
    try:
        stream = wrap(connect(server.host, server.port, CONNECT_S))
        control = Control(Relay(stream, NETWORKS[server.network], "client"))
        fields = _shared_manifest(tokenizer, server.network) | {"request.program": program}
        fields |= {f"request.{k}": v for k, v in request.items()}
        _await_greeting(control, server)
        agreed = control.open_session(fields, HANDSHAKE_S)
        try:
            check(agreed)
        except InputError as exc:
            control.bye(str(exc), ok=False)
            raise
        outcome = run_session(
            "client",
            control,
            worker,
            _job(agreed) | job,
            lambda event: on_event(event, control.relay),
        )
    finally:
        worker.stop()
    return outcome, agreed


def _await_greeting(control: Control, server: Server) -> None:
    """PeerError when the other end is silent: not a provider, or busy."""
    deadline = time.monotonic() + GREETING_S
    while not control.relay.signs_of_life and not control.ended.wait(0.05):
        if time.monotonic() > deadline:
            control.close()
            raise PeerError(
                f"{server.host}:{server.port} accepts the connection but does not answer: "
                "no spu-llm provider, or one busy with another session; try again later"
            )


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """InputError when the provider's model lacks tokens that the tokenizer has."""
    if config.vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"the provider's model has {config.vocab_size} tokens, but the tokenizer "
            f"{tokenizer.vocab_size}; use the tokenizer that belongs to the model"
        )


def model_config(agreed: Manifest) -> ModelConfig:
    """The model's shape as the provider states it; PeerError when it is none."""
    prefix = "model."
    fields: dict[str, Any] = {
        name.removeprefix(prefix): value
        for name, value in agreed.items()
        if name.startswith(prefix)
    }
    try:
        return config_from(fields)
    except ValueError as exc:
        raise PeerError(f"the provider's model description is wrong: {exc}") from None


def check_text(text: str, name: str) -> None:
    """InputError, which names it, when a text from the command line cannot be used."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid UTF-8 text; give it as UTF-8") from None
    if not text:
        raise InputError(f"{name} is empty; give at least one character of text")


def check_request(options: GenerateOptions) -> tuple[Tokenizer, list[int], Request]:
    """The tokenizer, the prompt's tokens and the request; InputError when they cannot be used."""
    for text, name in ((options.prompt, "the prompt"), *((s, "--stop") for s in options.stop)):
        check_text(text, name)
    tokenizer = Tokenizer.load(options.draft_model)
    prompt = tokenizer.encode(options.prompt)
    request = Request(
        prompt_tokens=len(prompt),
        max_new_tokens=options.max_new_tokens,
        draft_length=options.draft_length,
        temperature=options.temperature,
        verify=options.verify,
        top_k=options.top_k,
        top_p=options.top_p,
        show_progress=options.show_progress,
    )
    request.check_options()
    if options.draft_length:
        load_model(options.draft_model)
    return tokenizer, prompt, request


def _summary(
    options: GenerateOptions, outcome: Outcome, agreed: Manifest, first_token: float
) -> dict[str, Any]:
    result = outcome.result
    report, traffic, seconds = result["report"], result["traffic"], result["seconds"]

    def total(field_name: str, *phases: str) -> int:
        return sum(int(traffic[p][field_name]) for p in phases)

    online = ("prefill", "decode")
    return {
        "text": result["text"],
        "token_ids": result["token_ids"],
        "finish_reason": report["finish_reason"],
        "steps": report["steps"],
        "drafted": report["drafted"],
        "accepted": report["accepted"],
        "seconds": {p: round(seconds.get(p, 0.0), 3) for p in ("offline", *online)},
        "first_token_seconds": round(first_token, 3),
        "elapsed_seconds": round(time.monotonic() - options.started, 3),
        "bytes": {
            kind: {
                "client_to_provider": total("sent_bytes", *phases),
                "provider_to_client": total("received_bytes", *phases),
            }
            for kind, phases in (("offline", ("offline",)), ("online", online))
        },
        "messages": {
            kind: total("sent_messages", *phases) + total("received_messages", *phases)
            for kind, phases in (("offline", ("offline",)), ("online", online))
        },
        "wire_bytes": {
            "client_to_provider": outcome.wire_sent,
            "provider_to_client": outcome.wire_received,
        },
        "per_step": result["steps"],
        "learned": result["learned"],
        "config": {
            "draft_model": str(options.draft_model),
            "stop": list(options.stop),
            "draft_seed": options.draft_seed,
            "sampling_seed": options.sampling_seed,
            "pool": _text(options.pool),
            **agreed,
        },
    }


# ---- both


def demo(
    model: Path,
    options: GenerateOptions,
    on_event: Callable[[dict[str, Any], Relay], None],
) -> dict[str, Any]:
    """A provider process for `model` and this process as its client, over loopback; `options.pool`
    holds a directory of each.
    """
    check_request(options)[2].check(load_config(model))
    both, seed = options.pool, options.sampling_seed
    pool = provider_directory(both) if both is not None else None
    network = options.server.network
    with local_provider(model, network, sampling_seed=seed, pool=pool) as server:
        mine = client_directory(both) if both is not None else None
        return generate(replace(options, server=server, pool=mine), on_event)


def client_directory(pool: Path) -> Path:
    """The client's half of a pool directory for both parties."""
    return pool / "client"


def provider_directory(pool: Path) -> Path:
    """The provider's."""
    return pool / "provider"


@contextmanager
def local_provider(
    model: Path,
    network: str,
    *,
    studies: bool = False,
    sampling_seed: int | None = None,
    pool: Path | None = None,
) -> Iterator[Server]:
    """A provider process on this machine that serves one session.

    When the session fails because of the provider, the error says what the provider said.
    """
    command = [*python_command("spu_llm.app.cli"), "serve", "--model", str(model)]
    command += ["--listen", "127.0.0.1:0", "--network", network]
    command += ["--once", "--insecure", "--exit-with-parent"]
    command += ["--studies"] if studies else []
    command += [f"--sampling-seed={sampling_seed}"] if sampling_seed is not None else []
    command += [f"--pool={pool}"] if pool is not None else []
    provider = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # never written to: it closes when this process ends
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Server("127.0.0.1", _listening_port(provider), network)
    except PeerError as exc:
        raise _provider_failure(provider, exc) from exc
    finally:
        provider.terminate()
        try:
            provider.wait(PROVIDER_EXIT_S)
        except subprocess.TimeoutExpired:
            provider.kill()
            provider.wait()
        for pipe in (provider.stdin, provider.stdout, provider.stderr):
            assert pipe is not None
            pipe.close()


def _listening_port(provider: subprocess.Popen[str]) -> int:
    assert provider.stdout is not None
    line = provider.stdout.readline()
    if not line.startswith("serving "):
        raise PeerError("the provider did not start")
    return int(line.rsplit(":", 1)[1])


def _provider_failure(provider: subprocess.Popen[str], seen: SpuLlmError) -> SpuLlmError:
    """What the client saw, or what the provider said of it when it had any words left."""
    try:
        code = provider.wait(PROVIDER_EXIT_S)
    except subprocess.TimeoutExpired:
        return seen
    if code < 0:
        return PeerError(f"the provider process was killed by signal {-code}")
    assert provider.stderr is not None
    lines = provider.stderr.read().strip().splitlines()
    if not lines:
        return seen
    words = lines[-1].removeprefix("spu-llm: error: ")
    if words in str(seen):
        return seen
    return InputError(words) if code == 2 else PeerError(f"{seen}; the provider said: {words}")
