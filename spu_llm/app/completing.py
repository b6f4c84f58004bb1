"""The commands `generate`, `demo` and `prepare`: a completion, or material for some to come, with a
provider elsewhere or here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from models.files import files_of
from models.hf import load_config, load_model
from models.stops import Stops, check_text
from models.tokenizer import Tokenizer
from spu_llm.app.defaults import shipped
from spu_llm.app.marking import Marking
from spu_llm.app.material import limiting, tokens_of
from spu_llm.app.options import address, hint_cache_of, identity_of, jobs_of
from spu_llm.app.output import mb
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from spu_llm.net.manifest import Manifest
from spu_llm.net.relay import Relay
from spu_llm.offline.defaults import HINT_CACHE_BYTES
from spu_llm.offline.giving_way import WAIT_S, going_first
from spu_llm.offline.stock import stored_bytes
from spu_llm.service.client import OnEvent, Server, run_as_client
from spu_llm.service.first_contact import KeptFormat, text_format, text_format_here
from spu_llm.service.launching import local_provider
from spu_llm.service.supervisor import Look, Outcome
from spu_llm.systems.decoding.records import COMPLETION, PREPARATION, Ahead, ClientInputs
from spu_llm.systems.decoding.request import Course
from spu_llm.systems.program import Program
from spu_llm.systems.split.secure_records import MiddleInputs


class NoRoom(InputError):
    """The material of a single step is more than the disk that is given to it."""


@dataclass(frozen=True)
class Provider:
    """Whoever listens at `server`, or, without one, a process for `model` on this machine.

    `pool`: where material outlives the session, the client's; with a process here, a directory of
    each party in it. `jobs`: cores of a party that make material. `hint_cache`: bytes that the
    client's hints of all providers may take. `mark`: the key of
    a process here that marks texts. `ranges`: of its model, where they do not lie beside it.
    """

    network: str
    server: Server | None
    model: Path
    pool: Path | None
    jobs: int
    hint_cache: int = HINT_CACHE_BYTES
    mark: Path | None = None
    ranges: Path | None = None

    @property
    def halves(self) -> int:
        """Of all material, how many parties' lie in `pool`."""
        return 1 if self.server is not None else len(ROLES)

    @property
    def client_pool(self) -> Path | None:
        """The client's directory."""
        return self.pool if self.server is not None else self._own_pools[CLIENT]

    @property
    def _own_pools(self) -> list[Path | None]:
        """The parties' directories, both here."""
        return [self.pool and self.pool / role for role in ROLES]

    def text_format(self) -> KeptFormat:
        """How text of its model is written; errors as of `spu_llm.service.first_contact`."""
        return text_format_here(self.model) if self.server is None else text_format(self.server)

    @contextmanager
    def reached(self, sampling_seed: int | None = None) -> Iterator[tuple[Server, Path | None]]:
        """Where it listens, and the client's directory; `sampling_seed`: for a process here."""
        if self.server is not None:
            yield self.server, self.client_pool
            return
        pool = self._own_pools[PROVIDER]
        with local_provider(
            self.model, self.network, sampling_seed=sampling_seed, pool=pool, jobs=self.jobs,
            mark=self.mark, ranges=self.ranges,
        ) as server:
            yield server, self.client_pool


@dataclass(frozen=True)
class GenerateOptions:
    """`started`: on the monotonic clock: what the first token's and all elapsed seconds are counted
    from. `tokenizer`: of the text; `text`: what it is from, if that is the provider's. `model`: the
    directory of the client's, if it computes the ends of a split one. `marking`: where `inputs`
    have a mark.
    """

    request: Course
    inputs: ClientInputs | MiddleInputs
    provider: Provider
    started: float
    tokenizer: Tokenizer
    text: KeptFormat | None = None
    program: Program = COMPLETION
    model: Path | None = None
    marking: Marking | None = None


def provider_of(options: argparse.Namespace) -> Provider:
    """The provider that `--server` names, or one on this machine."""
    server = None
    if options.server is not None:
        server = Server(
            *address(options.server, "--server"), options.network, identity_of(options)
        )
    jobs = jobs_of(options, 1 if server is not None else 2)
    model = options.model or shipped("private")
    if server is not None and options.ranges is not None:
        raise InputError("--ranges are of a model on this machine; leave --server out")
    return Provider(
        options.network, server, model, options.pool, jobs, hint_cache_of(options),
        ranges=options.ranges,
    )  # fmt: skip


def check_texts(prefix: str, prompt: str) -> None:
    """InputError when a public prefix, "" for none, or a prompt cannot be used."""
    check_text(prompt, "the prompt")
    if prefix:
        check_text(prefix, "the public prefix")


def encoded(prefix: str, prompt: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens of a public prefix, with those that the tokenizer puts before any text, and of the
    prompt after it. InputError as of `check_texts`.
    """
    check_texts(prefix, prompt)
    public = tokenizer.encode(prefix) if prefix else tokenizer.beginning
    return public, tokenizer.encode(prompt, goes_on=True)


def generate(
    options: GenerateOptions, on_event: OnEvent, say: Callable[[str], None]
) -> dict[str, Any]:
    """Complete a prompt with a provider's private model; returns the `--json` object.

    `say` hears when it waits until what is made in the background has given way.
    """
    provider, inputs = options.provider, options.inputs
    Stops.of(inputs.stop, options.tokenizer)
    _check(options)
    if provider.server is None:
        options.request.check(load_config(provider.model, provider.ranges))

    first_token: list[float] = []

    def watch(event: dict[str, Any], relay: Relay) -> None:
        if options.marking is not None and options.marking.noted(event):
            return
        if event["event"] in ("text", "step") and not first_token:
            first_token.append(time.monotonic() - options.started)
        on_event(event, relay)

    drafting = None if inputs.draft_dir is None else Path(inputs.draft_dir)
    models = [one for one in (drafting, options.model) if one is not None]
    kept = options.text
    with _first(provider, say), provider.reached(inputs.sampling_seed) as (server, pool):
        outcome, agreed = run_as_client(
            server, options.program, options.request, inputs, watch,
            tokenizer=options.tokenizer, text_format=None if kept is None else kept.text.digest,
            reads=reads_of(kept, models), pool=pool,
            hint_cache=provider.hint_cache, jobs=provider.jobs,
        )  # fmt: skip
        return _summary(options, pool, outcome, agreed, first_token[0])


def reads_of(text: KeptFormat | None, models: Sequence[Path]) -> list[Path]:
    """Return the files that the client's worker reads: with how text is written, and of models."""
    files = [file for model in models for file in files_of(model)]
    return files if text is None else [*files, text.path]


def prepare(
    request: Ahead,
    tokenizer: Tokenizer,
    provider: Provider,
    on_event: OnEvent,
    disk_bytes: int | None = None,
    look: Look = lambda: None,
    *,
    program: Program = PREPARATION,
    text_format: str | None = None,
) -> dict[str, Any]:
    """Make material with a provider that keeps some, too; returns the `--json` object.

    `tokenizer`: of the text to come; `text_format`: the digest of what it is from, if that is the
    provider's. `disk_bytes`: only as much is made as the pool has room
    for, if all its material is to take no more; a provider may have less room. NoRoom when one step
    does not fit. `look` may end it.
    """
    request.check_options()
    if disk_bytes is not None:
        assert provider.pool is not None
        room = max(0, disk_bytes - stored_bytes(provider.pool))
        request = replace(request, room_bytes=room // provider.halves)
    with provider.reached() as (server, pool):
        outcome, agreed = run_as_client(
            server, program, request, on_event=on_event, tokenizer=tokenizer,
            text_format=text_format, pool=pool, hint_cache=provider.hint_cache,
            jobs=provider.jobs, look=look,
        )  # fmt: skip
    result = outcome.result
    if result["step_lacks_bytes"]:
        raise _no_room(request, provider, result)
    least, most = tokens_of(result["steps"], request.draft_length)
    return {
        "steps": result["steps"],
        "tokens": {"least": least, "most": most},
        "material": result["material"],
        "lacking_bytes": provider.halves * result["lacking_bytes"],
        "room_bytes": result["room_bytes"],
        "seconds": {"offline": round(result["seconds"]["offline"], 3)},
        **traffic_of(result["traffic"], offline=["offline"]),
        "learned": result["learned"],
        "config": {"pool": str(pool), "peer": result["peer"], **agreed},
    }


def _first(provider: Provider, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Nothing is made in the background, in the client's directory, meanwhile."""
    if (directory := provider.client_pool) is None:
        return nullcontext()
    words = f"waiting for prepare --watch to give way, {WAIT_S:g} s at most"
    return going_first(directory, lambda: say(words))


def _no_room(request: Ahead, provider: Provider, result: dict[str, Any]) -> NoRoom:
    """Why nothing was made."""
    rooms, halves = result["room_bytes"], provider.halves
    if limiting(rooms) == ROLES[PROVIDER]:
        halves, room = 1, mb(rooms[ROLES[PROVIDER]])
        least = f"the provider has room for {room}; it may give more (serve --disk)"
    else:
        least = f"--disk leaves {mb(halves * rooms[ROLES[CLIENT]])} in {provider.pool}; give more"
    return NoRoom(
        f"a prompt of {request.prompt_tokens} tokens and one step take "
        f"{mb(halves * result['step_lacks_bytes'])} more, but {least}"
    )


def _check(options: GenerateOptions) -> None:
    """InputError for what no provider could serve, and for a draft model that cannot be used."""
    options.request.check_options()
    if options.request.draft_length and options.inputs.draft_dir is not None:
        load_model(Path(options.inputs.draft_dir))


def _summary(
    options: GenerateOptions,
    pool: Path | None,
    outcome: Outcome,
    agreed: Manifest,
    first_token: float,
) -> dict[str, Any]:
    result = outcome.result
    report, seconds = result["report"], result["seconds"]
    online = ("prefill", "decode")
    return {
        "text": result["text"],
        "token_ids": result["token_ids"],
        "finish_reason": report["finish_reason"],
        "steps": report["steps"],
        "drafted": report["drafted"],
        "accepted": report["accepted"],
        "seconds": {p: round(seconds.get(p, 0.0), 3) for p in ("offline", *online)},
        "made_beside": result["beside"],
        "first_token_seconds": round(first_token, 3),
        "elapsed_seconds": round(time.monotonic() - options.started, 3),
        **traffic_of(result["traffic"], offline=["offline"], online=online),
        "wire_bytes": {
            "client_to_provider": outcome.wire_sent,
            "provider_to_client": outcome.wire_received,
        },
        "per_step": result["steps"],
        "learned": result["learned"],
        "machine": asdict(machine()),
        "config": {
            "draft_model": options.inputs.draft_dir,
            "ngrams": isinstance(options.inputs, ClientInputs) and options.inputs.ngrams,
            "stop": options.inputs.stop,
            "watermark": None if options.marking is None else options.marking.told,
            "draft_seed": options.inputs.draft_seed,
            "sampling_seed": options.inputs.sampling_seed,
            "pool": None if pool is None else str(pool.absolute()),
            **agreed,
        },
    }


def traffic_of(traffic: dict[str, Any], **kinds: Sequence[str]) -> dict[str, Any]:
    """Payload bytes by direction and messages of both parties; `kinds`: each of which phases."""

    def total(name: str, phases: Sequence[str]) -> int:
        return sum(int(traffic[phase][name]) for phase in phases)

    return {
        "bytes": {
            kind: {
                "client_to_provider": total("sent_bytes", phases),
                "provider_to_client": total("received_bytes", phases),
            }
            for kind, phases in kinds.items()
        },
        "messages": {
            kind: total("sent_messages", phases) + total("received_messages", phases)
            for kind, phases in kinds.items()
        },
    }
