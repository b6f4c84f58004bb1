"""A completion: one session with a provider, and all that came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from models.files import files_of
from models.hf import load_config, load_model
from models.stops import Stops
from models.tokenizer import Tokenizer
from spu_llm.api.events import OnEvent, Text, event_of
from spu_llm.api.marking import Marking
from spu_llm.api.provider import Provider
from spu_llm.core.errors import InputError
from spu_llm.core.machine import Machine, machine
from spu_llm.net.manifest import Manifest
from spu_llm.net.relay import Relay
from spu_llm.offline.priority_lock import WAIT_S, going_first
from spu_llm.service.client import run_as_client
from spu_llm.service.first_contact import KeptFormat
from spu_llm.service.supervisor import Look, SessionOutcome
from spu_llm.systems.decoding.records import COMPLETION, ClientInputs
from spu_llm.systems.decoding.request import GenerationRequest
from spu_llm.systems.program import Program
from spu_llm.systems.split.secure_records import MiddleInputs


@dataclass(frozen=True)
class BothWays:
    """Bytes by direction."""

    client_to_provider: int
    provider_to_client: int

    @property
    def total(self) -> int:
        """Return the bytes of both directions."""
        return self.client_to_provider + self.provider_to_client


@dataclass(frozen=True)
class Seconds:
    """Seconds by phase; what is prefetched while another phase runs is in none of them."""

    offline: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class StepCost:
    """Cost of a decode step online, and of what was made ahead since the step before."""

    seconds: float
    bytes: int
    messages: int
    ahead_seconds: float
    ahead_bytes: int
    ahead_messages: int


@dataclass(frozen=True)
class Prefetched:
    """Correlated randomness that was made while a phase ran."""

    batches: int
    seconds: float


@dataclass(frozen=True)
class Completion:
    """Text that a model wrote after a prompt, its cost, and what each party learned by it. Its
    fields in JSON (`to_json`) are the command line's `--json`.
    """

    text: str
    token_ids: list[int]
    finish_reason: str  # "eos", "stop", "length" or "context"
    steps: int  # secure steps after the prefill
    drafted: int  # tokens that the client proposed
    accepted: int  # drafts that the verification kept
    seconds: Seconds
    made_beside: Prefetched
    first_token_seconds: float  # from the call to the first text, set-up and all
    elapsed_seconds: float
    bytes: dict[str, BothWays]  # payload, "offline" and "online"
    messages: dict[str, int]  # of both parties, "offline" and "online"
    wire_bytes: BothWays  # with framing and handshake
    per_step: list[StepCost]
    learned: dict[str, list[str]]  # by "client" and "provider", from the ledger
    machine: Machine
    config: dict[str, Any]  # settings of the session that both parties agreed on, and the client's

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class CompletionCall:
    """A completion to run."""

    request: GenerationRequest
    inputs: ClientInputs | MiddleInputs
    provider: Provider
    tokenizer: Tokenizer  # of the text
    text: KeptFormat | None = None  # what the tokenizer is from, if it is the provider's
    program: Program = COMPLETION
    model: Path | None = None  # directory of the client's, where it computes the ends of a model
    marking: Marking | None = None  # where `inputs` have a mark
    started: float = field(default_factory=time.monotonic)  # what seconds are counted from


def complete(
    call: CompletionCall,
    on_event: OnEvent = lambda event: None,
    on_wait: Callable[[str], None] = lambda words: None,
    look: Look = lambda: None,
) -> Completion:
    """Run a completion with a provider. `on_wait` hears when it waits until what is made in the
    background has given way; `look` is called several times a second, and may end the session by an
    error. SpuLlmError, of the kind that says who failed, when there is none.
    """
    provider, inputs, text = call.provider, call.inputs, call.text
    Stops.of(inputs.stop, call.tokenizer)
    _check(call)
    if provider.server is None:
        call.request.check(load_config(provider.model, provider.ranges, encoders=True))

    first_token: list[float] = []

    def heard(said: dict[str, Any], relay: Relay) -> None:
        if call.marking is not None and call.marking.noted(said):
            return
        if said["event"] in ("text", "step") and not first_token:
            first_token.append(time.monotonic() - call.started)
        if isinstance(event := event_of(said, relay), Text):
            event = replace(event, continues=text is None or not text.text.after_prompt)
        if event is not None:
            on_event(event)

    drafting = None if inputs.draft_dir is None else Path(inputs.draft_dir)
    models = [one for one in (drafting, call.model) if one is not None]
    with _first(provider, on_wait), provider.reached(inputs.sampling_seed) as (server, pool):
        outcome, agreed = run_as_client(
            server,
            call.program,
            call.request,
            inputs,
            heard,
            tokenizer=call.tokenizer,
            text_format=None if text is None else text.text.digest,
            reads=reads_of(text, models),
            pool=pool,
            hint_cache=provider.hint_cache,
            jobs=provider.jobs,
            look=look,
        )
        return _completion(call, pool, outcome, agreed, first_token[0])


def reads_of(text: KeptFormat | None, models: Sequence[Path]) -> list[Path]:
    """Return the files that the client's worker reads: with how text is written, and of models."""
    files = [file for model in models for file in files_of(model)]
    return files if text is None else [*files, text.path]


def _first(provider: Provider, on_wait: Callable[[str], None]) -> AbstractContextManager[None]:
    """Let the completion go first in the client's directory: nothing is made in the background."""
    if (directory := provider.client_pool) is None:
        return nullcontext()
    words = f"waiting for prepare --watch to give way, {WAIT_S:g} s at most"
    return going_first(directory, lambda: on_wait(words))


def _check(call: CompletionCall) -> None:
    """Raise InputError for what no provider could serve, and for a draft model that cannot be
    used.
    """
    call.request.check_options()
    after = call.text is not None and call.text.text.after_prompt
    if after and call.marking is not None:
        raise InputError(
            "a text after what an encoder reads has no watermark; leave --watermark out"
        )
    if call.request.draft_length and call.inputs.draft_dir is not None:
        config, _ = load_model(Path(call.inputs.draft_dir), encoders=True)
        if config.encodes != bool(after):
            raise InputError(
                f"--draft-model is a {config.title} model, and only one of it and the provider's "
                "model reads a prompt with an encoder; give another"
            )


def _completion(
    call: CompletionCall,
    pool: Path | None,
    outcome: SessionOutcome,
    agreed: Manifest,
    first_token: float,
) -> Completion:
    result, inputs = outcome.result, call.inputs
    report, seconds = result["report"], result["seconds"]
    return Completion(
        text=result["text"],
        token_ids=result["token_ids"],
        finish_reason=report["finish_reason"],
        steps=report["steps"],
        drafted=report["drafted"],
        accepted=report["accepted"],
        seconds=Seconds(*(round(seconds.get(p, 0.0), 3) for p in sum(PHASES.values(), []))),
        made_beside=Prefetched(**result["beside"]),
        first_token_seconds=round(first_token, 3),
        elapsed_seconds=round(time.monotonic() - call.started, 3),
        bytes=payload(result["traffic"], PHASES),
        messages=messages(result["traffic"], PHASES),
        wire_bytes=BothWays(outcome.wire_sent, outcome.wire_received),
        per_step=[StepCost(**step) for step in result["steps"]],
        learned=result["learned"],
        machine=machine(),
        config={
            "draft_model": inputs.draft_dir,
            "ngrams": isinstance(inputs, ClientInputs) and inputs.ngrams,
            "stop": inputs.stop,
            "watermark": None if call.marking is None else call.marking.told,
            "draft_seed": inputs.draft_seed,
            "sampling_seed": inputs.sampling_seed,
            "pool": None if pool is None else str(pool.absolute()),
            **agreed,
        },
    )


Phases = dict[str, list[str]]  # names of sums, and the phases that each adds up
PHASES: Phases = {"offline": ["offline"], "online": ["prefill", "decode"]}


def payload(traffic: dict[str, Any], phases: Phases) -> dict[str, BothWays]:
    """Return the payload bytes of a client's phases, by direction."""
    return {
        name: BothWays(
            *(
                sum(int(traffic[phase][way]) for phase in some)
                for way in ("sent_bytes", "received_bytes")
            )
        )
        for name, some in phases.items()
    }


def messages(traffic: dict[str, Any], phases: Phases) -> dict[str, int]:
    """Return how many messages both parties sent in these phases."""
    return {
        name: sum(
            int(traffic[phase][way])
            for phase in some
            for way in ("sent_messages", "received_messages")
        )
        for name, some in phases.items()
    }
