"""A completion request: what both parties know before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from models.gpt2 import GPT2Config
from spu_llm.errors import InputError


@dataclass(frozen=True)
class Request:
    """What both parties know of a completion before it starts."""

    prompt_tokens: int
    max_new_tokens: int
    draft_length: int  # 0 is standard decoding
    temperature: float
    greedy: bool

    def check(self, config: GPT2Config) -> None:
        """InputError when the request does not fit the model."""
        if self.prompt_tokens < 1:
            raise InputError("the prompt is empty; give at least one character of text")
        if self.prompt_tokens >= config.n_positions:
            raise InputError(
                f"the prompt has {self.prompt_tokens} tokens, but the model's context is "
                f"{config.n_positions}; shorten it to {config.n_positions - 1} or fewer"
            )
        if self.max_new_tokens < 1:
            raise InputError(f"--max-new-tokens must be at least 1, found {self.max_new_tokens}")
        if not 0 <= self.draft_length <= 16:
            raise InputError(f"--draft-length must be 0 to 16, found {self.draft_length}")
        if not self.greedy and not 0.05 <= self.temperature <= 5.0:
            raise InputError(
                f"--temperature must be 0 (greedy) or 0.05 to 5, found {self.temperature}"
            )

    def limit(self, config: GPT2Config) -> int:
        """Tokens that can be generated: as asked, and within the model's context."""
        return min(self.max_new_tokens, config.n_positions - self.prompt_tokens)
