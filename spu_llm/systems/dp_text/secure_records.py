"""Private text between two parties: what both know before it starts, and the programs' records."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.family import ModelConfig
from protocols.dp.choice import Choice
from spu_llm.core.errors import InputError
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.secure_budget import choice_of
from spu_llm.systems.program import Program

MAX_PLACES, MAX_BATCH, MAX_TEXTS = 256, 64, 100_000


@dataclass(frozen=True)
class TextRequest:
    """query: tokens of the public prompt, with which phi_pub is computed. room: tokens of every
    private prompt, all of one length. places: room for candidates; a token is drawn among the
    likeliest of V_k+ where there are more. eos: tokens that end a text. The rest as in
    `Parameters`.
    """

    query: tuple[int, ...]
    room: int
    batch: int
    clip: float
    temperature: float
    max_new_tokens: int
    top_k: int
    places: int
    texts: int = 1
    eos: tuple[int, ...] = ()

    @property
    def parameters(self) -> Parameters:
        """Return the parameters of the draw; InputError for nonsense."""
        return Parameters(self.batch, self.clip, self.temperature, self.max_new_tokens, self.top_k)

    def choice(self, config: ModelConfig, noises: int = 1) -> Choice:
        """Return the draw; InputError for what two parties cannot draw."""
        return choice_of(self.parameters, config.logit_spread, noises)

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when the request does not fit the model."""
        for name, value, most in (
            ("the batch", self.batch, MAX_BATCH),
            ("the number of texts", self.texts, MAX_TEXTS),
            ("the room for candidates", self.places, min(MAX_PLACES, config.vocab_size)),
        ):
            if not 1 <= value <= most:
                raise InputError(f"{name} must be 1 to {most} between two parties, found {value}")
        if not 1 <= self.top_k <= self.places:
            raise InputError(f"top-k must be 1 to {self.places}, found {self.top_k}")
        longest = max(self.room, len(self.query))
        if not self.query or self.room < 1 or longest + self.max_new_tokens > config.context:
            raise InputError(
                f"prompts of {longest} tokens and {self.max_new_tokens} new ones do not fit the "
                f"model's {config.context} positions, or there are none"
            )
        if any(not 0 <= token < config.vocab_size for token in (*self.query, *self.eos)):
            raise InputError("the query has tokens that the model lacks")
        self.choice(config, noises=2)  # whichever of the programs runs


@dataclass(frozen=True)
class SharedRequest(TextRequest):
    """Both have the model, and references: of the B of a text, the provider has `of_provider`.
    after: tokens that end every private prompt, which starts with the query's first.
    """

    of_provider: int = field(kw_only=True)
    after: tuple[int, ...] = field(kw_only=True)

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when the request does not fit the model."""
        super().check(config)
        if not 1 <= self.of_provider < self.batch:
            raise InputError(
                f"of {self.batch} references the provider has 1 to {self.batch - 1}, found "
                f"{self.of_provider}"
            )
        if self.room < len(self.after) + 2:
            raise InputError(f"{self.room} tokens leave no room for a reference")

    def prompt_of(self, reference: list[int]) -> list[int]:
        """Return the prompt of a reference, all of `room` tokens: what is short is filled up in
        front, as if other texts had ended there; an empty list for a null reference, without
        tokens.
        """
        begin, most = list(self.query[:1]), self.room - len(self.after) - 1
        own = reference[:most]
        filler = begin * (most - len(own))
        return [*filler, *begin, *own, *self.after] if reference else []


@dataclass(frozen=True)
class PrivacyBudget:
    """The provider's own sensitive references, as token ids, and the most that a session may spend
    of each one's privacy.
    """

    references: list[list[int]]
    epsilon: float
    delta: float


@dataclass(frozen=True)
class References:
    """A party's own: the private prompts of every text, token ids [texts][references][room]; a null
    reference is an empty list. model_dir: of the model, where the party computes with it itself.
    """

    prompts: list[list[list[int]]]
    model_dir: str = ""


def _check_secret(request: TextRequest, model: ModelConfig) -> None:
    model.check_public(0, "dp generate has none, so give it another model")
    request.check(model)


# The references are the client's, the model is the provider's.
SECRET_MODEL = Program(
    "private-text", "spu_llm.systems.dp_text.secure_run", TextRequest, References, _check_secret
)
# Both have the model, and references of their own.
SHARED_MODEL = Program(
    "shared-text",
    "spu_llm.systems.dp_text.shared_run",
    SharedRequest,
    References,
    SharedRequest.check,
)
