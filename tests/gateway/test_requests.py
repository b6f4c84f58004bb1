"""Requests to the gateway: what is read from them, and what is refused, field by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.chat import Message
from spu_llm.api.client import CompletionOptions
from spu_llm.gateway import anthropic, openai, responses
from spu_llm.gateway.asked import MOST_ANSWERS, MOST_TOKENS, Asked
from spu_llm.gateway.refusals import Refused

OPTIONS = CompletionOptions(draft_length=3, temperature=0.7)
HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": "m", "messages": HELLO}
TEXT = {"model": "m", "prompt": "hello"}
MESSAGE = {**CHAT, "max_tokens": 5}
PARSERS: dict[str, tuple[Callable[[bytes, CompletionOptions], Asked], dict[str, Any]]] = {
    "chat": (openai.chat_asked, CHAT),
    "completion": (openai.completion_asked, TEXT),
    "message": (anthropic.message_asked, MESSAGE),
    "response": (responses.response_asked, {"model": "m", "input": "hello"}),
}


def asked(kind: str, **more: Any) -> Asked:
    parse, base = PARSERS[kind]
    return parse(json.dumps({**base, **more}).encode(), OPTIONS)


def test_a_chat_has_its_messages_and_options() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        *HELLO,
    ]
    got = asked("chat", messages=said, max_tokens=7, temperature=0, seed=3, stop="end", stream=True)
    roles = [("system", "be short"), ("user", "ab"), ("assistant", "c"), ("user", "hello")]
    assert got.prompt == [Message(*one) for one in roles]
    assert got.stream and not got.with_usage and got.model == "m"
    options = got.options
    assert (options.max_new_tokens, options.temperature, options.seed) == (7, 0.0, 3)
    assert options.stop == ("end",) and options.draft_length == 3
    plain = asked("chat", stream_options={"include_usage": True}, user="x", top_p=1, n=1)
    assert plain.options.max_new_tokens == openai.CHAT_TOKENS and plain.with_usage
    assert plain.options.temperature == 0.7 and plain.options.seed is None
    assert asked("chat", max_tokens=1 << 20).options.max_new_tokens == MOST_TOKENS
    empty = [{"role": "system", "content": ""}, *HELLO]
    assert asked("chat", messages=empty).prompt == [Message("user", "hello")]
    assert asked("chat", max_tokens=9, max_completion_tokens=8).options.max_new_tokens == 8
    assert plain.answers == 1 and asked("chat", n=MOST_ANSWERS).draws == MOST_ANSWERS
    assert asked("completion", n=2, temperature=0).draws == 1


def test_a_completion_has_its_prompt() -> None:
    got = asked("completion", stop=["a", "b"], echo=False, best_of=1, logprobs=None)
    assert got.prompt == "hello" and got.options.stop == ("a", "b") and not got.stream
    assert got.options.max_new_tokens == openai.COMPLETION_TOKENS
    assert asked("completion", prompt=["one"]).prompt == "one"


def test_a_message_has_its_system_prompt() -> None:
    got = asked("message", system="be short", stop_sequences=["x"], temperature=1, stream=True)
    assert got.prompt == [Message("system", "be short"), Message("user", "hello")]
    assert got.options.max_new_tokens == 5 and got.options.stop == ("x",) and got.stream
    blocks = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    prompt = asked("message", system=blocks).prompt
    assert isinstance(prompt, list) and prompt[0].content == "s"


def test_a_response_has_its_input() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = [
        {"role": "user", "content": parts},
        {
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "d"},
    ]
    got = asked("response", input=said, instructions="be short", max_output_tokens=3, store=True)
    texts = [("system", "be short"), ("user", "ab"), ("assistant", "c"), ("user", "d")]
    assert got.prompt == [Message(*one) for one in texts]
    assert got.options.max_new_tokens == 3
    assert asked("response").prompt == [Message("user", "hello")]


@pytest.mark.parametrize(
    ("kind", "more", "field"),
    [
        ("chat", {"logprobs": True}, "logprobs"),
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("chat", {"top_p": 0.9}, "top_p"),
        ("chat", {"n": 5}, "n"),
        ("chat", {"n": 0}, "n"),
        ("completion", {"n": True}, "n"),
        ("response", {"n": 1}, "n"),
        ("message", {"n": 1}, "n"),
        ("chat", {"tools": [{"type": "function"}]}, "tools"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"presence_penalty": 0.5}, "presence_penalty"),
        ("chat", {"frequency_penalty": 1}, "frequency_penalty"),
        ("chat", {"store": True}, "store"),
        ("chat", {"temperature": 2.5}, "temperature"),
        ("chat", {"temperature": "hot"}, "temperature"),
        ("chat", {"temperature": True}, "temperature"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_completion_tokens": 1 << 31}, "max_completion_tokens"),
        ("chat", {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ("chat", {"stop": [""]}, "stop"),
        ("chat", {"stream": 1}, "stream"),
        ("chat", {"stream_options": {"other": 1}}, "stream_options.other"),
        ("chat", {"seed": -1}, "seed"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "hello"}, "messages"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ("chat", {"messages": [{**HELLO[0], "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ("chat", {"model": None}, "model"),
        ("chat", {"unheard": 1}, "unheard"),
        ("completion", {"prompt": ["a", "b"]}, "prompt"),
        ("completion", {"prompt": [1, 2]}, "prompt"),
        ("completion", {"prompt": ""}, "prompt"),
        ("completion", {"echo": True}, "echo"),
        ("completion", {"suffix": "x"}, "suffix"),
        ("completion", {"logprobs": 1}, "logprobs"),
        ("response", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("response", {"tools": [{"type": "web_search"}]}, "tools"),
        ("response", {"input": []}, "input"),
        ("response", {"input": [{"type": "function_call_output"}]}, "input[0].type"),
        ("response", {"text": {"format": {"type": "json_object"}}}, "text.format"),
        ("response", {"reasoning": {"effort": "low"}}, "reasoning"),
        ("message", {"max_tokens": None}, "max_tokens"),
        ("message", {"top_k": 5}, "top_k"),
        ("message", {"messages": [*HELLO, {"role": "assistant", "content": "{"}]}, "messages"),
        ("message", {"top_p": 0.5}, "top_p"),
        ("message", {"tools": [{}]}, "tools"),
        ("message", {"thinking": {"type": "enabled"}}, "thinking"),
        ("message", {"temperature": 1.5}, "temperature"),
        ("message", {"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(kind: str, more: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as refusal:
        asked(kind, **more)
    assert (refusal.value.status, refusal.value.field) == (400, field)
    assert str(refusal.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"a": ' * 40 + b"1" + b"}" * 40, b"[" * 10**5, b"\xff"]
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    for parse, _ in PARSERS.values():
        with pytest.raises(Refused, match="the body is no JSON"):
            parse(body, OPTIONS)


NAMES = sorted(
    {"messages", "prompt", "max_tokens", "temperature", "stop", "stream", "stream_options", "seed"}
    | {
        "n",
        "logprobs",
        "tools",
        "system",
        "stop_sequences",
        "model",
        "top_p",
        "response_format",
        "input",
    }
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "user", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(PARSERS)), st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_request_is_read_or_refused(kind: str, more: dict[str, Any]) -> None:
    try:
        got = asked(kind, **more)
    except Refused as error:
        assert error.status == 400
        return
    assert 1 <= got.options.max_new_tokens <= MOST_TOKENS
    assert 0 <= got.options.temperature <= 2 and 1 <= got.answers <= MOST_ANSWERS
    assert isinstance(got.prompt, str) or all(isinstance(one, Message) for one in got.prompt)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for parse, _ in PARSERS.values():
        with pytest.raises(Refused):
            parse(body, OPTIONS)
