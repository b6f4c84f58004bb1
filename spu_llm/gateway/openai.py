"""OpenAI's protocol: completions, chats, models; requests, answers and streams.

Source: OpenAI's API reference, "Chat" and "Completions". A field that cannot be honoured is refused
with its name; fields that change no answer are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.gateway.answering import Piece
from spu_llm.gateway.asked import (
    ANY_TOKENS,
    MOST_ANSWERS,
    MOST_STOPS,
    MOST_TOKENS,
    NO_CUT,
    NO_TOOLS,
    TOKENS_ALONE,
    Asked,
    sampled,
)
from spu_llm.gateway.fields import Fields
from spu_llm.gateway.outcome import Choice, Outcome
from spu_llm.gateway.refusals import Refused
from spu_llm.gateway.sent_events import event

CHAT_TOKENS, COMPLETION_TOKENS = 256, 16  # of an answer, unless the request says
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ENDS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
_ENDS["interrupted"] = "stop"
HARMLESS = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
DONE = "data: [DONE]\n\n"


def chat_asked(body: bytes, options: CompletionOptions) -> Asked:
    """Return what the body of POST /v1/chat/completions asks for. Refused where it cannot be."""
    fields = Fields.of_body(body)
    model = fields.text("model")
    messages = with_system(_message(one) for one in fields.objects("messages"))
    newer = fields.whole("max_completion_tokens", 1, ANY_TOKENS)
    older = fields.whole("max_tokens", 1, ANY_TOKENS)
    for name in ("tools", "functions"):
        fields.only(name, [], why=NO_TOOLS)
    for name in ("tool_choice", "function_call"):
        fields.only(name, "none", "auto", why=NO_TOOLS)
    fields.only("logprobs", False, why=TOKENS_ALONE)
    fields.only("top_logprobs", 0, why=TOKENS_ALONE)
    fields.only("response_format", {"type": "text"}, why="text alone is written; leave it out")
    fields.only("modalities", ["text"], why="text alone is written; leave it out")
    fields.only("store", False, why="nothing is stored here; leave it out")
    fields.ignore("parallel_tool_calls")
    asked = _common(fields, options, model, messages, newer or older or CHAT_TOKENS)
    fields.end()
    return asked


def completion_asked(body: bytes, options: CompletionOptions) -> Asked:
    """Return what the body of POST /v1/completions asks for. Refused where it cannot be."""
    fields = Fields.of_body(body)
    model = fields.text("model")
    prompts = fields.texts("prompt", 1)
    if not prompts:
        raise fields.refuse("prompt", "give a text, not an empty one")
    tokens = fields.whole("max_tokens", 1, ANY_TOKENS) or COMPLETION_TOKENS
    fields.only("logprobs", 0, why=TOKENS_ALONE)
    fields.only("best_of", 1, why="give 1, or leave it out")
    fields.only("echo", False, why="the prompt is not written again; leave it out")
    fields.only("suffix", "", why="text is written after a prompt alone; leave it out")
    asked = _common(fields, options, model, prompts[0], tokens)
    fields.end()
    return asked


def _common(
    fields: Fields, options: CompletionOptions, model: str, prompt: str | list[Message], tokens: int
) -> Asked:
    answers = fields.whole("n", 1, MOST_ANSWERS) or 1
    fields.only("top_p", 1, 1.0, why=NO_CUT)
    fields.only("logit_bias", {}, why=TOKENS_ALONE)
    for name in ("presence_penalty", "frequency_penalty"):
        fields.only(name, 0, 0.0, why="penalties are not supported here; give 0, or leave it out")
    stream = fields.switch("stream")
    streamed = fields.inner("stream_options")
    with_usage = streamed.switch("include_usage")
    streamed.ignore("include_obfuscation")
    streamed.end()
    stop = fields.texts("stop", MOST_STOPS)
    options = replace(options, max_new_tokens=min(tokens, MOST_TOKENS), stop=stop)
    fields.ignore(*HARMLESS)
    return Asked(model, prompt, sampled(fields, options, 2.0), stream, with_usage, answers)


def with_system(messages: Iterable[Message]) -> list[Message]:
    """Return messages without those of a system that say nothing, which some programs send."""
    return [one for one in messages if one.content or one.role != "system"]


def _message(fields: Fields) -> Message:
    role = fields.text("role")
    if role not in ROLES:
        raise fields.refuse("role", f"a role is one of {', '.join(ROLES)}")
    content = fields.content("content")
    for name in ("tool_calls", "function_call", "audio"):
        fields.only(name, [], why=NO_TOOLS)
    fields.ignore("name", "refusal", "annotations")
    fields.end()
    return Message(ROLES[role], content)


@dataclass(frozen=True)
class Reply:
    """Answers to one request, whole or piece by piece, as JSON texts or server-sent events."""

    asked: Asked
    id: str = field(default_factory=lambda: token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def _chat(self) -> bool:
        return not isinstance(self.asked.prompt, str)

    def _named(self, kind: str) -> dict[str, Any]:
        named = {"id": f"chatcmpl-{self.id}", "object": f"chat.{kind}"}
        if not self._chat:
            named = {"id": f"cmpl-{self.id}", "object": "text_completion"}
        return {**named, "created": self.created, "model": self.asked.model}

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """Return the answer to a request without a stream."""
        choices = [self._choice(index, choice) for index, choice in enumerate(outcome.choices)]
        return {**self._named("completion"), "choices": choices, "usage": usage(outcome)}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        said: dict[str, Any] = {"text": choice.text}
        if self._chat:
            content = {"role": "assistant", "content": choice.text, "refusal": None}
            said = {"message": content}
        end = _ENDS[choice.finish_reason]
        return {"index": index, **said, "logprobs": None, "finish_reason": end}

    def begin(self) -> Iterator[str]:
        """Yield the first event of a stream: of a chat, whose turn it is."""
        yield from self._begin(0)

    def _begin(self, index: int) -> Iterator[str]:
        if self._chat:
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> Iterator[str]:
        """Yield the event of further text, and how much of it was drafted; at an answer's end, why
        it ends, and the first event of the next one.
        """
        if piece.end is not None:
            yield from self._end(piece.index, piece.end)
            yield from self._begin(piece.index + 1)
            return
        said = {"content": piece.text} if self._chat else piece.text
        yield self._chunk(piece.index, said, drafted=piece.drafted)

    def end(self, outcome: Outcome) -> Iterator[str]:
        """Yield the last events: why the text ends, and what it took if that was asked for."""
        yield from self._end(len(outcome.choices) - 1, outcome.finish_reason)
        if self.asked.with_usage:
            yield event({**self._named("completion.chunk"), "choices": [], "usage": usage(outcome)})
        yield DONE

    def failed(self, error: Refused) -> Iterator[str]:
        """Yield the last event of a stream that has no end."""
        yield event(error_body(error))

    def _end(self, index: int, finish_reason: str) -> Iterator[str]:
        yield self._chunk(index, {} if self._chat else "", _ENDS[finish_reason])

    def _chunk(
        self, index: int, said: Any, end: str | None = None, drafted: int | None = None
    ) -> str:
        name = "delta" if self._chat else "text"
        choice = {"index": index, name: said, "logprobs": None, "finish_reason": end}
        chunk = {**self._named("completion.chunk"), "choices": [choice]}
        if drafted is not None:
            chunk["spu_llm"] = {"drafted_characters": drafted}
        return event(chunk | ({"usage": None} if self.asked.with_usage else {}))


def usage(outcome: Outcome) -> dict[str, Any]:
    """Return the tokens of an answer, and what it took."""
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
        "spu_llm": outcome.cost,
    }


def error_body(error: Refused) -> dict[str, Any]:
    """Return the body of an answer to a request that is refused."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    code = "model_not_found" if error.field == "model" and error.status == 404 else None
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": code}}


def models_body(names: Sequence[str], created: int) -> dict[str, Any]:
    """Return the answer to GET /v1/models."""
    return {"object": "list", "data": [model_body(name, created) for name in names]}


def model_body(name: str, created: int) -> dict[str, Any]:
    """Return the answer to GET /v1/models/NAME."""
    return {"id": name, "object": "model", "created": created, "owned_by": "provider"}
