"""Chats over HTTP that go on in their sessions, or begin in one that was opened ahead."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable

import openai
import pytest

from spu_llm.api.completion import Completion
from spu_llm.api.events import OnEvent
from spu_llm.core.errors import BusyError
from spu_llm.gateway import kept, running
from tests.gateway.fakes import (
    READY,
    Fake,
    Talk,
    asked,
    completion,
    of_openai,
    ready_in,
    said,
    served,
)
from tests.kit.patience import eventually

# ---- conversations that are kept


def test_a_chat_goes_on_in_its_session(fake: Fake, talks: list[Talk]) -> None:
    """Its answer may come back without white space around it; other options are another session."""
    with served(fake, keep=2) as port:
        create = of_openai(port).chat.completions.create
        first = create(model="private", messages=said("a"))
        assert first.choices[0].message.content == " answer 1 "
        second = create(model="private", messages=said("a", "answer 1", "b"))
        assert second.choices[0].message.content == " answer 2 " and len(talks) == 1
        assert second.usage is not None and second.usage.prompt_tokens_details is not None
        assert second.usage.prompt_tokens_details.cached_tokens == 1
        stream = create(model="private", messages=said("x", "y", "z"), stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == "answer 1"
        assert len(talks) == 2 and talks[1].before == 2
        third = said("a", "answer 1", "b", "answer 2", "c")
        create(model="private", messages=third, temperature=0)
        assert len(talks) == 3 and talks[1].is_over and not talks[0].is_over
        health = json.loads(asked(port, "GET", "/health")[2])
        assert (health["requests"], health["conversations"]) == (0, 2)
        learned = json.loads(asked(port, "GET", "/privacy")[2])["learned"]
        assert learned["client"] == ["1 turns"]
    assert all(talk.is_over for talk in talks)


def test_a_conversation_that_fails_is_not_kept(fake: Fake, talks: list[Talk]) -> None:
    with served(fake, keep=1) as port:
        create = of_openai(port).chat.completions.create
        with pytest.raises(openai.APIStatusError, match="it went away"):
            create(model="private", messages=said("fail"))
        create(model="private", messages=said("a"))
        stream = create(model="private", messages=said("a", "answer 1", "wait"), stream=True)
        next(iter(stream))
        stream.close()
        assert eventually(lambda: talks[1].is_over)
        assert create(model="private", messages=said("a")).choices and len(talks) == 3


def test_a_stopped_answer_is_gone_on_from(fake: Fake, talks: list[Talk]) -> None:
    """A stream's that is a turn: it ends where it is, and so its session does not."""
    kind = {"content_type": "application/json"}

    def stop(name: str, **headers: str) -> int:
        return asked(port, "POST", f"/v1/requests/{name}/stop", b"{}", **headers)[0]

    with served(fake, keep=1) as port:
        create = of_openai(port).chat.completions.create
        assert stop("absent", **kind) == 404
        stream = create(model="private", messages=said("a", "b", "wait"), stream=True)
        name = stream.response.headers["x-spu-llm-request"]
        assert eventually(lambda: len(talks) == 1 and len(talks[0].messages) == 3)
        assert stop(name) == 415 and stop(name, **kind, host="evil.example") == 403
        assert stop(name, **kind) == 200
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "stop"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        create(model="private", messages=said("a", "b", "wait", text, "c"))
        assert talks[0].turns == 2 and len(talks) == 1
        assert stop(name, **kind) == 404


def test_other_answers_cannot_be_stopped(fake: Fake) -> None:
    """A session of one request ends with it."""
    fake.does = fake.waits
    with served(fake, keep=1) as port:
        stream = of_openai(port).completions.create(model="private", prompt="x", stream=True)
        name = stream.response.headers["x-spu-llm-request"]
        path = f"/v1/requests/{name}/stop"
        status, _, raw = asked(port, "POST", path, b"{}", content_type="application/json")
        assert status == 404 and b"can be stopped" in raw
        stream.close()
        assert eventually(lambda: fake.ended == ["the request was cancelled"])


def test_texts_to_stop_before_are_of_no_conversation(fake: Fake, talks: list[Talk]) -> None:
    with served(fake, keep=1) as port:
        create = of_openai(port).chat.completions.create
        create(model="private", messages=said("a"), stop="x")
        create(model="private", messages=said("a", "b"))  # ends with the model's own words
        assert not talks and len(fake.asked) == 2


def test_idle_conversations_give_their_places(
    fake: Fake, talks: list[Talk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a request that the provider has no place for."""

    def busy(on_event: OnEvent, look: Callable[[], None]) -> Completion:
        if not talks[0].is_over:
            raise BusyError("no place")
        return completion("x")

    fake.does = busy
    with served(fake, keep=1) as port:
        of_openai(port).chat.completions.create(model="private", messages=said("a"))
        assert of_openai(port).completions.create(model="private", prompt="p").choices
    monkeypatch.setattr(Talk, "most_open", 1)
    with served(fake, keep=3) as port:
        create = of_openai(port).chat.completions.create
        for text in ("a", "b"):
            assert create(model="private", messages=said(text)).choices


def test_idle_conversations_end(
    fake: Fake, talks: list[Talk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And helpers of one turn give way before those that went on."""
    with served(fake, keep=2) as port:
        create = of_openai(port).chat.completions.create
        create(model="private", messages=said("a"))
        create(model="private", messages=said("a", "answer 1", "b"))
        create(model="private", messages=said("title?"))
        create(model="private", messages=said("tags?"))
        assert [talk.is_over for talk in talks] == [False, True, False]
    monkeypatch.setattr(running, "IDLE_S", 0.05)
    with served(fake, keep=2) as port:
        of_openai(port).chat.completions.create(model="private", messages=said("c"))
        assert eventually(lambda: talks[-1].is_over)
        assert eventually(lambda: b'"conversations":0' in asked(port, "GET", "/health")[2])


def test_conversations_that_ended_leave_nothing(fake: Fake, talks: list[Talk]) -> None:
    """Not even until their timers would have ended them."""

    def there() -> int:
        gc.collect()
        return sum(isinstance(one, kept.Kept) for one in gc.get_objects())

    before = there()
    with served(fake, keep=1) as port:
        for number in range(6):
            of_openai(port).chat.completions.create(model="private", messages=said(f"{number}"))
        assert len(talks) == 6
        # One is open; the one before it is known until another begins.
        assert eventually(lambda: there() <= before + 2)


# ---- conversations that are opened ahead


def test_a_session_is_there_before_a_chat(fake: Fake, talks: list[Talk], quick: None) -> None:
    """The chat begins in it, and goes on there; another one is opened for the next, with the same
    options.
    """
    with served(fake, keep=1, ahead=READY) as port:
        create = of_openai(port).chat.completions.create
        assert eventually(lambda: len(talks) == 1 and len(ready_in(port)) == 1)
        assert ready_in(port)[0] == {
            "turns": 0,
            "prompt_tokens": 32,
            "answer_tokens_at_least": 3,
            "batches_lacking": 5,
        }
        create(model="private", messages=said("a", "b", "c"), max_tokens=7)
        assert talks[0].most == 7  # any other is as good
        assert [m.content.strip() for m in talks[0].messages] == ["a", "b", "c", "answer 1"]
        assert eventually(lambda: len(talks) == 2)
        create(model="private", messages=said("a", "b", "c", "answer 1", "d"))
        assert talks[0].turns == 2 and not talks[1].turns
        create(model="private", messages=said("x"))
        assert talks[1].turns == 1 and talks[0].is_over  # which was used longest ago
        assert eventually(lambda: len(talks) == 3) and not talks[1].is_over
        create(model="private", messages=said("x", "answer 1", "y"))
        assert talks[1].turns == 2  # whoever begins another chat goes on in it


def test_a_spare_session_gives_way(fake: Fake, talks: list[Talk], quick: None) -> None:
    """To a chat that it cannot begin; the next one has that chat's options."""
    fake.provider.pool = "pool"  # one session at a time has it
    with served(fake, keep=1, ahead=READY) as port:
        create = of_openai(port).chat.completions.create
        assert eventually(lambda: len(talks) == 1)
        create(model="private", messages=[{"role": "system", "content": "s"}, *said("a")])
        assert talks[0].is_over and talks[1].turns == 1
        create(model="private", messages=said("b"), temperature=0)
        assert talks[1].is_over and talks[2].turns == 1
        of_openai(port).completions.create(model="private", prompt="p")
        assert talks[2].is_over
    fake.provider.pool = None
    with served(fake, keep=2, ahead=READY) as port:
        create = of_openai(port).chat.completions.create
        for text in ("b", "c"):
            create(model="private", messages=said(text), temperature=0)
        assert eventually(lambda: not talks[-1].turns and talks[-1].options.temperature == 0)
    assert all(talk.is_over for talk in talks)


def test_a_spare_session_that_fails_is_no_requests_failure(
    fake: Fake, talks: list[Talk], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Talk, "fails", True)
    with served(fake, keep=1, ahead=READY) as port:
        assert eventually(lambda: bool(talks) and talks[0].is_over)
        monkeypatch.setattr(Talk, "fails", False)
        assert of_openai(port).chat.completions.create(model="private", messages=said("a")).choices


def test_a_session_that_has_ended_is_no_requests_failure(
    fake: Fake, talks: list[Talk], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is answered in another one; where that fails too, it is told."""
    monkeypatch.setattr(running, "WATCH_S", 0.05)
    with served(fake, keep=1, ahead=READY) as port:
        create = of_openai(port).chat.completions.create
        assert eventually(lambda: len(talks) == 1)
        talks[0].ends = True
        assert eventually(lambda: len(talks) == 2)  # in place of the one that has ended
        monkeypatch.setattr(Talk, "gone", 2)
        assert create(model="private", messages=said("a")).choices[0].message.content
        assert talks[1].is_over and talks[2].turns == 1
        monkeypatch.setattr(Talk, "gone", 9)
        with pytest.raises(openai.APIStatusError, match="it went away"):
            create(model="private", messages=said("b"))


def test_what_a_chat_takes_is_made_before_a_spare_sessions(
    fake: Fake, talks: list[Talk], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the chat that was asked last comes first of all."""
    monkeypatch.setattr(running, "is_quiet", lambda: True)
    with served(fake, keep=2, ahead=READY) as port:
        create = of_openai(port).chat.completions.create
        for i, text in enumerate("ab"):
            assert eventually(lambda i=i: len(talks) == i + 1 and len(ready_in(port)) == i + 1)
            create(model="private", messages=said(text))
        assert eventually(lambda: len(ready_in(port)) == 3)
        assert [one["turns"] for one in ready_in(port)] == [1, 1, 0]

        def makes() -> list[bool]:
            return [talk.may_make() for talk in talks]

        assert makes() == [False, True, False]
        talks[1].lacking = 0
        assert eventually(lambda: makes() == [True, True, False])
        talks[0].lacking = 0
        assert eventually(lambda: makes() == [True, True, True])
        # What an answer leaves is not known at once: the others wait for that, too.
        talks[1].lacking = 5
        create(model="private", messages=said("b", "answer 1", "c"))
        assert makes() == [False, True, False]


def test_nothing_is_made_while_somebody_waits(
    fake: Fake, talks: list[Talk], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "is_quiet", lambda: True)
    with served(fake, keep=1, ahead=READY) as port:
        assert eventually(lambda: len(talks) == 1 and talks[0].may_make())
        create = of_openai(port).chat.completions.create
        stream = create(model="private", messages=said("wait"), stream=True)
        next(iter(stream))
        assert not talks[0].may_make()
        stream.close()
        assert eventually(talks[0].may_make)
        monkeypatch.setattr(running, "is_quiet", lambda: False)
        assert not talks[0].may_make()
