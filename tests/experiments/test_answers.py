"""The study of whole answers: what is kept of a command's report, and the tables of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.fidelity import answers
from experiments.fidelity.answers import AnswersPlan, costs, measure
from models.tokenizer import Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.app.cli import main
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
        "accepted": 0,
        "per_step": [STEP, STEP | {"seconds": 4.0}],
    }


def run(
    chat_model: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: dict[str, Any],
    done: list[dict[str, Any]],
    numbers: tuple[int, ...] = (2, 1),
    draft_model: Path | None = None,
) -> tuple[dict[str, Any], list[list[str]]]:
    commands: list[list[str]] = []

    def command(arguments: list[str], path: Path) -> dict[str, Any]:
        commands.append(arguments)
        return {**report, "token_ids": list(report["token_ids"])}

    monkeypatch.setattr(answers, "run_command", command)
    plan = AnswersPlan("model", numbers, 3, "lan")
    if draft_model is not None:
        plan = replace(plan, draft_model=draft_model.name, drafts=(2, 4))
    actual = measure(chat_model, file, draft_model, plan, lambda said: None, lambda _: None, done)
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
    rows = [reported([1] * 3), reported([1] * 3) | {"first_token_seconds": 130.0}]
    text = costs([{"plan": {"network": "local"}, "rows": rows}])
    assert "| first token, set-up and preprocessing included, s | 125 (120 to 130) |" in text
    assert "| a later token online, s | 3.00 (3.00 to 3.00) |" in text
    assert "| a later token ahead, MB | 40.0 (40.0 to 40.0) |" in text
    assert "| everything online, MB | 15 (15 to 15) |" in text


def test_drafted_and_one_by_one_take_turns_at_being_first(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save_chats(tmp_path / "a.jsonl", "hi", "what?")
    actual, commands = run(
        chat_model, file, monkeypatch, reported([0] * 3), [], draft_model=chat_model
    )
    assert [row["number"] for row in actual["rows"]] == [2, 2, 2, 1, 1, 1]
    asked = [row["drafts"] for row in actual["rows"]]
    assert asked == [0, 2, 4, 2, 4, 0]
    for command, drafts in zip(commands, asked, strict=True):
        assert ("--standard" in command) is (drafts == 0)
        assert (f"--draft-model={chat_model}" in command) is (drafts > 0)
        assert (f"--draft-length={drafts}" in command) is (drafts > 0)
    assert "question 2 is answered otherwise, 4 drafts a step: 'x'" in actual["failures"]
    _, more = run(
        chat_model, file, monkeypatch, reported([0] * 3), actual["rows"][:5], draft_model=chat_model
    )
    assert ["--standard" in command for command in more] == [True]


def test_what_drafts_save_is_of_one_question() -> None:
    """A later token's cost is all steps' cost over the tokens after the first."""
    shared = {"number": 1, "question": "a|b", "secret": 5, "expected": [1] * 5}
    one = shared | reported([1] * 3) | {"drafts": 0}
    drafted = shared | reported([1] * 5) | {"drafts": 4, "elapsed_seconds": 100.0}
    fewer = drafted | {"drafts": 1, "elapsed_seconds": 75.0}
    alone = one | {"number": 2}
    plan = {"network": "lan", "questions": [1, 2]}
    result = {"plan": plan, "rows": [one, drafted, fewer, alone]}
    [text] = answers.saved_by_drafts([result])
    assert text.splitlines()[2:] == [
        f"| a\\|b | lan | {drafts} | 5 | 2.00 | 3.0 to 1.5: 2.00 times | 150 to {saved} times "
        "| 30 to 30: 1.00 times |"
        for drafts, saved in ((1, "75: 2.00"), (4, "100: 1.50"))
    ]
    assert answers.saved_by_drafts([{"plan": plan, "rows": [one, alone]}]) == []
    text = costs([result])
    columns = "lan | lan, 4 drafts a step | lan, 1 draft a step |"
    assert f"| mean over the answers (least to most) | {columns}" in text
    assert "| a later token online, s | 3.00 (3.00 to 3.00) | 1.50 (1.50 to 1.50) |" in text


def test_a_draft_model_of_another_tokenizer_is_refused(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save_chats(tmp_path / "a.jsonl", "hi")
    with pytest.raises(SystemExit) as end:
        main(
            ["experiment", "answers", "--model", str(chat_model), "--questions", str(file)]
            + ["--numbers", "1", "--draft-model", str(shipped("public"))]
        )
    assert end.value.code == 2
    assert "--draft-model has another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draft-length", "2"], "--draft-length: drafts are of a --draft-model"),
        (["--draft-model", "PRIVATE", "--draft-length", "2,2"], "is asked for once"),
        (["--draft-model", "PRIVATE", "--draft-length", "0"], "--draft-length must be"),
    ],
)
def test_numbers_of_drafts_are_checked(
    chat_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    file = save_chats(tmp_path / "a.jsonl", "hi")
    given = [str(chat_model) if option == "PRIVATE" else option for option in options]
    command = ["experiment", "answers", "--model", str(chat_model), "--questions", str(file)]
    with pytest.raises(SystemExit) as end:
        main([*command, "--numbers", "1", *given])
    assert end.value.code == 2
    assert words in capsys.readouterr().err
