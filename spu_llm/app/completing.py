"""The commands `generate` and `demo`: a completion, with a provider elsewhere or here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models.family import ModelConfig
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.net.manifest import Manifest
from spu_llm.net.relay import Relay
from spu_llm.service.client import OnEvent, Server, run_as_client
from spu_llm.service.launching import client_directory, local_provider, provider_directory
from spu_llm.service.supervisor import Outcome
from spu_llm.systems.decoding.records import COMPLETION, ClientInputs
from spu_llm.systems.decoding.request import Request


@dataclass(frozen=True)
class GenerateOptions:
    request: Request
    inputs: ClientInputs
    server: Server
    pool: Path | None = None  # where material outlives the session
    # On the monotonic clock: what the first token's and all elapsed seconds are counted from.
    started: float = field(default_factory=time.monotonic, compare=False)


def encoded(prompt: str, directory: Path) -> list[int]:
    """The tokens of a prompt from the command line, by the tokenizer in `directory`."""
    _check_text(prompt, "the prompt")
    return Tokenizer.load(directory).encode(prompt)


def generate(options: GenerateOptions, on_event: OnEvent) -> dict[str, Any]:
    """Complete a prompt with a provider's private model; returns the `--json` object."""
    draft_vocab = _check(options)

    def check(config: ModelConfig) -> None:
        if draft_vocab not in (None, config.vocab_size):
            raise InputError(
                f"the draft model has {draft_vocab} tokens, but the provider's model "
                f"{config.vocab_size}; choose another --draft-model, or --standard"
            )

    first_token: list[float] = []

    def watch(event: dict[str, Any], relay: Relay) -> None:
        if event["event"] in ("text", "step") and not first_token:
            first_token.append(time.monotonic() - options.started)
        on_event(event, relay)

    outcome, agreed = run_as_client(
        options.server, COMPLETION, options.request, options.inputs, watch,
        tokenizer=Tokenizer.load(Path(options.inputs.draft_dir)), pool=options.pool, check=check,
    )  # fmt: skip
    return _summary(options, outcome, agreed, first_token[0])


def demo(model: Path, options: GenerateOptions, on_event: OnEvent) -> dict[str, Any]:
    """A provider process for `model` and this process as its client, over loopback; `options.pool`
    holds a directory of each.
    """
    _check(options)
    options.request.check(load_config(model))
    both, seed = options.pool, options.inputs.sampling_seed
    pool = provider_directory(both) if both is not None else None
    network = options.server.network
    with local_provider(model, network, sampling_seed=seed, pool=pool) as server:
        own = client_directory(both) if both is not None else None
        return generate(replace(options, server=server, pool=own), on_event)


def _check(options: GenerateOptions) -> int | None:
    """The draft model's vocabulary, if it drafts; InputError for what no provider could serve."""
    for text in options.inputs.stop:
        _check_text(text, "--stop")
    options.request.check_options()
    if not options.request.draft_length:
        return None
    return load_model(Path(options.inputs.draft_dir))[0].vocab_size


def _check_text(text: str, name: str) -> None:
    """InputError, which names it, when a text from the command line cannot be used."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid UTF-8 text; give it as UTF-8") from None
    if not text:
        raise InputError(f"{name} is empty; give at least one character of text")


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
            "draft_model": options.inputs.draft_dir,
            "stop": options.inputs.stop,
            "draft_seed": options.inputs.draft_seed,
            "sampling_seed": options.inputs.sampling_seed,
            "pool": None if options.pool is None else str(options.pool.absolute()),
            **agreed,
        },
    }
