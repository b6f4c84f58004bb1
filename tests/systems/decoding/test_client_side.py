"""What the client emits and shows: end of text, stop strings, limits, whole characters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.token import Token, TokenOutcome
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.decoding.generate import ClientSide
from spu_llm.systems.decoding.records import COMPLETION
from spu_llm.systems.decoding.request import Request
from tests.kit.models import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


class Drafts:
    """A drafter that proposes what it is told to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.next: list[int] = []
        self._vocab_size = tokenizer.vocab_size

    def propose(self, context: list[int], count: int, *args: Any, **options: Any) -> Any:
        assert count == len(self.next)
        return self.next, np.eye(self._vocab_size)[self.next]


class Client:
    """A `ClientSide` that is fed bytes, one token each."""

    def __init__(self, tokenizer: Tokenizer, *stop: str, limit: int = 100) -> None:
        self.shown: list[str] = []
        self.drafted: list[str] = []  # what of each was drafted
        self._tokenizer, self._limit = tokenizer, limit
        self._drafter = Drafts(tokenizer)
        singles = (i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes([i])) == 1)
        self._of_byte = {tokenizer.token_bytes([i]): i for i in singles}
        self.side = ClientSide(
            prompt=[0],
            tokenizer=tokenizer,
            drafter=self._drafter,  # type: ignore[arg-type]
            verifier=Token(Sampling()),
            streams=Streams(Prg.from_seed(1, "drafts"), Prg.from_seed(1, "sampling")),
            stop=list(stop),
            on_text=self._show,
        )

    def _show(self, text: str, drafted: int) -> None:
        self.shown.append(text)
        self.drafted.append(text[:drafted])

    def tokens(self, data: bytes) -> list[int]:
        return [self._of_byte[bytes([b])] for b in data]

    def step(self, *tokens: int, accept: int | None = None) -> int:
        """Return one secure step that ends with the last token; those before it are accepted
        drafts.

        With `accept`, only so many drafts are accepted and the last token follows them.
        """
        *self._drafter.next, last = tokens
        self.side.propose(len(self._drafter.next))
        stay = len(self._drafter.next) if accept is None else accept
        outcome = TokenOutcome(np.int32(stay), np.int32(last))
        return int(self.side.resolve([outcome], self._limit).sum()) - 1

    def type(self, data: bytes) -> None:
        for token in self.tokens(data):
            assert not self.side.finish_reason
            self.step(token)


def test_every_token_is_shown_at_once(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer)
    client.type(b"abc")
    assert client.shown == ["a", "b", "c"] and client.side.finish_reason == ""


def test_end_of_text_is_not_part_of_it(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer)
    client.type(b"ab")
    client.step(*tokenizer.eos_ids)
    assert client.side.finish_reason == "eos"
    assert (client.side.text, client.side.tokens) == ("ab", client.tokens(b"ab"))


def test_end_of_text_first(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer)
    client.step(*tokenizer.eos_ids)
    assert (client.side.text, client.side.tokens, client.shown) == ("", [], [])
    assert client.side.finish_reason == "eos"


def test_what_was_drafted_is_told(tokenizer: Tokenizer) -> None:
    """Of a step's text, the drafts that stay; the last token is the model's own."""
    client = Client(tokenizer)
    client.step(*client.tokens(b"abc"))
    client.step(*client.tokens(b"dxyz"), accept=1)
    client.step(*client.tokens(b"e"))
    assert client.shown == ["abc", "dz", "e"]
    assert client.drafted == ["ab", "d", ""]


def test_any_of_several_tokens_ends_a_text(tokenizer: Tokenizer) -> None:
    (z,) = Client(tokenizer).tokens(b"z")
    client = Client(replace(tokenizer, eos_ids=tokenizer.eos_ids | {z}))
    client.type(b"a")
    client.step(z)
    assert (client.side.text, client.side.finish_reason) == ("a", "eos")


def test_drafts_after_the_end_of_text_are_dropped(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer)
    a, b, c = client.tokens(b"abc")
    assert client.step(a, *tokenizer.eos_ids, b, c) == 3  # what the provider hears
    assert client.side.text == "a" and client.shown == ["a"]


def test_only_drafts_before_the_first_rejection_stay(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer)
    a, b, c, z = client.tokens(b"abcz")
    assert client.step(a, b, c, z, accept=1) == 1
    assert client.side.text == "az"


def test_the_limit_cuts_a_step(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, limit=2)
    client.step(*client.tokens(b"abcd"))
    assert client.side.finish_reason == "length"
    assert (client.side.text, len(client.side.tokens)) == ("ab", 2)


def test_a_stop_string_over_several_tokens_is_held_back(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, "\n\nend")
    client.type(b"a\n\nen")
    assert "".join(client.shown) == "a"
    client.type(b"d")
    assert (client.side.finish_reason, client.side.text) == ("stop", "a")
    assert "".join(client.shown) == "a"


def test_what_only_looked_like_a_stop_is_shown_in_the_end(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, "abac")
    client.type(b"abab")
    assert "".join(client.shown) == "ab"  # the last two may begin it
    client.type(b"x")
    assert "".join(client.shown) == "ababx"
    client.type(b"aba")
    client.step(*tokenizer.eos_ids)
    assert "".join(client.shown) == client.side.text == "ababxaba"


def test_the_first_of_several_stop_strings_counts(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, "cd", "bcd")
    client.type(b"abcd")
    assert client.side.text == "a" == "".join(client.shown)


def test_a_stop_string_inside_accepted_drafts(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, "b")
    client.step(*client.tokens(b"abcd"))
    assert (client.side.text, client.side.tokens) == ("a", client.tokens(b"ab"))


def test_a_character_over_several_tokens_is_shown_whole(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer)
    client.type("aé€😀".encode())
    assert client.shown == ["a", "é", "€", "😀"]


def test_an_unfinished_character_at_the_end_is_marked(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer)
    client.type(b"a\xe2\x82")
    assert client.shown == ["a"]
    client.step(*tokenizer.eos_ids)
    assert client.side.text == "a\ufffd" == "".join(client.shown)


def test_a_stop_string_that_is_not_ascii(tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, "é!")
    client.type("aé".encode())
    assert client.shown == ["a"]
    client.type(b"!")
    assert client.side.text == "a" and client.side.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"show_progress": 0}, "show_progress is 0, not of type bool"),
        ({"verify": None}, "verify is None, not of type str"),
        ({"max_new_tokens": "5"}, "max_new_tokens is '5', not of type int"),
        ({"prompt_tokens": 5.0}, "prompt_tokens is 5.0"),
        ({"temperature": 1}, "temperature is 1, not of type float"),
        ({"more": 1}, "'more' is not known"),
    ],
)
def test_a_request_from_a_peer_has_exact_types(change: dict[str, Any], said: str) -> None:
    fields = {"prompt_tokens": 5, "max_new_tokens": 5, "draft_length": 1}
    fields |= {"temperature": 0.7, "verify": "token", "top_k": 0, "top_p": 1.0}  # type: ignore[dict-item]
    fields |= {"show_progress": False, "public_prefix": "", "candidates": 1, **change}  # type: ignore[dict-item]
    if not said:
        assert COMPLETION.asked(fields) == Request(5, 5, 1, 0.7)
        return
    with pytest.raises(InputError, match=f"other fields than a completion's: {said}"):
        COMPLETION.asked(fields)
