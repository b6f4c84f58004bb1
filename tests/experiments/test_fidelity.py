"""The study of a chat model's fidelity, on a tiny one: forwards, answers, a session, the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common import saved
from experiments.fidelity.chat_texts import ChatText, Forward, chat_texts
from experiments.fidelity.pieces import answered, by_pieces, greedy_of, in_results, table
from experiments.fidelity.shares import Windows, beginnings, dealt, on_shares
from models.family import logits
from models.hf import load_model, save_model
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from tests.experiments.chats import save_chats

CHATS = ("if path:\n" * 3, "hi", "def main(): pass")


@pytest.fixture(scope="module")
def texts(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[ChatText]:
    file = save_chats(tmp_path_factory.mktemp("chats") / "a.jsonl", *CHATS)
    return chat_texts(chat_model, [file])


@pytest.fixture(scope="module")
def forwards(chat_model: Path, texts: list[ChatText]) -> tuple[Forward, Forward]:
    config, params = load_model(chat_model)
    exact, pieces = (Forward(config, params, texts[0].head, pieces=p) for p in (False, True))
    return exact, pieces


def test_chats_are_cut_where_words_begin(chat_model: Path, texts: list[ChatText]) -> None:
    tokenizer = Tokenizer.load(chat_model)
    assert [tokenizer.decode(text.head) for text in texts] == ["<user>"] * 3
    assert tokenizer.decode(texts[1].rest) == "hi\n<assistant>"
    assert [text.kind for text in texts] == ["kind 0", "kind 1", "kind 0"]
    assert texts[1].words == "hi"


def test_chats_that_begin_otherwise_are_refused(chat_model: Path, tmp_path: Path) -> None:
    files = [
        save_chats(tmp_path / "a.jsonl", "hi"),
        save_chats(tmp_path / "b.jsonl", "hi", system="x"),
    ]
    with pytest.raises(InputError, match="begin in different ways"):
        chat_texts(chat_model, files)


def test_both_forwards_go_on_after_the_public_tokens(
    chat_model: Path, texts: list[ChatText], forwards: tuple[Forward, Forward]
) -> None:
    """The exact one as a forward of the whole text; pieces near it, and not the same."""
    config, params = load_model(chat_model)
    for text in texts:
        whole = np.asarray(logits(params, config, jnp.asarray([*text.head, *text.rest])))
        (exact, _), (near, outside) = (forward(text.rest) for forward in forwards)
        np.testing.assert_allclose(exact, whole[len(text.head) :], atol=1e-4)
        assert 1e-4 < np.abs(near - exact).max() < 0.05 and not outside


def test_texts_beyond_their_ranges_are_counted_alone(
    chat_model: Path, texts: list[ChatText], forwards: tuple[Forward, Forward]
) -> None:
    class LeavesInTheFirst(Forward):
        def __init__(self) -> None:
            pass

        def __call__(self, tokens: Any) -> tuple[np.ndarray, list[str]]:
            rows, _ = forwards[0](tokens)
            first = tokens == texts[0].rest
            return rows + (100.0 if first else 0.0), ["last norm"] if first else []

    compared, actual = by_pieces(texts, forwards[0], LeavesInTheFirst(), lambda name: None)
    assert [text.outside for text in actual] == [["last norm"], [], []]
    assert compared.positions == sum(len(text.rest) for text in texts[1:])
    assert compared.largest_error == 0.0


def test_pieces_say_that_a_row_left_its_range(
    chat_model: Path, texts: list[ChatText], tmp_path: Path
) -> None:
    config, params = load_model(chat_model)
    save_model(tmp_path / "huge", config, params | {"wte": params["wte"] * 1000.0})  # type: ignore[operator]
    pieces = Forward(*load_model(tmp_path / "huge"), texts[0].head, pieces=True)
    assert pieces(texts[1].rest)[1]


def test_answers_are_compared_token_by_token(
    chat_model: Path, texts: list[ChatText], forwards: tuple[Forward, Forward]
) -> None:
    exact, pieces = forwards
    greedy, tokenizer = greedy_of(chat_model, 40, 5), Tokenizer.load(chat_model)
    same = answered(texts, exact, pieces, tokenizer, greedy, lambda name: None)
    assert [(q.tokens, q.flip, q.margin) for q in same] == [(5, None, None)] * 3
    assert all(q.closest > 0 for q in same)

    class OtherThird(Forward):
        """Prefers another token at the third place of an answer, and at all after it."""

        def __init__(self) -> None:
            pass

        def __call__(self, tokens: Any) -> tuple[np.ndarray, bool]:  # type: ignore[override]
            rows = exact(tokens)[0].copy()
            order = np.argsort(rows, axis=-1)
            at = np.arange(len(rows) - 3, len(rows))
            rows[at, order[at, -2]] = rows[at, order[at, -1]] + 1.0
            return rows, False

    (one,) = answered(texts[1:2], exact, OtherThird(), tokenizer, greedy, lambda name: None)
    assert one.flip == 2 and one.margin is not None and one.margin >= one.closest > 0


@pytest.mark.parametrize("way", [dealt, pytest.param(on_shares, marks=pytest.mark.slow)])
def test_a_session_opens_all_logits(
    chat_model: Path, texts: list[ChatText], forwards: tuple[Forward, Forward], way: Any
) -> None:
    """By a dealer or between two processes: the programs of a completion, a prefill of one token
    and a step of five.
    """
    actual, took, agreed = way(chat_model, texts[0].head, [texts[0].rest[:6]], forwards[0])
    assert actual.positions == 6 and actual.agreement == 1.0
    assert 0 < actual.largest_error < 0.03
    vocab = load_model(chat_model)[0].vocab_size
    assert f"logits (study): {6 * vocab} x 64 bit in 2 openings" in took["learned"]["client"]
    assert not any("logits" in line for line in took["learned"]["provider"])
    assert way is dealt or agreed["network"] == "local"


def test_beginnings_are_of_chats_that_are_long_enough(texts: list[ChatText]) -> None:
    (one,) = beginnings(texts, 1)
    assert one == texts[0].rest[:25] and len(texts[1].rest) < 25
    with pytest.raises(InputError, match="--windows must be at most"):
        beginnings(texts, 3)


def test_windows_that_do_not_fit_a_model_are_refused(chat_model: Path) -> None:
    config, _ = load_model(chat_model)
    Windows(1, 2, (1,)).check(config)
    for windows, tokens in ((0, 2), (1, 1), (1, config.context)):
        with pytest.raises(InputError, match="do not fit this model"):
            Windows(windows, tokens, (1,)).check(config)


def test_the_tables_name_what_failed() -> None:
    compared = {
        "positions": 200,
        "largest_error": 0.3,
        "mean_error": 0.01,
        "quantiles": {"0.5": 0.1},
        "agreement": 0.985,
        "flips": [{"margin": 0.02}, {"margin": 0.01}],
        "perplexity_float32": 20.0,
        "perplexity_secure": 20.01,
    }
    question = {
        "kind": "facts",
        "question": "a | b\nc",
        "answer": "x",
        "tokens": 3,
        "flip": 1,
        "margin": 0.01,
        "closest": 0.01,
    }
    result = {
        "pieces": compared,
        "failures": ["too few"],
        "questions": [question],
        "texts": [
            {"kind": "code", "tokens": 7, "outside": []},
            {"kind": "code", "tokens": 9, "outside": ["last norm"]},
        ],
    }
    text = table(result)
    assert "| top-1 agreement (at least 99%) | 98.50% |" in text
    assert "| perplexity, these logits (within 0.1%) | 20.010 (+0.050%) |" in text
    assert "| largest margin of a flip | 0.0200 of 2 |" in text
    assert "| code | 2 | 16 | 1 (last norm) |" in text
    assert r"| facts | a \| b c | 3 | 0.010 | token 2 differs, margin 0.010 |" in text
    assert text.endswith("criterion: too few")
    made = {
        "machine": {
            "commit": "0123456",
            "cores": 2,
            "memory_gib": 24,
            "date": "2026-11-25T00",
            "load": [1.0, 2.0],
        }
    }
    files = {"a": result | made, "b": {"shares": compared | {"agreement": 1.0}} | made}
    both = in_results(files)
    assert "| top-1 agreement (at least 99%) | 100.00% | 98.50% |" in both[0]
    assert both[1].endswith(f"{saved.link('b')}.*") and both[-1].endswith(f"{saved.link('a')}.*")
