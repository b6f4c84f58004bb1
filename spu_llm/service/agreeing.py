"""What both parties state before a session, and what their workers are told when they agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import protocols
from models.family import ModelConfig, config_from
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError, ManifestMismatch, PeerError, WireError
from spu_llm.core.settings import OWN, SpuConfig
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from spu_llm.net import frames
from spu_llm.net.identity import Certificate
from spu_llm.net.manifest import CLIENT_PREFIX, JOBS, PROVIDER_PREFIX, TOKENIZER, Manifest
from spu_llm.offline import versions
from spu_llm.offline.peer_directories import folder_of, id_in
from spu_llm.service import programs
from spu_llm.service.task import Task
from spu_llm.service.watch import WAIT_S
from spu_llm.systems.program import Job, Program, ProviderInputs, SystemPromptShape, read, stated

_BACKEND = "backend"  # what computes forwards, for both
SERVED_MODEL = "served_model"  # its name, for both, where the client asks by one
_PROGRAM = "program"  # beside the fields of its request
_PREFIXES = {ROLES[CLIENT]: CLIENT_PREFIX, ROLES[PROVIDER]: PROVIDER_PREFIX}
_CERTIFICATE = "certificate."  # of either role
_POOL = "pool"  # a party's id in its pool directory, beside its own fields; empty: it has none
_BEFORE = "before."  # beside the model's fields
_TEXT_FORMAT = "text_format"  # the digest of how its text is written, beside them, if there is any
# How long SPU waits for one message: the supervisors judge first, and say why.
_LINK_TIMEOUT_MS = int(1000 * (WAIT_S + 60))


def of_provider(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    network: str,
    jobs: int,
    before: SystemPromptShape = SystemPromptShape(),
    text_format: str | None = None,
    *,
    backend: str = OWN,
) -> Manifest:
    """Return what a provider with this model states. `text_format`: the digest of how its text is
    written (`models.text_format`), if it has any. `backend`: what computes forwards.
    """
    model = config.asdict() | {_BEFORE + name: rows for name, rows in asdict(before).items()}
    if text_format is not None:
        model[_TEXT_FORMAT] = text_format
    of_provider = {PROVIDER_PREFIX + name: value for name, value in model.items()}
    return _of_both(tokenizer, network, jobs, backend) | of_provider


def of_client(
    program: Program,
    request: Any,
    tokenizer: Tokenizer | None,
    network: str,
    jobs: int,
    *,
    backend: str = OWN,
    model: str = "",
) -> Manifest:
    """Return what a client that asks for a program states. `backend`: what computes forwards;
    `model`: the name of the provider's that it asks for, empty: the first one.
    """
    asked = {_PROGRAM: program.name, **stated(request)}
    of_client = {CLIENT_PREFIX + name: value for name, value in asked.items()}
    of_model: Manifest = {SERVED_MODEL: model} if model else {}
    return _of_both(tokenizer, network, jobs, backend) | of_model | of_client


def asked_model(asked: Mapping[str, object]) -> tuple[str, Manifest]:
    """Return the name of the model that a client's manifest asks for, empty where it names none,
    and what the provider states of it in turn: the same, so that a provider that knows no names
    differs. WireError when what the client states is no text.
    """
    if SERVED_MODEL not in asked:
        return "", {}
    name = asked[SERVED_MODEL]
    if not isinstance(name, str):
        raise WireError("the client asks for a model by what is no name")
    return name, {SERVED_MODEL: name}


def _of_both(tokenizer: Tokenizer | None, network: str, jobs: int, backend: str) -> Manifest:
    return {
        JOBS: jobs,
        "wire": frames.VERSION,
        "protocols": protocols.VERSION,
        "silent": versions.SILENT,
        "packed": versions.PACKED,
        "transfers": versions.TRANSFERS,
        "slots": versions.SLOTS,
        "jax.version": version("jax"),
        "network": network,
        _BACKEND: backend,
        **SpuConfig().computing(backend).manifest(),
        **({} if tokenizer is None else {TOKENIZER: tokenizer.digest}),
    }


def certificates(*, client: Certificate, provider: Certificate) -> Manifest:
    """Return both parties' certificates, as either sees its own and the other one's: what differs
    is named before anything else is done, and the session's id, and so its keys, follow from them.
    """
    by_role = {ROLES[CLIENT]: client, ROLES[PROVIDER]: provider}
    return {_CERTIFICATE + role: one.fingerprint for role, one in by_role.items()}


def pair_of(agreed: Manifest) -> str:
    """Return what stands for both certificates of a session, the same at both parties: what a party
    keeps of another one goes by it. Empty in the clear.
    """
    pair = [agreed.get(_CERTIFICATE + role) for role in ROLES]
    return "" if None in pair else " ".join(map(str, pair))


def pool_id(role: str, seen: Manifest, directory: Path | None) -> Manifest:
    """Return what a party states of its pool directory to the peer with these certificates.
    PoolError when it cannot be used.
    """
    own = b"" if directory is None else id_in(directory, pair_of(seen))
    return {_PREFIXES[role] + _POOL: own.decode()}


def pool_ids(role: str, agreed: Manifest) -> tuple[bytes, bytes]:
    """Return both parties' ids, the one of `role` first."""
    other = ROLES[1 - ROLES.index(role)]
    own, peer = (str(agreed.get(_PREFIXES[one] + _POOL, "")).encode() for one in (role, other))
    return own, peer


def peer_folder(role: str, agreed: Manifest, directory: Path | None) -> Path | None:
    """Return the folder for this session's peer in a party's pool directory; None when either keeps
    no correlated randomness. PoolError or WireError when there can be none.
    """
    _, peer = pool_ids(role, agreed)
    return None if directory is None or not peer else folder_of(directory, peer, pair_of(agreed))


def without_ids(agreed: Manifest) -> Manifest:
    """Return settings as they may be kept and shown: who knows an id can waste correlated
    randomness.
    """
    hidden = {prefix + _POOL for prefix in _PREFIXES.values()}
    return {name: value for name, value in agreed.items() if name not in hidden}


def task_of(
    role: str, agreed: Manifest, own: Any, pool: Path | None, hints: Path | None = None
) -> Task:
    """Return what the worker of `role` is told, its peer's address aside. `own`: this party's
    inputs, `pool`: the folder of its peer's correlated randomness, `hints`: of hints. InputError
    when the client asks for nothing.
    """
    if not isinstance(program := agreed.get(CLIENT_PREFIX + _PROGRAM), str):
        raise InputError("the client asks for no program")
    pool_dir, hints_dir = (None if at is None else str(at.absolute()) for at in (pool, hints))
    return Task(role, program, agreed, asdict(own), _LINK_TIMEOUT_MS, pool_dir, hints_dir)


def job_of(program: Program, task: Task) -> Job[Any, Any]:
    """Return a task as its program takes it; InputError or PeerError for what is malformed, does
    not fit the model, is not served, or lacks what the program needs of this party or of both.
    """
    client = task.role == ROLES[CLIENT]
    if program.text and TOKENIZER not in task.agreed:
        raise InputError("the client states no tokenizer")
    backend = str(task.agreed.get(_BACKEND, OWN))
    if backend not in program.backends:
        raise InputError(
            f"--backend {backend} is of completions and chats, not of {program.name}; leave it out "
            "at both parties"
        )
    if program.needs_pool and not client and task.pool_dir is None:
        raise InputError(
            "the provider keeps no correlated randomness made ahead; it must be started with --pool"
        )
    asked = _part(task.agreed, CLIENT_PREFIX)
    del asked[_PROGRAM]
    asked.pop(_POOL, None)
    model, before = stated_model(task.agreed)
    request = program.asked(asked)
    check_request(program, request, model, before)
    kind: type = program.inputs if client else ProviderInputs
    own: Any = read(kind, task.own, f"the {task.role}'s inputs are malformed")
    if client:
        return Job(request, model, own, None, before, backend)
    program.admit(request, own, model)
    return Job(request, model, None, own, before, backend)


def makes_beside(task: Task) -> bool:
    """Return whether a provider's session makes batches beside the one that has the pool. Errors as
    of `job_of`.
    """
    if task.program in programs.STUDIES:
        return False
    program = programs.find(task.program)
    return program.beside(job_of(program, task).request)


def stated_model(agreed: Manifest) -> tuple[ModelConfig, SystemPromptShape]:
    """Return the model's shape as the provider states it, and what its own text takes of the
    context; PeerError when they are none.
    """
    fields = _part(agreed, PROVIDER_PREFIX)
    fields.pop(_POOL, None)
    fields.pop(_TEXT_FORMAT, None)
    rows = {k: fields.pop(k) for k in list(fields) if k.startswith(_BEFORE)}
    try:
        config = config_from(fields)
        before = read(SystemPromptShape, _part(rows, _BEFORE), "of its own text")
    except (ValueError, InputError) as exc:
        raise PeerError(f"the provider's model description is wrong: {exc}") from None
    if not 0 <= before.padded <= before.rows < config.context:
        raise PeerError(
            f"the provider's own text cannot take {before.rows} of {config.context} positions"
        )
    return config, before


def check_text_format(agreed: Manifest, digest: str) -> None:
    """Raise ManifestMismatch unless the provider's text is written as the text format with this
    digest says, which the client took its tokens from.
    """
    if (agreed_digest := agreed.get(PROVIDER_PREFIX + _TEXT_FORMAT)) != digest:
        raise ManifestMismatch(
            "the provider's text is written otherwise than it said before "
            f"({agreed_digest!s:.16} in place of {digest:.16}); it may serve another "
            "model now: try again"
        )


def check_request(
    program: Program, request: Any, model: ModelConfig, before: SystemPromptShape
) -> None:
    """Raise InputError for what cannot run with this model, or after the provider's own text."""
    if model.encodes and not program.encoders:
        raise InputError(
            f"the provider serves a {model.title} model, whose prompt an encoder reads: it "
            f"completes texts (generate), and has no {program.name}"
        )
    program.check(request, before.left(model))


def _part(agreed: Manifest, prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in agreed.items() if k.startswith(prefix)}
