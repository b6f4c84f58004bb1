"""Where a text ends because somebody asked for it, of special tokens, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from models.stops import Stops
from models.tokenizer import END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.systems.decoding.emitted import Emitted
from spu_llm.systems.watermark.embedding import Embedder
from spu_llm.systems.watermark.keys import Scheme
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import TokenUnits
from tests.kit.models import save_tokenizer
from tests.systems.watermark.chains import key_of

IM_END = "<|im_end|>"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Return one with a special token that ends turns, not texts, as those of chat models have
    it.
    """
    save_tokenizer(tmp_path)
    bpe = tokenizers.Tokenizer.from_file(str(tmp_path / TOKENIZER_FILE))
    bpe.add_special_tokens([IM_END])
    bpe.save(str(tmp_path / TOKENIZER_FILE))
    return Tokenizer.load(tmp_path)


def emitted(tokenizer: Tokenizer, stop: list[str], tokens: list[int]) -> tuple[str, str, str, int]:
    shown: list[str] = []
    text = Emitted(tokenizer, Stops.of(stop, tokenizer), lambda part, drafted: shown.append(part))
    text.add(tokens, 100)
    return text.finish_reason, text.text, "".join(shown), len(text.tokens)


def test_a_special_token_stops_by_its_number(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("alpha"), tokenizer.encode("beta")
    special = tokenizer.special_tokens[IM_END]
    assert special not in tokenizer.eos_ids
    tokens = [*a, special, *b]
    assert emitted(tokenizer, [IM_END], tokens) == ("stop", "alpha", "alpha", len(a))
    assert emitted(tokenizer, ["zz", IM_END], tokens)[:2] == ("stop", "alpha")
    assert emitted(tokenizer, ["pha", IM_END], tokens)[:2] == ("stop", "al")
    assert emitted(tokenizer, [], tokens)[:2] == ("", "alphabeta")


def test_what_ends_a_text_still_does(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("alpha"), *tokenizer.eos_ids]
    assert emitted(tokenizer, [END_OF_TEXT], tokens)[:2] == ("eos", "alpha")


def test_a_special_token_that_is_spelled_out_stops_as_text(tokenizer: Tokenizer) -> None:
    spelled = [token for c in "a" + IM_END for token in tokenizer.encode(c)]
    assert emitted(tokenizer, [IM_END], spelled)[:3] == ("stop", "a", "a")


def test_text_that_waited_for_a_stop_is_shown_before_a_token(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("alp"), tokenizer.special_tokens[IM_END]]
    assert emitted(tokenizer, ["lpx", IM_END], tokens)[:3] == ("stop", "alp", "alp")


class Sampler:
    """Draws the same tokens always, some at a time."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tuple(tokens)

    def sample(self, prefix: object, n: int, max_tokens: int) -> list[Drawn]:
        assert isinstance(prefix, tuple)
        return [Drawn(self._tokens[len(prefix) :][:max_tokens], False)] * n


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_a_marked_text_ends_before_a_special_token(tokenizer: Tokenizer, chunk: int) -> None:
    before, after = tokenizer.encode("alpha beta"), tokenizer.encode("gamma delta")
    tokens = [*before, tokenizer.special_tokens[IM_END], *after]
    embedder = Embedder((key_of(1),), Scheme(4), Sampler(tokens), TokenUnits(), 2, chunk)
    made = embedder.text((), len(tokens), Stops.of([IM_END], tokenizer), tokenizer.decode)
    assert (made.reason, made.content) == ("stop", tuple(before))
    made = embedder.text((), len(tokens), Stops.of(["mma", IM_END], tokenizer), tokenizer.decode)
    assert made.content == tuple(before)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("\n" + IM_END, ["special token", IM_END, "alone"]),
        ("", ["--stop is empty"]),
        ("\udce9", ["--stop is not valid UTF-8"]),
    ],
)
def test_what_could_never_stop_is_refused(
    tokenizer: Tokenizer, stop: str, words: list[str]
) -> None:
    with pytest.raises(InputError) as refused:
        Stops.of([stop], tokenizer)
    assert all(word in str(refused.value) for word in words)
