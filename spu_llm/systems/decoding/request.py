"""A completion request: what both parties know before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from models.family import ModelConfig
from models.ranges import LARGEST_LINEAR, LARGEST_PUBLIC
from protocols.verification import variants as verification
from protocols.verification.distribution import Sampling
from protocols.verification.variants import Verifier
from spu_llm.core.errors import InputError
from spu_llm.core.op import Functionality
from spu_llm.systems.decoding.limits import MAX_CANDIDATES, MAX_DRAFTS, MAX_NEW_TOKENS
from spu_llm.systems.program import SystemPromptShape

if TYPE_CHECKING:
    from spu_llm.systems.decoding.judges import Judge
    from spu_llm.systems.decoding.session_shape import ModelPart

MAX_PREFIX_TOKENS = LARGEST_PUBLIC  # which a setting of a session holds

# Rows that steps write before a full block is packed again: packing takes bytes as a few steps do,
# and a text of 64 tokens ends before it, at 2.5 tokens a step of 8 rows.
_SPARE_ROWS = 160
_SPARE_STEPS = 4  # and room for as many steps' rows of further candidates
_LEAST_ROWS = 72
_ROWS_AT_ONCE = 32


def _rounded(rows: int) -> int:
    return -(-rows // _ROWS_AT_ONCE) * _ROWS_AT_ONCE


@dataclass(frozen=True)
class GenerationRequest:
    """The growth of a text, which both parties know: lengths, and whether the provider learns which
    drafts stay. Its subclasses say what judges the drafts.
    """

    prompt_tokens: int
    max_new_tokens: int
    draft_length: int  # 0 is standard decoding
    show_progress: bool = field(default=False, kw_only=True)  # to the provider: drafts that stay
    # Tokens that the text begins with, before the provider's own, which the provider may know.
    public_prefix: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def hide_progress(self) -> bool:
        """Return whether the provider does not learn how many drafts stay: wherever there are
        drafts, unless asked otherwise.
        """
        return self.draft_length > 0 and not self.show_progress

    @property
    def begins_later(self) -> bool:
        """Return whether a session is there before its first text; then `prompt_tokens` is 0."""
        return False

    @property
    def candidates(self) -> int:
        """Return how many continuations a step verifies side by side; the client chooses one."""
        return 1

    @property
    def step_rows(self) -> int:
        """Return how many rows a step has: the last token, and the drafts of every candidate."""
        return 1 + self.candidates * self.draft_length

    @property
    def part(self) -> ModelPart:
        """Return the part of the model that is computed on shares."""
        from spu_llm.systems.decoding.session_shape import WholeModel

        return WholeModel()

    @property
    def logits_scale(self) -> float:
        """Return what logits on shares are multiplied by."""
        return 1.0

    def judge(self, config: ModelConfig) -> Judge:
        """Return what decides on a step's rows, on shares."""
        raise NotImplementedError

    @property
    def functionality(self) -> Functionality:
        """Return what the judge gives to whom."""
        raise NotImplementedError

    @property
    def told(self) -> str:
        """Return what else the provider learns of how tokens are drawn, in words."""
        return "token limit"

    def check_before(self, before: SystemPromptShape) -> None:
        """Raise InputError when the request cannot follow the provider's own text."""

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when the request does not fit the model."""
        self.check_options()
        config.check_public(len(self.public_prefix), "give --public-prefix TEXT")
        if any(not 0 <= token < config.vocab_size for token in self.public_prefix):
            raise InputError("the public prefix has tokens that the model lacks")
        if config.encodes:
            self._check_source(config)
            return
        room = self._room(config)
        if self.prompt_tokens >= room:
            raise InputError(
                f"the prompt has {self.prompt_tokens} tokens, but the model's context is "
                f"{config.context}{self._taken()}; shorten it to {max(0, room - 1)} or fewer"
            )

    def _check_source(self, config: ModelConfig) -> None:
        """Raise InputError when the encoder cannot read the prompt, whose last token is the one
        that the text begins with.
        """
        if self.public_prefix:
            raise InputError(
                f"a {config.title} model reads all of a prompt at once, so none of it is computed "
                "before; leave --public-prefix out"
            )
        if not 2 <= self.prompt_tokens <= config.context + 1:
            raise InputError(
                f"the prompt has {self.prompt_tokens - 1} tokens, but the model reads 1 to "
                f"{config.context}; shorten it"
            )

    def check_options(self) -> None:
        """Raise InputError when no model could serve the request."""
        if self.prompt_tokens < 1 and not self.begins_later:
            raise InputError("the prompt is empty; give at least one character of text")
        if len(self.public_prefix) > MAX_PREFIX_TOKENS:
            raise InputError(
                f"--public-prefix has {len(self.public_prefix)} tokens; at most "
                f"{MAX_PREFIX_TOKENS} are allowed"
            )
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise InputError(
                f"--max-new-tokens must be 1 to {MAX_NEW_TOKENS}, found {self.max_new_tokens}"
            )
        if not 0 <= self.draft_length <= MAX_DRAFTS:
            raise InputError(f"--draft-length must be 0 to {MAX_DRAFTS}, found {self.draft_length}")

    def most_steps(self, config: ModelConfig) -> int:
        """Return how many secure steps there are at most: the prefill and each step write a token
        or more.
        """
        return max(1, self.limit(config) - 1)

    def begun(self, config: ModelConfig) -> int:
        """Return how many rows of the cache the prefill writes: the prompt's, or where an encoder
        reads the prompt, the row of its last token, from which the text goes on.
        """
        return 1 if config.encodes else self.prompt_tokens

    def live_rows(self, config: ModelConfig) -> int:
        """Return how many rows the text has at most while it goes on."""
        return self.begun(config) + self.limit(config)

    def capacity(self, config: ModelConfig) -> int:
        """Return how many rows the shared cache block has at most, room for a step's drafts
        included. With hidden progress the rows of rejected drafts stay until the block is full and
        is packed.
        """
        if not self.hide_progress:
            return self.live_rows(config) + self.step_rows
        spare = _SPARE_ROWS + _SPARE_STEPS * (self.candidates - 1) * self.draft_length
        return min(self._most_written(config), self.live_rows(config) + spare)

    def may_pack(self, config: ModelConfig) -> bool:
        """Return whether a block of `capacity` rows may be full before the text ends."""
        return self.hide_progress and self._most_written(config) > self.capacity(config)

    def _most_written(self, config: ModelConfig) -> int:
        """Return how many rows the prompt and all steps write at most, rejected drafts included."""
        return self.begun(config) + self.most_steps(config) * self.step_rows

    def sizes(self, config: ModelConfig, prefix: int = 0) -> tuple[int, ...]:
        """Return the sizes that the block has one after the other, in rows: each some quarter more
        than the one before. All of them, with `prefix` rows before, have units of one size
        for rows that the provider knows (`protocols.functions.aggregation.tile_for`), so that these
        are not opened again.
        """
        most, size = self.capacity(config), self.begun(config) + self.step_rows
        size = max(_LEAST_ROWS - prefix, _rounded(size))
        sizes = []
        while size + _ROWS_AT_ONCE // 2 < most:
            sizes.append(size)
            size = _rounded(size * 5 // 4)
        return (*sizes, most)

    def limit(self, config: ModelConfig) -> int:
        """Return how many tokens can be generated: as asked, and within the model's context."""
        return min(self.max_new_tokens, self._room(config) - self.begun(config))

    def _room(self, config: ModelConfig) -> int:
        """Return how many positions there are for prompt and completion."""
        return config.context - len(self.public_prefix)

    def _taken(self) -> str:
        count = len(self.public_prefix)
        return f", {count} of which the public prefix takes" if count else ""


@dataclass(frozen=True)
class Request(GenerationRequest):
    """The public facts of a completion, known to both parties before it starts."""

    temperature: float  # 0 is greedy
    verify: str = "token"  # a variant of protocols.verification.variants
    top_k: int = 0
    top_p: float = 1.0
    candidates: int = field(default=1, kw_only=True)

    @property
    def hide_progress(self) -> bool:
        """Return whether the provider does not learn how many drafts stay: as a `GenerationRequest`
        asks, where the variant can hide it; which of several candidates goes on the provider never
        learns.
        """
        some = self.candidates > 1 or super().hide_progress
        return self.verify in verification.HIDING and some

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def logits_scale(self) -> float:
        """Return 1 / temperature, or 1 for greedy decoding, which needs no scale."""
        return 1.0 / self.temperature if self.temperature else 1.0

    def judge(self, config: ModelConfig) -> Verifier:
        sampling = replace(self.sampling, logit_spread=config.logit_spread)
        return verification.verifier(self.verify, sampling, hide_progress=self.hide_progress)

    @property
    def functionality(self) -> Functionality:
        return verification.functionality(
            self.verify, hide_progress=self.hide_progress, candidates=self.candidates
        )

    @property
    def told(self) -> str:
        return "temperature, top-k, top-p and token limit"

    def check(self, config: ModelConfig) -> None:
        self.check_options()
        # Scaled logits are products of the head, whose words hold LARGEST_LINEAR.
        if self.logits_scale * config.logit_spread / 2 > LARGEST_LINEAR:
            raise InputError(
                f"--temperature {self.temperature} is too low for this model, whose logits spread "
                f"over {config.logit_spread:g}; give 0 (greedy) or "
                f"{config.logit_spread / 2 / LARGEST_LINEAR:.3g} or more"
            )
        super().check(config)

    def check_options(self) -> None:
        super().check_options()
        check_sampling(self.sampling)
        verification.check(self.verify, self.sampling)
        if not 1 <= self.candidates <= MAX_CANDIDATES:
            raise InputError(
                f"--candidates must be 2 to {MAX_CANDIDATES} (1: no candidates), found "
                f"{self.candidates}"
            )
        if self.candidates > 1:
            self._check_candidates()

    def _check_candidates(self) -> None:
        if self.sampling.greedy and not self.draft_length:
            raise InputError(
                "--candidates without drafts would all be the same at --temperature 0; leave "
                "--standard out, or give a --temperature"
            )
        if self.verify not in verification.BRANCHING:
            raise InputError(
                f"--verify {self.verify} verifies no --candidates; use --verify token or race"
            )
        if self.show_progress:
            raise InputError(
                "--show-progress would show the provider which of --candidates goes on; leave it "
                "out"
            )


def check_sampling(sampling: Sampling) -> None:
    """Raise InputError for options of sampling that nobody can follow."""
    if sampling.temperature != 0 and not 0.05 <= sampling.temperature <= 5.0:
        raise InputError(
            f"--temperature must be 0 (greedy) or 0.05 to 5, found {sampling.temperature}"
        )
    if sampling.top_k < 0:
        raise InputError(f"--top-k must be 1 or more (0: all), found {sampling.top_k}")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"--top-p must be above 0 and at most 1, found {sampling.top_p}")
