"""Several models behind one gateway: each request gets the one that it names."""

from __future__ import annotations

import json

import openai
import pytest

from tests.gateway.fakes import READY, Fake, Talk, asked, completion, of_openai, said, served
from tests.kit.patience import eventually


@pytest.fixture
def other() -> Fake:
    made = Fake()
    made.does = lambda on_event, look: completion("of the other")
    return made


def test_each_request_gets_the_model_that_it_names(fake: Fake, other: Fake) -> None:
    with served(fake, others={"other": other}) as port:
        client = of_openai(port)
        assert [one.id for one in client.models.list()] == ["private", "other"]
        assert client.models.retrieve("other").id == "other"
        texts = [
            client.completions.create(model=name, prompt="x").choices[0].text
            for name in ("other", "private")
        ]
        assert texts == ["of the other", "Good dayé"]
        with pytest.raises(openai.NotFoundError, match="only 'private', 'other'"):
            client.completions.create(model="absent", prompt="x")
        assert json.loads(asked(port, "GET", "/health")[2])["models"] == ["private", "other"]


def test_a_chat_goes_on_with_its_own_model_alone(
    fake: Fake, other: Fake, talks: list[Talk]
) -> None:
    """Also where another model's session has heard the very same words."""
    with served(fake, keep=2, others={"other": other}) as port:
        create = of_openai(port).chat.completions.create
        create(model="private", messages=said("a"))
        again = said("a", "answer 1", "b")
        create(model="other", messages=again)
        create(model="private", messages=again)
        assert [talk.provider for talk in talks] == [fake.provider, other.provider]
        assert [talk.turns for talk in talks] == [2, 1]


@pytest.mark.usefixtures("quick")
def test_a_session_ahead_is_of_the_model_that_is_asked_most(
    fake: Fake, other: Fake, talks: list[Talk]
) -> None:
    with served(fake, keep=1, ahead=READY, others={"other": other}) as port:
        assert eventually(lambda: len(talks) == 1)
        create = of_openai(port).chat.completions.create
        for text in ("a", "b"):
            create(model="other", messages=said(text))
        assert talks[0].turns == 0, "the first model's session is no other's"
        assert eventually(lambda: any(t.provider is other.provider and not t.turns for t in talks))
