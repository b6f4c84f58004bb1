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
    cost = {**_cost(completion), "wire_bytes": completion.wire_bytes.total}
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
        _cost(answer),
    )


def headers_of(outcome: Outcome) -> dict[str, str]:
    """Return the cost of an outcome as HTTP headers."""
    cost = outcome.cost
    seconds = cost["seconds"]
    figures = {
        "seconds-offline": round(seconds["offline"], 3),
        "seconds-online": round(seconds["prefill"] + seconds["decode"], 3),
        **{f"bytes-{phase}": count for phase, count in cost["bytes"].items()},
        **{f"messages-{phase}": count for phase, count in cost["messages"].items()},
    }
    return {f"x-spu-llm-{name}": str(figure) for name, figure in figures.items()}


def _cost(of: Completion | Answer) -> dict[str, Any]:
    """Return what an answer took: payload bytes of both parties, and messages of both."""
    return {
        "seconds": asdict(of.seconds),
        "bytes": {phase: both.total for phase, both in of.bytes.items()},
        "messages": of.messages,
        "steps": of.steps,
        "drafted": of.drafted,
        "accepted": of.accepted,
    }
