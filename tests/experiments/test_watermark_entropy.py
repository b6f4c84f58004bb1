"""The study of marked answers by length and entropy: prompts, lanes, comparisons, tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.watermark import entropy, metrics
from experiments.watermark.padded import PADDING, PaddedLanes, side_by_side
from experiments.watermark.plan import RANDOM
from experiments.watermark.texts import Lanes, Method
from models.tokenizer import Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from tests.experiments.chats import chatting, save_chats

WORDS = ("def read(path):", "x", "import os\nimport sys", "class A:", "return")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatting(shipped("public"), tmp_path_factory.mktemp("answers") / "model")


def run(command: list[str]) -> None:
    options = cli.command_line().parse_args(command)
    options.run(options)


def test_padding_changes_nothing_of_a_text(model: Path) -> None:
    """Texts of different lengths, side by side, have the logits that each has alone."""
    prompts = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
    rows = side_by_side(prompts)
    assert rows.tolist()[1] == [PADDING] * 4 + [10]
    columns: list[int] = []
    together, alone = PaddedLanes(model, columns.append), Lanes(model, 100)
    further = np.array([[21, 22, 23]] * 70)  # beyond the rows that the cache begins with
    for count in (1, len(further)):  # from the same beginning again
        state = together.begun(rows)
        before = [alone.begun(np.array([one], np.int32)) for one in prompts]
        for tokens in further[:count]:
            expected = np.concatenate([one.logits for one in before])
            assert np.allclose(state.logits, expected, atol=2e-4)
            state = together.after(state, tokens)
            before = [alone.after(one, tokens[i : i + 1]) for i, one in enumerate(before)]
    assert state.cache.positions == 128 and columns[:2] == [5, 6]
    some = together.picked(state, np.array([2, 0]))
    again = together.after(some, np.array([3, 4]))
    expected = [alone.after(before[i], np.array([t])).logits[0] for i, t in ((2, 3), (0, 4))]
    assert np.allclose(again.logits, np.array(expected), atol=2e-4)


def test_prompts_are_of_each_source_in_turn(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    long = [{"role": "user", "content": "0123456789 " * 100}]
    lines = [{"messages": turns}, {"messages": long}, {"messages": turns[:1]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    tokenizer = Tokenizer.load(model)
    texts = [tokenizer.decode(one) for one in entropy.prompts_of(model, [file], 5)]
    asked = "<user>hi\n<assistant>"
    assert texts[0] == asked and texts[3] == asked  # one without its answer; the long one is not
    assert [text[:20] for text in (texts[1], texts[2])] == ["<user>Write a short "] * 2
    with pytest.raises(InputError, match="--texts must be 38 or fewer"):
        entropy.prompts_of(model, [file], 1000)


def test_groups_and_halves_are_compared() -> None:
    entropies = np.arange(16.0)
    # Prompts of more entropy are told apart at 50 tokens and later, the others never.
    marked = np.where(entropies >= 8, 2.0, 0.0)
    of = np.stack([np.zeros(16), marked, marked], axis=1)
    nulls = [np.zeros((16, 1)), *(np.where(entropies >= 8, 1.0, 0.0)[:, None] for _ in range(2))]
    result = entropy.compared(entropies, of, nulls, [25, 50, 100])
    assert list(result) == ["50", "100", "mixed"]
    at_50 = result["50"]
    assert [group["auc"][0] for group in at_50["groups"]] == [0.5, 0.5, 1, 1]
    assert at_50["groups"][0]["nats"] == [0, 3] and at_50["halves"] == [0.5, 0.5, 0.5]
    assert at_50["correlation"][0] > 0.8
    assert "correlation" not in result["mixed"] and result["mixed"]["halves"][0] > 0


def test_differences_and_correlations_of_known_values() -> None:
    perfect, chance = (np.ones((4, 1)), np.zeros((4, 1))), (np.ones((4, 1)), np.ones((4, 1)))
    assert metrics.difference(metrics.auc, perfect, chance) == [0.5, 0.5, 0.5]
    rising = np.arange(9.0)
    assert metrics.correlation(rising, rising**3) == [1, 1, 1]
    assert metrics.correlation(rising, -rising)[0] == -1
    assert metrics.correlation(rising, np.ones(9)) == [0, 0, 0]


def test_every_method_has_a_place_in_tables() -> None:
    cells = entropy.all_cells(Path("m"), [], entropy.EntropyPlan("m", ())).planned
    assert {method for _, method in cells} == set(entropy.ORDER)
    assert len(cells) == len(set(cells))
    assert cells[0] == (1.0, RANDOM) and (0.5, Method("flat", 1024)) not in cells


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--texts", "4"], "--texts must be at least 8"),
        (["--tokens", "20"], "--tokens must be at least 50"),
        (["--temperatures", "0"], "--temperatures must be 0.05 to 5"),
        (["--tokens", "1000"], "the model has 256 positions"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], words: str, model: Path, tmp_path: Path
) -> None:
    chats = save_chats(tmp_path / "chats.jsonl", *WORDS)
    command = ["experiment", "watermark-entropy", "--model", str(model), "--chats", str(chats)]
    with pytest.raises(InputError, match=words):
        run([*command, "--texts", "8", *options])


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    chats = save_chats(tmp_path / "chats.jsonl", *WORDS)
    with pytest.raises(InputError, match="no chat template"):
        run(["experiment", "watermark-entropy", "--chats", str(chats)])


@pytest.mark.slow
def test_cells_and_their_tables(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a shipped model, eight short texts: all figures are there, and a run goes on."""
    monkeypatch.setattr(entropy, "CORE", (Method("flat", 16), entropy.KUDITIPUDI))
    monkeypatch.setattr(entropy, "ONCE", (entropy.GREEN[0],))
    chats = save_chats(tmp_path / "chats.jsonl", *WORDS)
    file = tmp_path / "entropy.json"
    command = ["experiment", "watermark-entropy", "--model", str(model), "--chats", str(chats)]
    command += ["--texts", "8", "--tokens", "60", "--json", str(file)]
    run(command)
    result = json.loads(file.read_text())
    assert len(result["rows"]) == 2 * 3 + 1
    unmarked, flat = result["rows"][:2]
    assert len(unmarked["entropy"].split()) == 8 and unmarked["false_of"] == 48
    # Sixteen candidates at several bits a token: no unmarked text looks so.
    assert flat["by_length"]["60"]["auc"][0] > 0.95
    assert list(flat["by_length"]) == ["25", "50", "60"]
    assert list(flat["by_entropy"]) == ["50", "mixed"]
    assert [len(group["nats"]) for group in flat["by_entropy"]["50"]["groups"]] == [2] * 4
    lines = entropy.length_rows(result)
    assert lines[0].startswith("| method | temperature | AUC, %, at 25 tokens | 50 | 60 |")
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| flat, k = 1, m = 16",
        "| Kirchenbauer, δ = 0.5",
        "| Kuditipudi",
        "| flat, k = 1, m = 16",
        "| Kuditipudi",
    ]
    assert len(entropy.text_rows(result)) == 2 + 7
    assert not entropy.entropy_rows(result, "100")
    assert len(entropy.in_results(result, "*origin*")) == 8

    def nothing(*of_cell: Any) -> dict[str, Any]:
        raise AssertionError("a cell that is there is not made again")

    monkeypatch.setattr(entropy.Answers, "row", nothing)
    run(command)
    assert json.loads(file.read_text())["rows"] == result["rows"]
