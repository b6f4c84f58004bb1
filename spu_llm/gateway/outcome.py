"""An answer as programs get it, whether a session of its own or a kept conversation's wrote it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from spu_llm.api.completion import Completion
from spu_llm.api.conversation import Answer


@dataclass(frozen=True)
class Outcome:
    """A text, why it ends ("eos", "stop", "length" or "context"), its tokens, and its cost."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt: computed in earlier turns
    completion_tokens: int
    cost: dict[str, Any]  # seconds: "offline" for correlated randomness, "prefill", "decode" online


def of_completion(completion: Completion) -> Outcome:
    """Return the outcome of a completion."""
    agreed = completion.config
    public = str(agreed["request.public_prefix"])
    cost = {
        "seconds": asdict(completion.seconds),
        "wire_bytes": completion.wire_bytes.total,
        "messages": completion.messages,
        "steps": completion.steps,
        "drafted": completion.drafted,
        "accepted": completion.accepted,
    }
    prompt = int(agreed["request.prompt_tokens"]) + len(public.split(",") if public else [])
    tokens = len(completion.token_ids)
    return Outcome(completion.text, completion.finish_reason, prompt, 0, tokens, cost)


def of_answer(answer: Answer) -> Outcome:
    """Return the outcome of a conversation's turn."""
    return Outcome(
        answer.text,
        answer.finish_reason,
        answer.prompt_tokens,
        answer.cached_tokens,
        len(answer.token_ids),
        {"seconds": asdict(answer.seconds)},
    )
