"""The program behind `demo`, `serve` and `generate`: one completion, this party's side."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from models.draft import Drafter, Proposer
from models.family import ModelConfig, weight_shapes
from models.hf import load_model
from models.ngrams import Ngrams
from models.resident import mapped
from models.t5 import T5Config
from models.text_format import TextFormat
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from protocols.verification.race import Race
from protocols.verification.variants import Rule
from spu_llm.core.channel import Traffic
from spu_llm.core.errors import InputError, PeerError
from spu_llm.core.meter import Entry
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import private_tree
from spu_llm.systems.decoding.branching import Branching, Chains, Single
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion, Report, announce, announce_end, generate
from spu_llm.systems.decoding.records import CANDIDATES_ALONE, ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.decoding.session_shape import ModelPart, Text, WholeModel
from spu_llm.systems.program import Job, ProviderInputs, Send

C = TypeVar("C")  # the client's own inputs

PHASES = ("offline", "prefill", "decode")


def run(session: PartySession, job: Job[Request, ClientInputs], send: Send) -> dict[str, Any]:
    """Run a completion: prepare, prefill and decode. The client's result also has the text."""
    return complete(session, job, send, client_side_of)


def complete(
    session: PartySession,
    job: Job[Any, C],
    send: Send,
    client_side: Callable[[C, Completion, Send], ClientSide],
) -> dict[str, Any]:
    """Run a completion for any `GenerationRequest`: prepare, prefill and decode. `client_side`
    makes the client's half from its inputs; the client's result also has the text.
    """
    config = job.model
    completion = Completion.of(config, job.request, job.before, job.backend)
    with session.meter.in_phase("offline"):
        text = held_text(session, completion, job)
        weights = held_weights(session, config, job, completion.layout.part)
        decoder = completion.decoder(session, weights, text)
        completion.prepare(session, decoder)
    client = client_side(job.client, completion, send) if session.rank == CLIENT else None
    provider = provider_stream(job.provider) if client is None else None

    def on_step(report: Report) -> None:
        send("step", steps=report.steps, accepted=report.accepted, drafted=report.drafted)

    send("stage", name=f"prefilling {job.request.prompt_tokens} tokens")
    report = generate(session, completion, decoder, client, provider, on_step)
    result: dict[str, Any] = {
        "report": asdict(report),
        "seconds": session.meter.seconds,
        "beside": made_beside(session.meter.entries),
        "traffic": {phase: asdict(session.meter.traffic(phase)) for phase in PHASES},
        "steps": per_step(session.meter.entries),
        "learned": session.ledger.learned(),
    }
    if client is not None:
        result |= {"text": client.text, "token_ids": client.tokens}
    return result


def held_weights(
    session: PartySession, config: ModelConfig, job: Job[Any, Any], part: ModelPart = WholeModel()
) -> Any:
    """Return the private model's weights of a part as values of the session; the provider has them
    in memory, or reads them.
    """
    provider = job.of_provider
    if provider is not None and provider.weights is not None:
        return private_tree(session, PROVIDER, _placed, part.shapes(config), provider, config, part)
    params = None if provider is None else load_model(Path(provider.model_dir), encoders=True)[1]
    return share_weights(session, config, params, part)


def _placed(provider: ProviderInputs, config: ModelConfig, part: ModelPart) -> Any:
    """Return the part's weights, which lie in memory alone or with all others."""
    assert provider.weights is not None
    if provider.served.alone:
        return mapped(provider.weights, part.shapes(config))
    return part.of_whole(mapped(provider.weights, weight_shapes(config)))


def held_text(session: PartySession, completion: Completion, job: Job[Any, Any]) -> Text | None:
    """Return what stands before the prompt, as values of the session; the provider has its own text
    in memory. None where nothing does.
    """
    provider = job.of_provider
    return completion.text(session, () if provider is None else provider.system_prompt)


def provider_stream(held: ProviderInputs) -> Prg:
    """Return what the provider draws joint randomness from."""
    if held.served.stream_key is not None:
        return Prg(bytes.fromhex(held.served.stream_key))
    return stream("joint randomness", held.sampling_seed)


def stream(label: str, seed: int | None) -> Prg:
    """Return a keyed stream: from the OS unless the run is to be repeatable."""
    return Prg.from_os() if seed is None else Prg.from_seed(seed, label)


def client_side_of(inputs: ClientInputs, completion: Completion, send: Send) -> ClientSide:
    """Return the client's half of a completion, by its own model and mark."""
    streams = streams_of(inputs.draft_seed, inputs.sampling_seed)
    text = TextFormat.load(Path(inputs.text_format))
    _check_after_prompt(text, completion.layout.config)
    tokenizer = text.tokenizer
    rule, branching = _rules(inputs, completion, tokenizer, streams, send)
    return ClientSide(
        prompt=inputs.prompt,
        tokenizer=tokenizer,
        drafter=drafter_of(inputs.draft_dir, completion, inputs.ngrams, inputs.prompt),
        verifier=rule,
        streams=streams,
        stop=inputs.stop,
        on_text=lambda text, drafted: send("text", text=text, drafted=drafted),
        prefix=list(completion.request.public_prefix),
        branching=branching,
        begins=completion.layout.config.encodes,
    )


def _check_after_prompt(text: TextFormat, config: ModelConfig) -> None:
    """Raise PeerError unless the tokens after the prompt are what the provider's model wants."""
    start = config.decoder_start_token_id if isinstance(config, T5Config) else None
    if (text.after_prompt[-1] if text.after_prompt else None) != start:
        raise PeerError(
            f"the provider's text format ends prompts for another model than the {config.title} "
            "model that it states"
        )


def _rules(
    inputs: ClientInputs, completion: Completion, tokenizer: Tokenizer, streams: Streams, send: Send
) -> tuple[Rule, Branching]:
    """Return how tokens are drawn and which continuation of a step goes on: by the verification's
    own rule, of chains of drafts the longest, or by the client's marker. InputError for candidates
    that nothing chooses among.
    """
    candidates, rule = completion.request.candidates, completion.verifier
    if inputs.mark is None:
        if candidates == 1:
            return rule, Single(streams)
        if not isinstance(rule, Race) or not completion.request.draft_length:
            raise InputError(CANDIDATES_ALONE)
        return rule, Chains(streams, candidates)
    if completion.layout.config.encodes:
        raise InputError(
            "a text after what an encoder reads has no watermark; leave --watermark out"
        )
    before = len(completion.request.public_prefix) + len(inputs.prompt)
    module = importlib.import_module(inputs.mark.module)
    made: tuple[Rule, Branching] = module.rules(
        inputs.mark.settings, completion, before, tokenizer, streams, send
    )
    return made


def drafter_of(
    directory: str | None, completion: Completion, ngrams: bool = False, prompt: Sequence[int] = ()
) -> Proposer | None:
    """Return what drafts all of a completion: the public model in `directory`, with n-grams of the
    text if these are to draft, too; without a model, n-grams alone; None where nothing is drafted.
    `prompt`: what an encoder reads, and the token after it.
    """
    if not (drafts := completion.request.draft_length):
        return None
    vocab = completion.layout.config.vocab_size
    if directory is None:
        return Ngrams(vocab)
    config, params = load_model(Path(directory), encoders=True)
    private = completion.layout.config
    if config.encodes != private.encodes:
        raise InputError(
            f"a {config.title} model does not draft for a {private.title} model: only one of them "
            "reads a prompt with an encoder; give another --draft-model"
        )
    rows = len(completion.request.public_prefix) + completion.layout.live_rows + drafts
    model = Drafter(config, params, rows, prompt[:-1] if config.encodes else ())
    return Ngrams(vocab, model) if ngrams else model


def streams_of(draft_seed: int | None, sampling_seed: int | None) -> Streams:
    return Streams(stream("drafts", draft_seed), stream("sampling", sampling_seed))


def made_beside(entries: list[Entry]) -> dict[str, Any]:
    """Return how many batches of correlations were made while the session was at something else,
    and their seconds, which are in no phase.
    """
    made = [e.seconds for e in entries if e.beside and e.kind == "pool"]
    return {"batches": len(made), "seconds": round(sum(made, 0.0), 3)}


def per_step(entries: list[Entry]) -> list[dict[str, Any]]:
    """Return the cost of each decode step, online and of what was made ahead since the step before.
    A step ends when the client has announced how it went.
    """
    steps: list[dict[str, Any]] = []
    online: list[Entry] = []
    ahead: list[Entry] = []
    for entry in entries:
        (online if entry.phase == "decode" else ahead).append(entry)
        if entry.function in (announce.name, announce_end.name):
            if online:
                steps.append(_cost("", online) | _cost("ahead_", ahead))
            online, ahead = [], []
    return steps


def _cost(name: str, entries: Sequence[Entry]) -> dict[str, Any]:
    traffic = sum((e.traffic for e in entries), Traffic())
    seconds = sum((e.seconds for e in entries), 0.0)
    return {
        f"{name}seconds": seconds,
        f"{name}bytes": traffic.bytes,
        f"{name}messages": traffic.messages,
    }
