"""Anthropic's protocol: messages; requests, answers and streams.

Source: Anthropic's API reference, "Messages" and "Streaming Messages". A field that cannot be
honoured is refused with its name; fields that change no answer are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.gateway.answering import Piece
from spu_llm.gateway.asked import (
    ANY_TOKENS,
    MOST_STOPS,
    MOST_TOKENS,
    NO_CUT,
    NO_TOOLS,
    Asked,
    sampled,
)
from spu_llm.gateway.fields import Fields
from spu_llm.gateway.outcome import Outcome
from spu_llm.gateway.refusals import Refused
from spu_llm.gateway.sent_events import event

_ENDS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}
_ENDS |= {"context": "max_tokens", "interrupted": "end_turn"}


def message_asked(body: bytes, options: CompletionOptions) -> Asked:
    """Return what the body of POST /v1/messages asks for. Refused where it cannot be."""
    fields = Fields.of_body(body)
    model = fields.text("model")
    messages = [_message(one) for one in fields.objects("messages")]
    tokens = fields.whole("max_tokens", 1, ANY_TOKENS)
    if tokens is None:
        raise fields.refuse("max_tokens", "give a whole number, 1 or more")
    if messages[-1].role != "user":
        raise fields.refuse("messages", "the last one must be a user's")
    if fields.has("system") and (system := fields.content("system")):
        messages.insert(0, Message("system", system))
    fields.only("tools", [], why=NO_TOOLS)
    fields.only("tool_choice", {"type": "none"}, {"type": "auto"}, why=NO_TOOLS)
    fields.only("thinking", {"type": "disabled"}, why="there is no thinking here; leave it out")
    fields.only("top_p", 1, 1.0, why=NO_CUT)
    fields.only("top_k", why=NO_CUT)
    stream = fields.switch("stream")
    stop = fields.texts("stop_sequences", 4 * MOST_STOPS)
    options = replace(options, max_new_tokens=min(tokens, MOST_TOKENS), stop=stop)
    options = sampled(fields, options, 1.0)
    fields.ignore("metadata", "service_tier", "cache_control")
    fields.end()
    return Asked(model, messages, options, stream)


def _message(fields: Fields) -> Message:
    role = fields.text("role")
    if role not in ("user", "assistant"):
        raise fields.refuse("role", "a role is user or assistant")
    content = fields.content("content")
    fields.end()
    return Message(role, content)


@dataclass(frozen=True)
class Reply:
    """Answers to one request, whole or piece by piece, as JSON texts or server-sent events."""

    asked: Asked
    id: str = field(default_factory=lambda: f"msg_{token_hex(12)}")

    def _message(self, text: str | None, **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": [] if text is None else [{"type": "text", "text": text}],
            "stop_reason": None,
            "stop_sequence": None,
            **more,
        }

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """Return the answer to a request without a stream."""
        return self._message(outcome.text, **self._end(outcome), usage=_usage(outcome))

    def begin(self) -> Iterator[str]:
        """Yield the first events of a stream."""
        nothing = {"input_tokens": 0, "output_tokens": 0}
        yield _event("message_start", message=self._message(None, usage=nothing))
        block = {"type": "text", "text": ""}
        yield _event("content_block_start", index=0, content_block=block)

    def piece(self, piece: Piece) -> Iterator[str]:
        """Yield the event of further text."""
        yield _event(
            "content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text}
        )

    def end(self, outcome: Outcome) -> Iterator[str]:
        """Yield the last events: why the text ends, and what it took."""
        yield _event("content_block_stop", index=0)
        yield _event("message_delta", delta=self._end(outcome), usage=_usage(outcome))
        yield _event("message_stop")

    def failed(self, error: Refused) -> Iterator[str]:
        """Yield the last event of a stream that has no end."""
        yield _event("error", error=error_body(error)["error"])

    def _end(self, outcome: Outcome) -> dict[str, Any]:
        stops = self.asked.options.stop
        stopped = outcome.finish_reason == "stop" and len(stops) == 1
        return {
            "stop_reason": _ENDS[outcome.finish_reason],
            "stop_sequence": stops[0] if stopped else None,
        }


def _event(kind: str, **values: Any) -> str:
    return event({"type": kind, **values}, kind)


def _usage(outcome: Outcome) -> dict[str, Any]:
    return {
        "input_tokens": outcome.prompt_tokens - outcome.cached_tokens,
        "cache_read_input_tokens": outcome.cached_tokens,
        "output_tokens": outcome.completion_tokens,
        "spu_llm": outcome.cost,
    }


def error_body(error: Refused) -> dict[str, Any]:
    """Return the body of an answer to a request that is refused."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kinds |= {413: "request_too_large", 503: "overloaded_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
