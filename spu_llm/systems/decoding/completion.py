"""The program behind `demo`, `serve` and `generate`: one completion, this party's side."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.draft import Drafter
from models.family import ModelConfig, weight_shapes
from models.hf import load_model
from models.resident import mapped
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from spu_llm.core.channel import Traffic
from spu_llm.core.meter import Entry
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import private_tree
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion, Report, announce, announce_end, generate
from spu_llm.systems.decoding.records import ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import Text, share_weights
from spu_llm.systems.program import Job, Send

PHASES = ("offline", "prefill", "decode")


def run(session: PartySession, job: Job[Request, ClientInputs], send: Send) -> dict[str, Any]:
    """Prepare, prefill and decode; the client's result also has the text."""
    config = job.model
    completion = Completion.of(config, job.request, job.before)
    with session.meter.in_phase("offline"):
        text = held_text(session, completion, job)
        decoder = completion.decoder(session, held_weights(session, config, job), text)
        completion.prepare(session, decoder)
    client = _client_side(job.client, completion, send) if session.rank == CLIENT else None
    provider = stream("joint randomness", job.provider.sampling_seed) if client is None else None

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


def held_weights(session: PartySession, config: ModelConfig, job: Job[Any, Any]) -> Any:
    """The private model's weights as values of the session; the provider has them in memory, or
    reads them.
    """
    provider = job.of_provider
    if provider is not None and provider.weights is not None:
        shapes = weight_shapes(config)
        return private_tree(session, PROVIDER, mapped, shapes, provider.weights, shapes)
    params = None if provider is None else load_model(Path(provider.model_dir))[1]
    return share_weights(session, config, params)


def held_text(session: PartySession, completion: Completion, job: Job[Any, Any]) -> Text | None:
    """What stands before the prompt, likewise."""
    provider = job.of_provider
    return completion.text(session, () if provider is None else provider.system_prompt)


def stream(label: str, seed: int | None) -> Prg:
    """A keyed stream: from the OS unless the run is to be repeatable."""
    return Prg.from_os() if seed is None else Prg.from_seed(seed, label)


def _client_side(inputs: ClientInputs, completion: Completion, send: Send) -> ClientSide:
    drafter = None
    directory = Path(inputs.draft_dir)
    if drafts := completion.request.draft_length:
        config, params = load_model(directory)
        rows = len(completion.request.public_prefix) + completion.layout.live_rows + drafts
        drafter = Drafter(config, params, rows)
    return ClientSide(
        prompt=inputs.prompt,
        tokenizer=Tokenizer.load(directory),
        drafter=drafter,
        verifier=completion.verifier,
        streams=Streams(
            stream("drafts", inputs.draft_seed), stream("sampling", inputs.sampling_seed)
        ),
        stop=inputs.stop,
        on_text=lambda text: send("text", text=text),
        prefix=list(completion.request.public_prefix),
    )


def made_beside(entries: list[Entry]) -> dict[str, Any]:
    """Material that was made while the session was at something else: its time is in no phase."""
    made = [e.seconds for e in entries if e.beside and e.kind == "pool"]
    return {"batches": len(made), "seconds": round(sum(made, 0.0), 3)}


def per_step(entries: list[Entry]) -> list[dict[str, Any]]:
    """Cost of each decode step: a step ends when the client has announced how it went."""
    steps: list[dict[str, Any]] = []
    seconds, traffic = 0.0, Traffic()
    for entry in entries:
        if entry.phase != "decode":
            continue
        seconds, traffic = seconds + entry.seconds, traffic + entry.traffic
        if entry.function in (announce.name, announce_end.name):
            steps.append({"seconds": seconds, "bytes": traffic.bytes, "messages": traffic.messages})
            seconds, traffic = 0.0, Traffic()
    return steps
