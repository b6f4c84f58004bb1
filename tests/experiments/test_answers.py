"""The study of whole answers: what is kept of a command's report, and the tables of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.fidelity import answers
from experiments.fidelity.answers import AnswersPlan, costs, measure
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from tests.experiments.chats import save_chats

STEP = {
    "seconds": 2.0,
    "bytes": 14e6,
    "messages": 3528,
    "ahead_seconds": 6.0,
    "ahead_bytes": 40e6,
    "ahead_messages": 10,
}


def reported(token_ids: list[int], finish: str = "length") -> dict[str, Any]:
    """Return what the command writes."""
    both = {"client_to_provider": 10_000_000, "provider_to_client": 5_000_000}
    return {
        "text": "x",
        "token_ids": token_ids,
        "finish_reason": finish,
        "seconds": {"offline": 100.0, "prefill": 5.0, "decode": 4.0},
        "first_token_seconds": 120.0,
        "elapsed_seconds": 150.0,
        "bytes": {"online": both, "offline": both},
        "messages": {"online": 1, "offline": 2},
        "per_step": [STEP, STEP | {"seconds": 4.0}],
    }


def run(
    chat_model: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: dict[str, Any],
    done: list[dict[str, Any]],
    numbers: tuple[int, ...] = (2, 1),
) -> tuple[dict[str, Any], list[list[str]]]:
    commands: list[list[str]] = []

    def command(arguments: list[str], path: Path) -> dict[str, Any]:
        commands.append(arguments)
        return {**report, "token_ids": list(report["token_ids"])}

    monkeypatch.setattr(answers, "run_command", command)
    plan = AnswersPlan("model", numbers, 3, "lan")
    actual = measure(chat_model, file, plan, lambda name: None, lambda result: None, done)
    return actual, commands


def test_each_question_is_asked_by_the_command(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save_chats(tmp_path / "a.jsonl", "hi", "what?")
    expected = answers.greedy_of(chat_model, 40, 3)
    first = answers.chat_texts(chat_model, [file])[1]
    told = expected([*first.head, *first.rest])
    actual, commands = run(chat_model, file, monkeypatch, reported(told), [])
    assert [row["question"] for row in actual["rows"]] == ["what?", "hi"]
    assert all("--temperature=0" in c and "--network=lan" in c for c in commands)
    assert commands[0][3] == "--prompt=what?"
    # The command said the same to both; the second one is another chat.
    assert actual["rows"][0]["token_ids"] == actual["rows"][0]["expected"]
    wrong = [row["number"] for row in actual["rows"] if row["token_ids"] != row["expected"]]
    assert len(actual["failures"]) == len(wrong)
    again, more = run(chat_model, file, monkeypatch, reported([0, 0, 0]), actual["rows"][:1])
    assert len(more) == 1 and again["failures"] == ["question 1 is answered otherwise: 'x'"]


def test_an_answer_that_ends_early_is_another_one(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save_chats(tmp_path / "a.jsonl", "hi")
    [chat] = answers.chat_texts(chat_model, [file])
    goes_on = answers.greedy_of(chat_model, 40, 3)([*chat.head, *chat.rest])
    assert len(goes_on) == 3 and not set(goes_on) & Tokenizer.load(chat_model).eos_ids
    ended = reported(goes_on[:-1], "eos")
    actual, _ = run(chat_model, file, monkeypatch, ended, [], (1,))
    assert actual["failures"] == ["question 1 is answered otherwise: 'x'"]


def test_a_number_that_the_file_lacks_is_refused(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save_chats(tmp_path / "a.jsonl", "hi")
    with pytest.raises(InputError, match="questions 1 to 1"):
        run(chat_model, file, monkeypatch, reported([0]), [], (2,))


def test_costs_are_means_with_their_spread() -> None:
    rows = [reported([1]), reported([1]) | {"first_token_seconds": 130.0}]
    text = costs([{"plan": {"network": "local"}, "rows": rows}])
    assert "| first token, set-up and preprocessing included, s | 125 (120 to 130) |" in text
    assert "| a later token online, s | 3.00 (3.00 to 3.00) |" in text
    assert "| a later token ahead, MB | 40.0 (40.0 to 40.0) |" in text
    assert "| everything online, MB | 15 (15 to 15) |" in text
