"""The program `private-text`: texts from the client's references with the provider's model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.family import family_of, weight_shapes
from models.hf import load_model
from models.resident import mapped
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import private_tree
from spu_llm.systems.dp_text.lanes import Lanes
from spu_llm.systems.dp_text.secure import ClientHalf, ProviderHalf, SecretText, declare
from spu_llm.systems.dp_text.secure_records import References, TextRequest
from spu_llm.systems.program import Job, Send

PHASES = ("offline", "prefill", "draw", "decode")


def run(session: PartySession, job: Job[TextRequest, References], send: Send) -> dict[str, Any]:
    """Draw one text for each batch of the client's references; both parties' results have them."""
    config, request = job.model, job.request
    folded = None if session.rank == CLIENT else folded_of(job)
    with session.meter.in_phase("offline"):
        shapes = weight_shapes(config)
        weights = private_tree(session, PROVIDER, lambda: folded, shapes)
        drawn = SecretText(session, config, request, weights)
        drawn.prepare()
    declare(session, request)
    provider = None
    if folded is not None:
        public = Lanes(
            config, jax.device_put(folded), 1, len(request.query), request.max_new_tokens
        )
        provider = ProviderHalf(public, folded, Prg.from_os())
    prompts = None
    if session.rank == CLIENT:
        prompts = check_prompts(job.client.prompts, request, request.batch)
    stream = Prg.from_os()
    texts: list[list[int]] = []
    for number in range(request.texts):
        client = None
        if prompts is not None:
            client = ClientHalf(
                prompts[number], lambda: drawn.choice.draw_noise(stream, request.places)
            )
        send("stage", name=f"text {number + 1} of {request.texts}")
        ends = request.eos.__contains__
        texts.append(drawn.text(client, provider, ends, counted(send)))
    return result_of(session, texts, PHASES)


def counted(send: Send) -> Callable[[int], None]:
    """Return what says, after each token of a text, how many there are."""
    numbers = itertools.count(1)
    return lambda token: send("token", tokens=next(numbers))


def result_of(
    session: PartySession, texts: list[list[int]], phases: Sequence[str]
) -> dict[str, Any]:
    """Return what a program for private texts tells of its run, with traffic of these phases."""
    return {
        "texts": texts,
        "seconds": session.meter.seconds,
        "traffic": {phase: asdict(session.meter.traffic(phase)) for phase in phases},
        "learned": session.ledger.learned(),
    }


def check_prompts(
    prompts: list[list[list[int]]], request: TextRequest, count: int
) -> list[list[list[int]]]:
    """Return a party's prompts, `count` a text; InputError unless they are as the request says."""
    for batch in prompts:
        if len(batch) != count or any(len(p) not in (0, request.room) for p in batch):
            raise InputError(
                f"a text reads {count} prompts of {request.room} tokens, or none in place of one"
            )
    if len(prompts) != request.texts:
        raise InputError(f"{len(prompts)} batches of references for {request.texts} texts")
    return prompts


def folded_of(job: Job[Any, Any]) -> Any:
    """Return this party's own folded weights: in memory already, or read. InputError for a model of
    another shape.
    """
    shapes, provider = weight_shapes(job.model), job.of_provider
    if provider is not None and provider.weights is not None:
        return mapped(provider.weights, shapes)
    directory = job.client.model_dir if provider is None else provider.model_dir
    config, params = load_model(Path(directory))
    if config.shape() != job.model.shape():
        raise InputError("the parties have models of different shapes; both need the same one")
    return jax.tree.map(np.asarray, family_of(config).fold(params, config))
