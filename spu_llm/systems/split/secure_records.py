"""A split model whose middle runs on shares: the records of its two programs, as supervisors know
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.family import ModelConfig
from models.split import Split
from protocols.verification.distribution import Sampling
from spu_llm.core.errors import InputError
from spu_llm.core.op import Functionality
from spu_llm.systems.decoding.records import Ahead
from spu_llm.systems.decoding.request import GenerationRequest
from spu_llm.systems.program import Program, ProviderInputs, SystemPromptShape
from spu_llm.systems.split.modes import MPC
from spu_llm.systems.split.records import check_served

if TYPE_CHECKING:
    from spu_llm.systems.split.middle import Middle, OpenRows


@dataclass(frozen=True)
class MiddleRequest(GenerationRequest):
    """The public facts of a completion, known to both parties; how tokens are drawn is not among
    them. front, back: blocks of the client's ends. ends: digest of its parameters of them
    (`models.split.ends_digest`).
    """

    front: int = field(kw_only=True)
    back: int = field(kw_only=True)
    ends: str = field(kw_only=True)

    @property
    def split(self) -> Split:
        return Split(self.front, self.back)

    @property
    def part(self) -> Middle:
        from spu_llm.systems.split.middle import Middle

        return Middle(self.split)

    def judge(self, config: ModelConfig) -> OpenRows:
        from spu_llm.systems.split.middle import OpenRows

        return OpenRows(self.hide_progress)

    @property
    def functionality(self) -> Functionality:
        """Return what each party learns. Of every position, rejected drafts included, the client
        has the pair (x, y): what it asks the middle, and what the middle answers, up to the coin of
        a truncation.
        """
        kept = "" if self.hide_progress else ", accepted count per step"
        return Functionality(
            client="the rows that the middle makes of rows that it brings, of every position, "
            "rejected drafts included",
            provider=f"draft length, number of steps{kept}, length limits",
        )

    def check_before(self, before: SystemPromptShape) -> None:
        if before.rows:
            raise InputError(
                "the provider has a text of its own before every prompt, which the front of a "
                "split model cannot see; it must be started without one"
            )

    def check(self, config: ModelConfig) -> None:
        config.check_public(0, "a split model has none, so it cannot be split with --mode mpc")
        super().check(config)
        self.split.check(config)

    def check_options(self) -> None:
        super().check_options()
        if self.public_prefix:
            raise InputError(
                "the middle runs nothing in the clear; leave --public-prefix out, and put it into "
                "the prompt"
            )


@dataclass(frozen=True)
class MiddlePrepareRequest(Ahead, MiddleRequest):
    """Such a completion to come."""


@dataclass(frozen=True)
class MiddleInputs:
    """The client's own. model_dir: the model, whose ends it computes. draft_dir: of the model that
    drafts, or any, without drafts. draft_seed fixes the drafts, sampling_seed all other draws.
    """

    prompt: list[int]
    model_dir: str
    draft_dir: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    draft_seed: int | None = None
    sampling_seed: int | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)


def _admit(request: MiddleRequest, held: ProviderInputs, model: ModelConfig) -> None:
    check_served(MPC, request.split, held, request.ends)


SPLIT_COMPLETION = Program(
    "split-completion",
    "spu_llm.systems.split.secure",
    MiddleRequest,
    MiddleInputs,
    MiddleRequest.check,
    admit=_admit,
)
SPLIT_PREPARATION = Program(
    "split-preparation",
    "spu_llm.systems.decoding.preparation",
    MiddlePrepareRequest,
    check=MiddlePrepareRequest.check,
    needs_pool=True,
    admit=_admit,
    beside=lambda request: request.beside,
)
