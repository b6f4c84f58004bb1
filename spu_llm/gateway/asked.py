"""What a program asks for, in whichever protocol it did."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.gateway.fields import Fields

MOST_TOKENS = 4096  # of an answer
ANY_TOKENS = (1 << 31) - 1  # that a request may name as its limit
MOST_STOPS = 4
MOST_SEED = (1 << 63) - 1
MOST_ANSWERS = 4  # to a request: each has a session, and further requests wait for all

TOKENS_ALONE = "two-party computation gives tokens alone, without probabilities; leave it out"
NO_CUT = "draws are from the model's whole distribution; give 1, or leave it out"
NO_TOOLS = "tools are not supported here; leave them out"


@dataclass(frozen=True)
class Asked:
    """Completions of a text, or answers to a chat."""

    model: str
    prompt: str | list[Message]
    options: CompletionOptions
    stream: bool
    with_usage: bool = True  # at the end of a stream
    answers: int = 1
    instructions: str | None = None  # said again in a response; part of the chat already

    @property
    def draws(self) -> int:
        """Return how many answers are drawn. At temperature 0 all are the likeliest one."""
        return self.answers if self.options.temperature else 1

    def draw(self, index: int) -> Asked:
        """Return the request as one of its draws has it: its seed is the request's plus `index`."""
        seed = self.options.seed
        if seed is not None:
            seed = (seed + index) & MOST_SEED
        return replace(self, options=replace(self.options, seed=seed))


def sampled(fields: Fields, options: CompletionOptions, most: float) -> CompletionOptions:
    """Return options with the temperature, of `most` at most, and the seed of a request."""
    temperature = fields.number("temperature", 0.0, most)
    seed = fields.whole("seed", 0, MOST_SEED)
    return replace(
        options,
        temperature=options.temperature if temperature is None else temperature,
        seed=options.seed if seed is None else seed,
    )
