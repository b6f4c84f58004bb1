"""Prompts in words: what stands around a reference, labels of a batch, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.chat import Message
from models.tokenizer import Tokenizer
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.baselines import augpe
from spu_llm.systems.dp_text.corpus import CorpusRequest, augpe_for
from spu_llm.systems.dp_text.generator import Made
from spu_llm.systems.dp_text.lanes import folded
from spu_llm.systems.dp_text.prompts import Templates, prompts_for, read_labelled, with_room
from tests.kit.models import PRIVATE, endless, save_tokenizer, tiny_params
from tests.kit.pair import Pair

PRIVATE_WORDS, PUBLIC_WORDS = "{stars} of 5: {text}\nOne more of {stars}:", "A review of {stars}:"
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


def said(messages: Sequence[Message]) -> str:
    return "".join(f"<{m.role}>{m.content}\n" for m in messages) + "<assistant>"


def test_a_reference_stands_where_the_template_says(tokenizer: Tokenizer) -> None:
    templates = Templates(PRIVATE_WORDS, PUBLIC_WORDS, ("stars",))
    prompts = templates.prompts(tokenizer, {"stars": "4"}, 9)
    assert tokenizer.decode(prompts.private("good food")) == "4 of 5: good food\nOne more of 4:"
    assert tokenizer.decode(prompts.public) == "A review of 4:"
    begin = prompts.begin
    assert begin and all(row[: len(begin)] == begin for row in (prompts.public, prompts.before))
    # Cut by its own length alone, and what is after it stays.
    cut = prompts.private("zq" * 100)
    assert len(cut) == prompts.room and tokenizer.decode(cut).endswith("\nOne more of 4:")
    # A reference in braces is no field.
    assert "{stars}" in tokenizer.decode(replace(prompts, reference_tokens=40).private("a {stars}"))


def test_a_chat_has_the_models_own_form(tokenizer: Tokenizer) -> None:
    templates = Templates("Like this: {text}!", "A text!", system="Be short.", render=said)
    prompts = templates.prompts(tokenizer, {}, 20)
    private, public = (tokenizer.decode(row) for row in (prompts.private("ab c"), prompts.public))
    assert private == "<system>Be short.\n<user>Like this: ab c!\n<assistant>"
    assert public == "<system>Be short.\n<user>A text!\n<assistant>"
    with pytest.raises(InputError, match="does not write a message as it is"):
        twice = replace(templates, render=lambda messages: said(messages) * 2)
        twice.prompts(tokenizer, {}, 20)


@pytest.mark.parametrize(
    ("private", "public", "labels", "words"),
    [
        ("no place", "x", (), "must have {text} once, .* found 0"),
        ("{text} {text}", "x", (), "found 2 of it"),
        ("{text}", "x {text}", (), "must not be in it"),
        ("{text} {stars}", "x", (), "{stars}, which --labels does not name"),
        ("{text}", "{stars}", (), "{stars}, which --labels does not name"),
        ("{text}", "x", ("text",), "cannot be one"),
    ],
)
def test_templates_that_would_tell_are_refused(
    private: str, public: str, labels: tuple[str, ...], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        Templates(private, public, labels)
    with pytest.raises(InputError, match="no chat template"):
        Templates("{text}", "x", system="s")


def test_all_prompts_get_the_room_of_the_longest(tokenizer: Tokenizer) -> None:
    templates = Templates(PRIVATE_WORDS, PUBLIC_WORDS, ("stars",))
    bare = [templates.prompts(tokenizer, {"stars": stars}, 0) for stars in ("4", "four or so")]
    several = with_room(bare, 80, 8, None)
    assert {prompts.reference_tokens for prompts in several} == {80 - 8 - bare[1].room}
    with pytest.raises(InputError, match="the model has 40 positions"):
        with_room(bare, 40, 8, None)


def test_references_are_read_by_their_labels(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    lines = [("a", "x", 4), ("b", "y", 4), ("", "x", 4), ("d", "x", 4.5)]
    path.write_text(
        "".join(json.dumps({"text": t, "kind": k, "stars": s}) + "\n" for t, k, s in lines)
    )
    assert read_labelled(path, ["kind", "stars"]) == {
        ("x", "4"): ["a", ""],
        ("y", "4"): ["b"],
        ("x", "4.5"): ["d"],
    }
    with pytest.raises(InputError, match="line 1: must have text, a text, and other") as error:
        read_labelled(path, ["other"])
    assert "x" not in str(error.value).replace("text", "")


def test_augpe_asks_for_variations_in_each_style(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variation answers a prompt that has the text it varies, in a style that is drawn."""
    weights = folded(PRIVATE, endless(tiny_params(PRIVATE, 1)))
    settings = replace(augpe_for(CorpusRequest("augpe", 5.0, 1e-6, 8, 1, 4)), variations=20)
    prompts = prompts_for(tokenizer, "q", 64, 4, 8)
    styles = ("casual", "brief")
    vary = [Templates(f"{style}: {{text}} =", "x").prompts(tokenizer, {}, 4) for style in styles]
    asked: list[str] = []
    texts = augpe._Writer.texts

    def heard(self: Any, rows: Sequence[list[int]], prg: Prg) -> list[Made]:
        asked.extend(tokenizer.decode(row) for row in rows)
        return texts(self, rows, prg)

    monkeypatch.setattr(augpe._Writer, "texts", heard)
    once = replace(settings, iterations=1)
    args = PRIVATE, weights, prompts, ["alpha", "beta"], 1, Prg.from_seed(1, "augpe")
    augpe.corpus(once, *args, vary=vary)
    first, *others = asked
    assert first == "q" and len(others) == 20
    kinds = [text.partition(":")[0] for text in others]
    assert set(kinds) == set(styles) and len({text.partition(":")[2] for text in others}) == 1


# ---- the command


def files(folder: Path, **texts: str) -> dict[str, str]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in texts}


def arguments(folder: Path, model: Path, **change: str) -> list[str]:
    path = folder / "references.jsonl"
    rows = [{"text": f"zebra {i}", "stars": i % 2} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model": str(model),
        "references": str(path),
        "epsilon": "5",
        "batch": "2",
        "texts": "3",
        "out": str(folder / "out.jsonl"),
        "max_new_tokens": "4",
        "reference_tokens": "8",
        **change,
    }
    given = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    return ["dp", "generate", *(part for pair in given for part in pair)]


def run(command: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    return int(end.value.code or 0)


def test_a_corpus_by_labels_in_a_chat(pair: Pair, tmp_path: Path) -> None:
    """Every batch has references with the same labels, which its text is written with."""
    model = tmp_path / "model"
    shutil.copytree(pair.private, model)
    (model / "chat_template.jinja").write_text(CHAT)
    given = files(tmp_path, template="{stars}: {text}?", public_template="{stars}?")
    asked = arguments(tmp_path, model, **given, labels="stars", system="s")
    assert run(asked) == 0
    out = tmp_path / "out.jsonl"
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert [text["stars"] for text in made] == ["0", "0", "1"]
    statement = json.loads((tmp_path / "out.jsonl.privacy.json").read_text())
    facts = statement["run"]
    assert facts["chat"] and facts["labels"] == ["stars"] and facts["system"] == "s"
    assert facts["template"] == "{stars}: {text}?" and "query" not in facts
    assert any("labels" in line for line in statement["public"])
    assert "zebra" not in json.dumps(statement)
    # What a text was drawn from is in the account: other labels are other references.
    before = out.read_bytes()
    assert run(asked) == 0 and out.read_bytes() == before
    (tmp_path / "public_template").write_text("Other {stars}?")
    assert run(asked) == 2


def test_augpe_by_templates(pair: Pair, tmp_path: Path) -> None:
    given = files(
        tmp_path, template="{text}?", public_template="a?", variation_template="{style}: {text}"
    )
    asked = arguments(
        tmp_path, pair.private, **given, method="augpe", iterations="2", max_new_tokens="3"
    )
    assert run(asked) == 0
    facts = json.loads((tmp_path / "out.jsonl.privacy.json").read_text())
    assert facts["run"]["iterations"] == facts["parameters"]["iterations"] == 2
    assert facts["run"]["variation_template"] == "{style}: {text}" and not facts["run"]["chat"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "give --query, or both"),
        ({"query": "q", "template": "t"}, "give --query, or both"),
        ({"template": "t"}, "give --query, or both"),
        ({"query": "q", "labels": "stars"}, "--labels is of prompts from --template"),
        ({"query": "q", "system": "s"}, "--system is of prompts from --template"),
        ({"template": "t", "public_template": "p", "server": "127.0.0.1:1"}, "--query alone"),
        (
            {"template": "t", "public_template": "p", "variation_template": "v"},
            "is of --method augpe",
        ),
        (
            {"template": "t", "public_template": "p", "labels": "a", "method": "augpe"},
            "leave --labels out",
        ),
        ({"template": "t", "public_template": "p", "labels": "text"}, "a 'text' of its own"),
        (
            {"template": "t", "public_template": "p", "labels": "a", "adjacency": "add-or-remove"},
            "leave --adjacency or them out",
        ),
        ({"template": "none", "public_template": "p"}, "cannot read none, of --template"),
        ({"query": "q", "method": "augpe", "iterations": "0"}, "--iterations must be 1 to 100"),
    ],
)
def test_templates_that_do_not_go_together_are_refused(
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path, t="{text}?", p="a?", v="{text}")
    assert run(arguments(tmp_path, pair.private, **change)) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()
