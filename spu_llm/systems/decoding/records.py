"""The programs of this folder, as supervisors know them: `completion`, `preparation`, `chat`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from models.family import ModelConfig
from protocols.verification.marked import Marked
from spu_llm.core.errors import InputError
from spu_llm.core.settings import BACKENDS
from spu_llm.systems.decoding.chat_request import ChatRequest
from spu_llm.systems.decoding.request import GenerationRequest, Request
from spu_llm.systems.program import Program, ProviderInputs, served_whole

MAX_BESIDE = 4096  # batches that one session makes for another's pool
MARKED = Marked.name  # the variant whose noise is the provider's
CANDIDATES_ALONE = (
    "a step has candidates where a key chooses one of them, or where they are chains of drafts "
    "under one noise (--verify race, or --temperature 0)"
)


@dataclass(frozen=True)
class RulesModule:
    """A rule that draws a text's tokens, or chooses among a step's continuations, in place of the
    verification's own: a module of the client's framework with

        rules(settings, completion, before, tokenizer, streams, send) -> (Rule, Branching)

    and its `settings`, as JSON has them. `before`: tokens of public prefix and prompt; `send`: an
    event to the supervisor.
    """

    module: str
    settings: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class ClientInputs:
    """`text_format`: the file with how text is written (`models.text_format`), or the directory of
    a model that is written so. `draft_dir`: of the model that drafts, if one does; `ngrams`: the
    text itself does, too (`models.ngrams`), which it does wherever there is no such model.
    `draft_seed` fixes the drafts; `sampling_seed` also acceptance and bonus draws.
    """

    prompt: list[int]
    text_format: str
    stop: list[str] = field(default_factory=list)
    draft_seed: int | None = None
    sampling_seed: int | None = None
    mark: RulesModule | None = None
    draft_dir: str | None = None
    ngrams: bool = False


@dataclass(frozen=True)
class Ahead(GenerationRequest):
    """The preprocessing of a completion to come. `steps`: how many of its steps to make correlated
    randomness for; `room_bytes`: for fewer if the files of a party would grow by more. `counts`:
    nothing is made, only what lacks is counted. `batches`: whatever there is, so many batches of
    each kind are made while another session has the pool, and go to its inbox.
    """

    steps: int = field(kw_only=True)
    room_bytes: int | None = field(default=None, kw_only=True)
    counts: bool = field(default=False, kw_only=True)
    batches: tuple[int, ...] = field(default=(), kw_only=True)

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when the completion does not fit the model, or takes fewer than `steps`
        steps.
        """
        super().check(config)
        most = self.limit(config) - 1
        if not 0 <= self.steps <= most:
            raise InputError(
                f"--steps must be 0 to {most}, the most that such a completion takes, found "
                f"{self.steps}"
            )
        if min(self.batches, default=0) < 0 or sum(self.batches) > MAX_BESIDE:
            raise InputError(f"a session makes 0 to {MAX_BESIDE} batches for the pool of another")

    @property
    def beside(self) -> bool:
        """Return whether it is made outside the session that has the pool."""
        return bool(self.batches)


@dataclass(frozen=True)
class PrepareRequest(Ahead, Request):
    """A completion to come."""


def admit(request: Request, held: ProviderInputs, model: ModelConfig) -> None:
    """Raise InputError unless the provider serves its whole model, and has a key for its joint
    randomness where the request's variant wants one.
    """
    served_whole(request, held, model)
    if held.served.stream_key is None and request.verify == MARKED:
        raise InputError(
            f"this provider has no key to mark texts with (serve --mark KEYFILE), which --verify "
            f"{MARKED} is for; choose another"
        )


COMPLETION = Program(
    "completion",
    "spu_llm.systems.decoding.completion",
    Request,
    ClientInputs,
    Request.check,
    backends=BACKENDS,
    encoders=True,
    admit=admit,
)
PREPARATION = Program(
    "preparation",
    "spu_llm.systems.decoding.preparation",
    PrepareRequest,
    check=PrepareRequest.check,
    needs_pool=True,
    encoders=True,
    admit=admit,
    beside=lambda request: request.beside,
)
CHAT = Program(
    "chat",
    "spu_llm.systems.decoding.chat",
    ChatRequest,
    ClientInputs,
    ChatRequest.check,
    backends=BACKENDS,
    admit=admit,
    hears=True,
)
