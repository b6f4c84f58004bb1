"""OpenAI's protocol of responses: requests, answers and streams.

Sources: OpenAI's API reference, "Responses" and "Streaming events"; Open Responses' specification,
whose schema names the fields that every response has. Nothing is stored: a request brings all that
was said. A field that cannot be honoured is refused with its name; fields that change no answer are
left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.gateway.answering import Piece
from spu_llm.gateway.asked import (
    ANY_TOKENS,
    MOST_TOKENS,
    NO_CUT,
    NO_TOOLS,
    TOKENS_ALONE,
    Asked,
    sampled,
)
from spu_llm.gateway.fields import Fields
from spu_llm.gateway.openai import CHAT_TOKENS, HARMLESS, ROLES, error_body, with_system
from spu_llm.gateway.outcome import Outcome
from spu_llm.gateway.refusals import Refused
from spu_llm.gateway.sent_events import event

_PARTS = ("input_text", "output_text", "text")


def response_asked(body: bytes, options: CompletionOptions) -> Asked:
    """Return what the body of POST /v1/responses asks for. Refused where it cannot be."""
    fields = Fields.of_body(body)
    model = fields.text("model")
    if fields.has_text("input"):
        messages = [Message("user", fields.text("input"))]
    else:
        messages = with_system(_message(one) for one in fields.objects("input"))
    instructions = fields.text("instructions", "")
    if instructions:
        messages.insert(0, Message("system", instructions))
    tokens = fields.whole("max_output_tokens", 1, ANY_TOKENS) or CHAT_TOKENS
    fields.only("tools", [], why=NO_TOOLS)
    fields.only("tool_choice", "none", "auto", why=NO_TOOLS)
    fields.only("top_p", 1, 1.0, why=NO_CUT)
    fields.only("top_logprobs", 0, why=TOKENS_ALONE)
    fields.only("include", [], why="nothing else is made here; leave it out")
    fields.only("background", False, why="answers are given at once; leave it out")
    nothing = "nothing is stored here; send all that was said"
    for name in ("previous_response_id", "conversation"):
        fields.only(name, why=nothing)
    text = fields.inner("text")
    text.only("format", {"type": "text"}, why="text alone is written; leave it out")
    text.end()
    stream = fields.switch("stream")
    options = sampled(fields, replace(options, max_new_tokens=min(tokens, MOST_TOKENS)), 2.0)
    streamed = fields.inner("stream_options")
    streamed.ignore("include_obfuscation")
    streamed.end()
    fields.ignore(*HARMLESS, "store", "parallel_tool_calls", "truncation")
    fields.end()
    return Asked(model, messages, options, stream, instructions=instructions or None)


def _message(fields: Fields) -> Message:
    if fields.text("type", "message") != "message":
        raise fields.refuse("type", "messages alone are read here")
    role = fields.text("role")
    if role not in ROLES:
        raise fields.refuse("role", f"a role is one of {', '.join(ROLES)}")
    content = fields.content("content", _PARTS)
    fields.ignore("id", "status", "phase")
    fields.end()
    return Message(ROLES[role], content)


@dataclass
class Reply:
    """Answers to one request, whole or piece by piece, as JSON texts or server-sent events."""

    asked: Asked
    id: str = field(default_factory=lambda: token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    _number: int = 0  # of the next event

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """Return the answer to a request without a stream."""
        cut = outcome.finish_reason in ("length", "context")
        status = "incomplete" if cut else "completed"
        details = {"reason": "max_output_tokens"} if cut else None
        usage = {
            "input_tokens": outcome.prompt_tokens,
            "input_tokens_details": {"cached_tokens": outcome.cached_tokens},
            "output_tokens": outcome.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
            "spu_llm": outcome.cost,
        }
        return self._response(
            status,
            output=[self._item(status, outcome.text)],
            usage=usage,
            incomplete_details=details,
            completed_at=None if cut else int(time.time()),
        )

    def begin(self) -> Iterator[str]:
        """Yield the first events of a stream."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))
        item = self._item("in_progress", None)
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._of_part("response.content_part.added", part=_part(""))

    def piece(self, piece: Piece) -> Iterator[str]:
        """Yield the event of further text."""
        yield self._of_part("response.output_text.delta", delta=piece.text, logprobs=[])

    def end(self, outcome: Outcome) -> Iterator[str]:
        """Yield the last events: the text as a whole, and what it took."""
        response = self.whole(outcome)
        yield self._of_part("response.output_text.done", text=outcome.text, logprobs=[])
        yield self._of_part("response.content_part.done", part=_part(outcome.text))
        (item,) = response["output"]
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: Refused) -> Iterator[str]:
        """Yield the last event of a stream that has no end."""
        said = error_body(error)["error"]
        told = {"code": said["code"] or said["type"], "message": said["message"]}
        yield self._event("response.failed", response=self._response("failed", error=told))

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "frequency_penalty": 0.0,
            "incomplete_details": None,
            "instructions": self.asked.instructions,
            "max_output_tokens": self.asked.options.max_new_tokens,
            "max_tool_calls": None,
            "metadata": {},
            "model": self.asked.model,
            "output": [],
            "parallel_tool_calls": False,
            "presence_penalty": 0.0,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": None,
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": self.asked.options.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    @property
    def _item_id(self) -> str:
        return f"msg_{self.id}"

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        item = {"id": self._item_id, "type": "message", "status": status, "role": "assistant"}
        return {**item, "content": content}

    def _of_part(self, kind: str, **more: Any) -> str:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **more)

    def _event(self, kind: str, **values: Any) -> str:
        value = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return event(value, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
