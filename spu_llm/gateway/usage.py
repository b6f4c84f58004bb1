"""What a completion took, as answers tell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spu_llm.api.completion import Completion


@dataclass(frozen=True)
class Usage:
    """Tokens, and the cost of the session beside them."""

    prompt_tokens: int
    completion_tokens: int
    cost: dict[str, Any]


def usage_of(completion: Completion) -> Usage:
    """Return what a completion took. Seconds: `offline` for correlated randomness, `prefill` and
    `decode` online.
    """
    agreed = completion.config
    public = str(agreed["request.public_prefix"])
    seconds = completion.seconds
    cost = {
        "wire_bytes": completion.wire_bytes.total,
        "messages": completion.messages,
        "seconds": {
            "offline": seconds.offline,
            "prefill": seconds.prefill,
            "decode": seconds.decode,
            "first_token": completion.first_token_seconds,
            "elapsed": completion.elapsed_seconds,
        },
        "steps": completion.steps,
        "drafted": completion.drafted,
        "accepted": completion.accepted,
    }
    prompt = int(agreed["request.prompt_tokens"]) + len(public.split(",") if public else [])
    return Usage(prompt, len(completion.token_ids), cost)
