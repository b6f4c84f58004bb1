"""What both parties state before a session, and what their workers are told when they agree."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import protocols
from models.family import ModelConfig, config_from
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError, PeerError
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import CLIENT, ROLES
from spu_llm.net import frames
from spu_llm.net.identity import Certificate
from spu_llm.net.manifest import (
    CLIENT_PREFIX,
    JOBS,
    PROVIDER_PREFIX,
    TOKENIZER,
    Manifest,
)
from spu_llm.offline import versions
from spu_llm.service.watch import WAIT_S
from spu_llm.service.worker import Task
from spu_llm.systems.program import Held, Job, Program, read, stated

_PROGRAM = "program"  # beside the fields of its request
# How long SPU waits for one message: the supervisors judge first, and say why.
_LINK_TIMEOUT_MS = int(1000 * (WAIT_S + 60))


def of_provider(
    config: ModelConfig, tokenizer: Tokenizer | None, network: str, jobs: int
) -> Manifest:
    """What a provider with this model states."""
    model = {PROVIDER_PREFIX + name: value for name, value in config.asdict().items()}
    return _of_both(tokenizer, network, jobs) | model


def of_client(
    program: Program, request: Any, tokenizer: Tokenizer | None, network: str, jobs: int
) -> Manifest:
    """What a client that asks for a program states."""
    asked = {_PROGRAM: program.name, **stated(request)}
    return _of_both(tokenizer, network, jobs) | {CLIENT_PREFIX + k: v for k, v in asked.items()}


def _of_both(tokenizer: Tokenizer | None, network: str, jobs: int) -> Manifest:
    return {
        JOBS: jobs,
        "wire": frames.VERSION,
        "protocols": protocols.VERSION,
        "silent": versions.SILENT,
        "packed": versions.PACKED,
        "jax.version": version("jax"),
        "network": network,
        **SpuConfig().manifest(),
        **({} if tokenizer is None else {TOKENIZER: tokenizer.digest}),
    }


def certificates(*, client: Certificate, provider: Certificate) -> Manifest:
    """Both parties' certificates, as either sees its own and the other one's: what differs is named
    before anything else is done, and the session's id, and so its keys, follow from them.
    """
    return {
        "certificate.client": client.fingerprint, "certificate.provider": provider.fingerprint,
    }  # fmt: skip


def task_of(role: str, agreed: Manifest, own: Any, pool: Path | None) -> Task:
    """What the worker of `role` is told, its peer's address aside; `own`: this party's inputs.
    InputError when the client asks for nothing.
    """
    if not isinstance(program := agreed.get(CLIENT_PREFIX + _PROGRAM), str):
        raise InputError("the client asks for no program")
    pool_dir = None if pool is None else str(pool.absolute())
    return Task(role, program, agreed, asdict(own), _LINK_TIMEOUT_MS, pool_dir)


def job_of(program: Program, task: Task) -> Job[Any, Any]:
    """A task as its program takes it; InputError or PeerError for what is malformed, does not fit
    the model, or lacks what the program needs of this party or of both.
    """
    client = task.role == ROLES[CLIENT]
    if program.text and TOKENIZER not in task.agreed:
        raise InputError("the client states no tokenizer")
    if program.needs_pool and not client and task.pool_dir is None:
        raise InputError(
            "the provider keeps no material made ahead; it must be started with --pool"
        )
    asked = _part(task.agreed, CLIENT_PREFIX)
    del asked[_PROGRAM]
    model, request = stated_model(task.agreed), program.asked(asked)
    program.check(request, model)
    kind: type = program.inputs if client else Held
    own: Any = read(kind, task.own, f"the {task.role}'s inputs are malformed")
    return Job(request, model, own, None) if client else Job(request, model, None, own)


def stated_model(agreed: Manifest) -> ModelConfig:
    """The model's shape as the provider states it; PeerError when it is none."""
    try:
        return config_from(_part(agreed, PROVIDER_PREFIX))
    except ValueError as exc:
        raise PeerError(f"the provider's model description is wrong: {exc}") from None


def _part(agreed: Manifest, prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in agreed.items() if k.startswith(prefix)}
