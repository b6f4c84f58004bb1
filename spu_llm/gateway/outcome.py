"""Answers as programs get them: of sessions of their own, or of kept conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

from spu_llm.api.completion import Completion
from spu_llm.api.conversation import Answer


@dataclass(frozen=True)
class Choice:
    """A text, and why it ends: "eos", "stop", "length", "context" or "interrupted"."""

    text: str
    finish_reason: str


@dataclass(frozen=True)
class Outcome:
    """Answers to one request, their tokens, and their cost."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int  # of the prompt: computed in earlier turns
    completion_tokens: int  # of all answers that were computed
    cost: dict[str, Any]  # seconds: "offline" for correlated randomness, "prefill", "decode" online

    @property
    def text(self) -> str:
        """Return the last answer's text: of a request for one answer, the answer's."""
        return self.choices[-1].text

    @property
    def finish_reason(self) -> str:
        """Return why the last answer ends."""
        return self.choices[-1].finish_reason


def of_answers(outcomes: Sequence[Outcome], answers: int) -> Outcome:
    """Return the outcome of several answers to one prompt, and their cost as a sum. The last one
    is repeated until there are `answers`.
    """
    first = outcomes[0]
    choices = [choice for one in outcomes for choice in one.choices]
    return replace(
        first,
        choices=(*choices, *choices[-1:] * (answers - len(choices))),
        completion_tokens=sum(one.completion_tokens for one in outcomes),
        cost=reduce(_sum, (one.cost for one in outcomes)),
    )


def of_completion(completion: Completion) -> Outcome:
    """Return the outcome of a completion."""
    agreed = completion.config
    public = str(agreed["request.public_prefix"])
    cost = {**_cost(completion), "wire_bytes": completion.wire_bytes.total}
    prompt = int(agreed["request.prompt_tokens"]) + len(public.split(",") if public else [])
    tokens = len(completion.token_ids)
    choice = Choice(completion.text, completion.finish_reason)
    return Outcome((choice,), prompt, 0, tokens, cost)


def of_answer(answer: Answer) -> Outcome:
    """Return the outcome of a conversation's turn."""
    return Outcome(
        (Choice(answer.text, answer.finish_reason),),
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


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the sums of two costs' figures, which have the same names."""
    return {
        name: _sum(value, other[name]) if isinstance(value, dict) else value + other[name]
        for name, value in one.items()
    }
