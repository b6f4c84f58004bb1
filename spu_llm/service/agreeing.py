"""What both parties state before a session, and what their workers are told when they agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models.family import ModelConfig, config_from
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError, PeerError
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import CLIENT, ROLES
from spu_llm.net.manifest import (
    CLIENT_PREFIX,
    PROVIDER_PREFIX,
    TOKENIZER,
    Manifest,
    source_digest,
)
from spu_llm.service.tasks import Task
from spu_llm.service.watch import WAIT_S
from spu_llm.systems.program import Held, Job, Program, read, stated

_PROGRAM = "program"  # beside the fields of its request
# How long SPU waits for one message: the supervisors judge first, and say why.
_LINK_TIMEOUT_MS = int(1000 * (WAIT_S + 60))


def of_provider(config: ModelConfig, tokenizer: Tokenizer, network: str) -> Manifest:
    """What a provider with this model states."""
    model = {PROVIDER_PREFIX + name: value for name, value in config.asdict().items()}
    return _of_both(network) | {TOKENIZER: tokenizer.digest} | model


def of_client(
    program: Program, request: Any, tokenizer: Tokenizer | None, network: str
) -> Manifest:
    """What a client that asks for a program states."""
    asked = {_PROGRAM: program.name, **stated(request)}
    text = {} if tokenizer is None else {TOKENIZER: tokenizer.digest}
    return _of_both(network) | text | {CLIENT_PREFIX + k: v for k, v in asked.items()}


def _of_both(network: str) -> Manifest:
    return {
        "version": version("spu-llm"),
        "sources": source_digest(),
        "jax.version": version("jax"),
        "network": network,
        **SpuConfig().manifest(),
    }


def task_of(role: str, agreed: Manifest, own: Any, pool: Path | None) -> Task:
    """What the worker of `role` is told, its peer's address aside; `own`: this party's inputs.
    InputError when the client asks for nothing.
    """
    request = _part(agreed, CLIENT_PREFIX)
    if not isinstance(program := request.pop(_PROGRAM, None), str):
        raise InputError("the client asks for no program")
    return Task(
        role, program, _part(agreed, PROVIDER_PREFIX), request, asdict(own), _LINK_TIMEOUT_MS,
        None if pool is None else str(pool.absolute()),
    )  # fmt: skip


def job_of(program: Program, task: Task) -> Job[Any, Any]:
    """A task as its program takes it; InputError or PeerError for what is malformed or does not
    fit the model.
    """
    model, request = model_of(task.model), program.asked(task.request)
    program.check(request, model)
    client = task.role == ROLES[CLIENT]
    kind: type = program.inputs if client else Held
    own: Any = read(kind, task.own, f"the {task.role}'s inputs are malformed")
    return Job(request, model, own, None) if client else Job(request, model, None, own)


def model_of(fields: Mapping[str, object]) -> ModelConfig:
    """The model's shape as the provider states it; PeerError when it is none."""
    try:
        return config_from(fields)
    except ValueError as exc:
        raise PeerError(f"the provider's model description is wrong: {exc}") from None


def stated_model(agreed: Manifest) -> ModelConfig:
    """`model_of` the settings agreed on."""
    return model_of(_part(agreed, PROVIDER_PREFIX))


def _part(agreed: Manifest, prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in agreed.items() if k.startswith(prefix)}
