"""The program `split-tune`: rounds of STuning (`tuning`) between two processes.

Either party may be killed at any moment. The provider keeps its half before it answers for the last
time in a round, the client keeps its own after that answer: so the client's round is always one of
the provider's last two (`state`).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT
from spu_llm.systems.program import Job, Send
from spu_llm.systems.split.boundary import Boundary
from spu_llm.systems.split.ends import client_ends, with_table, without_table
from spu_llm.systems.split.generating import middle_of, own_params, tunings_of
from spu_llm.systems.split.records import TuneInputs, TuneRequest, declare_tuning
from spu_llm.systems.split.state import ClientSecrets, Losses, held
from spu_llm.systems.split.texts import tokens_of
from spu_llm.systems.split.tuning import Batches, ClientHalf, HostHalf


def run(session: Any, job: Job[TuneRequest, TuneInputs], send: Send) -> dict[str, Any]:
    """Run all rounds; what was tuned is on disk in the end."""
    declare_tuning(session.ledger, job.request)
    boundary = job.request.boundary(job.model)
    if session.rank == CLIENT:
        with held(Path(job.client.secrets)):
            result = _client(session, job, boundary, send)
    else:
        result = _provider(session, job, boundary)
    return {**result, "learned": session.ledger.learned()}


def _client(
    session: Any, job: Job[TuneRequest, TuneInputs], boundary: Boundary, send: Send
) -> dict[str, Any]:
    request, config, directory = job.request, job.model, Path(job.client.secrets)
    send("stage", name="loading the model")
    secrets = ClientSecrets.load(directory, config)
    if secrets.round != request.round:
        raise InputError(f"{directory} was tuned meanwhile; give the command again")
    model = Path(job.client.model_dir)
    params = own_params(model, job)
    front, _ = client_ends(params, config, request.split, secrets.codebook)
    _, table = without_table(front, config)
    half = ClientHalf(
        config,
        with_table(secrets.front, table, config),
        secrets.back,
        secrets.permutation,
        request.learning_rate,
        secrets.settings.tuned,
    )
    secrets.give(half)
    tokens = tokens_of([Path(path) for path in job.client.texts], Tokenizer.load(model))
    batches = Batches(tokens, request.batch, request.length, secrets.key)
    losses, loss = Losses(directory, request.round), None
    for number in range(request.round, request.rounds):
        loss = half.round(session.channel, boundary, number, batches.windows(number))
        losses.add(number, loss)
        send("round", done=number + 1, rounds=request.rounds, loss=loss)
        if request.keeps(number + 1):
            secrets.after(half, number + 1).save(directory)
    return {"rounds": request.rounds, "loss": loss, "traffic": asdict(session.channel.traffic)}


def _provider(
    session: Any, job: Job[TuneRequest, TuneInputs], boundary: Boundary
) -> dict[str, Any]:
    request, tunings = job.request, tunings_of(job)
    half = HostHalf.of(job.model, middle_of(job), boundary, request.lora, request.learning_rate)
    with nullcontext() if tunings is None else held(tunings.folder):
        if tunings is not None:
            if request.round or tunings.rounds():
                tunings.give(half, request.lora, request.round)
            else:
                tunings.save(half, request.lora, 0)
        for number in range(request.round, request.rounds):
            round_ = half.round(number, request.batch, request.length)
            while not round_.over:
                answer = round_.answer(session.channel.recv())
                if tunings is not None and round_.over and request.keeps(number + 1):
                    tunings.save(half, request.lora, number + 1)
                session.channel.send(answer)
    return {}
