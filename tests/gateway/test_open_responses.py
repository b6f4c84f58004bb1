"""Open Responses: every object that the gateway sends is as the specification's types say.

The types are the project's own (package `openresponses-types`, made from the specification), and
the requests are the templates of its compliance suite, which is in no registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from spu_llm.api.completion import Completion
from spu_llm.api.events import OnEvent
from spu_llm.core.errors import PeerError
from tests.gateway.fakes import PIECES, Fake, asked, completion

types = pytest.importorskip("openresponses_types", reason="its types need CPython 3.11")
pydantic = pytest.importorskip("pydantic")


def _message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


# What the suite asks for, and can be answered: a text, a stream, a system's message, further turns.
ASKED = {
    "basic-response": [_message("user", "Say hello in exactly 3 words.")],
    "system-prompt": [
        _message("system", "You are a pirate. Always respond in pirate speak."),
        _message("user", "Say hello."),
    ],
    "multi-turn": [
        _message("user", "My name is Alice."),
        _message("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
        _message("user", "What is my name?"),
    ],
}
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def _respond(port: int, **body: Any) -> tuple[int, bytes]:
    raw = json.dumps({"model": "private", **body}).encode()
    status, _, answer = asked(port, "POST", "/v1/responses", raw, content_type="application/json")
    return status, answer


def _event_types() -> dict[str, Any]:
    """Return the specification's events by their names."""
    events = {}
    for name in dir(types):
        if name.endswith("StreamingEvent"):
            kind = getattr(types, name)
            (value,) = kind.model_fields["type"].annotation
            events[value.value] = kind
    return events


EVENTS = _event_types()


def _events(raw: bytes) -> list[dict[str, Any]]:
    """Return a stream's events, each checked by its type."""
    events = []
    for block in raw.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in lines:
            value = json.loads(lines["data"])
            assert value["type"] == lines["event"]
            EVENTS[value["type"]].model_validate(value)
            events.append(value)
    return events


@pytest.mark.parametrize("name", ASKED)
def test_a_response_has_all_that_the_schema_asks_for(port: int, name: str) -> None:
    status, raw = _respond(port, input=ASKED[name])
    assert status == 200
    got = types.ResponseResource.model_validate_json(raw)
    assert got.status == "completed" and got.completed_at >= got.created_at
    (item,) = got.output
    assert isinstance(item, types.Message) and item.content[0].text == "".join(PIECES)


def test_a_stream_s_events_are_the_specification_s(port: int) -> None:
    status, raw = _respond(port, input=ASKED["basic-response"], stream=True)
    events = _events(raw)
    assert status == 200 and [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert deltas == PIECES


def test_cut_and_failed_responses_keep_to_the_schema(port: int, fake: Fake) -> None:
    fake.does = lambda on_event, look: completion("x", "length")
    *_, last = _events(_respond(port, input="hi", stream=True, instructions="be short")[1])
    assert last["type"] == "response.incomplete"
    assert last["response"]["completed_at"] is None
    assert last["response"]["instructions"] == "be short"

    def fails(on_event: OnEvent, look: Callable[[], None]) -> Completion:
        raise PeerError("the provider is gone")

    fake.does = fails
    assert _events(_respond(port, input="hi", stream=True)[1])[-1]["type"] == "response.failed"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content"),
    ],
)
def test_what_only_other_models_can_do_is_refused_by_name(
    port: int, more: dict[str, Any], param: str
) -> None:
    status, raw = _respond(port, **{"input": "hi", **more})
    assert status == 400 and json.loads(raw)["error"]["param"] == param


def test_the_schema_refuses_a_response_without_a_field(port: int) -> None:
    """The types are strict enough to tell: each field that is left out is missed."""
    whole = json.loads(_respond(port, input="hi")[1])
    for name in types.ResponseResource.model_fields:
        less = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(pydantic.ValidationError, match=name):
            types.ResponseResource.model_validate(less)
