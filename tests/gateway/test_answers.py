"""Several answers to one request: draws of their own, in sessions one after another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from spu_llm.api.completion import Completion
from spu_llm.api.events import OnEvent, Text
from spu_llm.core.errors import BusyError, PeerError
from spu_llm.gateway.asked import MOST_SEED
from tests.gateway.fakes import (
    HELLO,
    PIECES,
    Fake,
    Talk,
    asked,
    completion,
    of_openai,
    said,
    served,
)
from tests.kit.patience import eventually


@pytest.fixture
def draws(fake: Fake) -> Fake:
    """Return a client whose sessions write 0, 1, ...; session 1 ends by its length."""

    def does(on_event: OnEvent, look: Callable[[], None]) -> Completion:
        number = len(fake.asked) - 1
        on_event(Text(f"{number}", drafted=1))
        on_event(Text("!"))
        return completion(f"{number}!", "length" if number == 1 else "eos")

    fake.does = does
    return fake


def test_answers_are_draws_of_their_own(draws: Fake, port: int) -> None:
    got = of_openai(port).chat.completions.create(
        model="private", messages=HELLO, n=3, seed=7, temperature=1
    )
    assert [one.index for one in got.choices] == [0, 1, 2]
    assert [one.message.content for one in got.choices] == ["0!", "1!", "2!"]
    assert [one.finish_reason for one in got.choices] == ["stop", "length", "stop"]
    assert [options.seed for _, options in draws.asked] == [7, 8, 9]
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (7, 9)
    extension: Any = got.usage.model_extra
    cost = extension["spu_llm"]
    assert cost["steps"] == 6 and cost["wire_bytes"] == 900
    assert cost["seconds"] == {"offline": 9.0, "prefill": 3.0, "decode": 6.0}
    assert cost["messages"] == {"offline": 30, "online": 60}
    text = of_openai(port).completions.create(
        model="private", prompt="p", n=2, temperature=1, seed=MOST_SEED
    )
    assert [one.text for one in text.choices] == ["3!", "4!"]
    assert [options.seed for _, options in draws.asked[3:]] == [MOST_SEED, 0]


def test_a_stream_has_answers_one_after_another(draws: Fake, port: int) -> None:
    """Each with its role first and its end; what they took comes once, in the last chunk."""
    create = of_openai(port).chat.completions.create
    usage: Any = {"include_usage": True}
    *chunks, last = create(
        model="private", messages=HELLO, n=2, stream=True, temperature=1, stream_options=usage
    )
    assert [chunk.choices[0].index for chunk in chunks] == [0, 0, 0, 0, 1, 1, 1, 1]
    for number, end in ((0, "stop"), (1, "length")):
        first, *pieces, ended = chunks[4 * number :][:4]
        assert first.choices[0].delta.role == "assistant"
        assert [one.choices[0].delta.content for one in pieces] == [f"{number}", "!"]
        assert all(one.choices[0].finish_reason is None for one in (first, *pieces))
        assert ended.choices[0].finish_reason == end
    assert last.usage is not None and last.usage.completion_tokens == 6 and not last.choices
    assert all(chunk.usage is None for chunk in chunks)
    texts = of_openai(port).completions.create(
        model="private", prompt="p", n=2, stream=True, temperature=1
    )
    said_by: dict[int, str] = {}
    for chunk in texts:
        choice = chunk.choices[0]
        said_by[choice.index] = said_by.get(choice.index, "") + choice.text
    assert said_by == {0: "2!", 1: "3!"}


def test_equal_answers_are_computed_once(draws: Fake, port: int) -> None:
    """At temperature 0 all are the likeliest one."""
    create = of_openai(port).chat.completions.create
    got = create(model="private", messages=HELLO, n=3, temperature=0)
    assert [one.message.content for one in got.choices] == ["0!"] * 3 and len(draws.asked) == 1
    assert got.usage is not None and got.usage.completion_tokens == 3
    chunks = list(create(model="private", messages=HELLO, n=2, temperature=0, stream=True))
    contents = [(c.choices[0].index, c.choices[0].delta.content) for c in chunks]
    assert contents == [(i, text) for i in (0, 1) for text in ("", "1", "!", None)]
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "length",
        "length",
    ]
    assert len(draws.asked) == 2


def test_several_draws_are_of_no_conversation(draws: Fake, talks: list[Talk]) -> None:
    """The one that is open stays as it was; equal answers go on there."""
    with served(draws, keep=1) as port:
        create = of_openai(port).chat.completions.create
        create(model="private", messages=said("a"))
        create(model="private", messages=said("a", "answer 1", "b"), n=2)
        assert len(draws.asked) == 2 and talks[0].turns == 1 and not talks[0].is_over
        create(model="private", messages=said("a", "answer 1", "b"))
        assert talks[0].turns == 2 and len(talks) == 1
        create(model="private", messages=said("x"), n=2, temperature=0)
        got = create(model="private", messages=said("x", "answer 1", "y"), n=2, temperature=0)
        assert [one.message.content for one in got.choices] == [" answer 2 "] * 2
        assert talks[1].turns == 2 and len(draws.asked) == 2


def test_an_answer_that_fails_is_the_requests_failure(draws: Fake, port: int) -> None:
    writes = draws.does

    def fails(on_event: OnEvent, look: Callable[[], None]) -> Completion:
        if len(draws.asked) % 2 == 0:
            raise PeerError("the provider is gone")
        return writes(on_event, look)

    draws.does = fails
    create = of_openai(port).chat.completions.create
    with pytest.raises(openai.APIStatusError, match="the provider is gone") as failure:
        create(model="private", messages=HELLO, n=3)
    assert failure.value.status_code == 502 and len(draws.asked) == 2
    chunks = create(model="private", messages=HELLO, n=3, stream=True)
    indices = []
    with pytest.raises(openai.APIError, match="the provider is gone"):
        for chunk in chunks:
            indices.append(chunk.choices[0].index)
    assert indices == [0, 0, 0, 0, 1] and len(draws.asked) == 4


def test_a_busy_provider_costs_no_answer_twice(draws: Fake, talks: list[Talk]) -> None:
    """A conversation that is open gives its place, and the draw alone is asked for again."""
    writes, refusals = draws.does, [BusyError("no place")]

    def busy(on_event: OnEvent, look: Callable[[], None]) -> Completion:
        if len(draws.asked) == 2:
            raise refusals.pop()
        return writes(on_event, look)

    draws.does = busy
    with served(draws, keep=1) as port:
        create = of_openai(port).chat.completions.create
        create(model="private", messages=said("a"))
        chunks = create(model="private", messages=said("b"), n=2, stream=True)
        texts = [chunk.choices[0].delta.content for chunk in chunks]
        assert texts == ["", "0", "!", None, "", "2", "!", None]
        assert talks[0].is_over and not refusals


def test_who_has_gone_gets_no_more_answers(draws: Fake, port: int) -> None:
    writes = draws.does
    draws.does = lambda on_event, look: (
        writes(on_event, look) if len(draws.asked) == 1 else draws.waits(on_event, look)
    )
    stream = of_openai(port).completions.create(model="private", prompt="x", n=4, stream=True)
    texts = (chunk.choices[0].text for chunk in stream)
    assert [next(texts) for _ in range(4)] == ["0", "!", "", PIECES[0]]
    stream.close()
    assert eventually(lambda: draws.ended == ["well", "the request was cancelled"])
    assert eventually(lambda: json.loads(asked(port, "GET", "/health")[2])["requests"] == 0)
    assert len(draws.asked) == 2
