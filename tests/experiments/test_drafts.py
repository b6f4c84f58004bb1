"""The study of drafts: texts by speculative sampling, counted step by step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.common import commands
from experiments.common.saved import DATA
from experiments.completions import drafts
from experiments.completions.drafts import (
    DraftedText,
    DraftsCell,
    DraftsPlan,
    prompts_of,
    run,
    table,
)
from models.chat import Template
from models.draft import Proposer
from models.ngrams import Ngrams
from models.text_format import TextFormat
from protocols.verification.distribution import Sampling
from spu_llm.api.defaults import shipped
from spu_llm.app import cli
from spu_llm.core.errors import InputError

GREEDY = Sampling(0.0)


class Cycle(Proposer):
    """Counts up to 4 and begins again."""

    vocab_size = 6

    def logits(self, tokens: list[int]) -> np.ndarray:
        return 9.0 * (np.arange(6) == (tokens[-1] + 1) % 5)


@pytest.mark.parametrize(
    ("prompt", "drafter", "expected"),
    [
        (
            [0, 1, 2, 3, 4, 0],
            Ngrams(6),
            DraftedText(13, 3, 9, 9, 9, 9.0, 9),
        ),  # all of it was there before
        ([0], Cycle(), DraftedText(13, 3, 9, 9, 9, 9.0, 9)),
        # Nothing stays until the first round is over; then everything does.
        ([0], Ngrams(6), DraftedText(16, 6, 18, 9, 12, 9.0, 9)),
    ],
)
def test_steps_are_counted(prompt: list[int], drafter: Proposer, expected: DraftedText) -> None:
    assert run(Cycle(), drafter, prompt, frozenset({5}), 13, 3, GREEDY, 1) == expected


def test_a_text_ends_where_its_model_ends_it() -> None:
    collected = run(Cycle(), Ngrams(6), [0], frozenset({3}), 13, 3, GREEDY, 1)
    assert collected.tokens < 5


def test_chats_are_rendered_where_there_is_a_template() -> None:
    text = TextFormat.of_model(shipped("private"))
    code = list(prompts_of(text))
    assert [kind for kind, _ in code] == ["repeats"] * 5 + ["others"] * 5
    assert text.tokenizer.decode(code[-1][1]) == "async def main():"
    template = Template("<{{ messages[0]['content'] }}>")
    chats = list(prompts_of(TextFormat(text.tokenizer, template, "", b"")))
    assert len(chats) == 10
    assert text.tokenizer.decode(chats[5][1]).startswith("<What is the capital of France")


def test_questions_have_their_kinds(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    asked = {"messages": [{"role": "user", "content": "Why?"}]}
    file.write_text(f"{json.dumps(asked | {'kind': 'short'})}\n{json.dumps(asked)}\n")
    text = TextFormat.of_model(shipped("private"))
    template = Template("<{{ messages[0]['content'] }}>")
    asks = list(prompts_of(TextFormat(text.tokenizer, template, "", b""), file))
    assert [kind for kind, _ in asks] == ["short", "questions"]
    assert text.tokenizer.decode(asks[0][1]) == "<Why?>"
    with pytest.raises(InputError, match="with a chat template"):
        list(prompts_of(text, file))
    told = drafts._told(file)
    file.write_text("\n")
    assert told.startswith("questions.jsonl ") and drafts._told(file) != told
    with pytest.raises(InputError, match="of --questions, is empty"):
        list(prompts_of(TextFormat(text.tokenizer, template, "", b""), file))


def test_texts_fit_into_the_models_context() -> None:
    plan = DraftsPlan("private", "public", 5000, 4)
    with pytest.raises(InputError, match="give fewer --tokens"):
        drafts.Study(shipped("private"), shipped("public"), None, plan, lambda words: None)


def test_the_table_has_the_spread_over_prompts() -> None:
    runs = [
        {
            "kind": "repeats",
            "way": "both",
            "temperature": 0.7,
            "tokens": t,
            "steps": steps,
            "drafted": 4 * steps,
            "accepted": t - 1 - steps,
            "places": 2 * steps,
            "overlap": 0.5 * steps,
            "likeliest": steps,
        }
        for t, steps in ((21, 10), (41, 10), (1, 0))
    ]
    head, row = (line for line in table({"rows": runs}).splitlines() if "---" not in line)
    assert (
        "3.00 (2.00 to 4.00)" in row
        and "50%" in row
        and "0.25" in row
        and row.endswith("| 0.50 |")
        and drafts.COLUMNS[4].head in head
    )


def test_a_curve_has_its_first_and_its_last_point() -> None:
    curve = [{"tokens": 1000 * i, "acceptance": i / 100, "same": i / 50} for i in range(21)]
    head, _, acceptance, same = drafts.curve_table({"curve": curve}, most=3).splitlines()
    assert head == "| tokens learnt | 0 | 10,000 | 20,000 |"
    assert acceptance == "| acceptance | 0.00 | 0.10 | 0.20 |"
    assert same.endswith("| 0% | 20% | 40% |")


@pytest.mark.parametrize("name", ["drafts_shipped", "drafts_smollm2", "drafts_t5"])
def test_committed_files_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that a file lacks is counted alone, and its row stands in its place."""
    index = json.loads((DATA / "index.json").read_text(encoding="utf-8"))
    options = cli.command_line().parse_args(index[name]["command"].split()[1:])
    small = options.draft_model or shipped("public")
    plan = DraftsPlan(
        (options.model or shipped("private")).name, small.name, options.tokens, options.draft_length
    )
    rows = commands.earlier(DATA / f"{name}.json", plan)
    asked = []

    def row(study: object, cell: DraftsCell, say: object) -> drafts.Row:
        asked.append(cell)
        return rows[13]

    monkeypatch.setattr(drafts.Study, "row", row)
    monkeypatch.setattr(drafts.Study, "__init__", lambda *given: None)
    for done in (rows, [row for row in rows if row is not rows[13]]):
        again = drafts.measure(shipped("private"), small, None, plan, lambda words: None, done=done)
        assert again["rows"] == rows
    assert asked == [DraftsCell("the draft model", 0.0, 3)]
    with pytest.raises(InputError, match="no cells of this very plan"):
        commands.earlier(DATA / f"{name}.json", replace(plan, draft_model=None))
