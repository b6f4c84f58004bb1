"""What a program asks for, in whichever protocol it did."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.gateway.fields import Fields

MOST_TOKENS = 4096  # of an answer
ANY_TOKENS = (1 << 31) - 1  # that a request may name as its limit
MOST_STOPS = 4

TOKENS_ALONE = "two-party computation gives tokens alone, without probabilities; leave it out"
NO_CUT = "draws are from the model's whole distribution; give 1, or leave it out"
NO_TOOLS = "tools are not supported here; leave them out"


@dataclass(frozen=True)
class Asked:
    """A completion of a text, or an answer to a chat."""

    model: str
    prompt: str | list[Message]
    options: CompletionOptions
    stream: bool
    with_usage: bool = True  # at the end of a stream


def sampled(fields: Fields, options: CompletionOptions, most: float) -> CompletionOptions:
    """Return options with the temperature, of `most` at most, and the seed of a request."""
    temperature = fields.number("temperature", 0.0, most)
    seed = fields.whole("seed", 0, (1 << 63) - 1)
    return replace(
        options,
        temperature=options.temperature if temperature is None else temperature,
        seed=options.seed if seed is None else seed,
    )
