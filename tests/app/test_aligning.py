"""`spu-llm align`: from a private model's answers to a draft model, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models.alignment.answers import read_answers
from models.files import WEIGHTS_FILE
from models.hf import load_model
from models.tokenizer import Tokenizer
from spu_llm.app import cli
from tests.kit.models import make_pair, make_t5_pair

Ran = Callable[..., tuple[object, str]]
SHORT = ("--length", "17", "--epochs", "1", "--top-k", "3")


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    """Exit code of a command, and all it printed."""

    def run(*arguments: str | Path) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["align", *map(str, arguments)])
        out, err = capsys.readouterr()
        return end.value.code, out + err

    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def test_a_draft_model_is_made_of_answers(
    pair: tuple[Path, Path], tmp_path: Path, ran: Ran
) -> None:
    """By the private model's owner, and again by who has nothing but the answers."""
    private, public = pair
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_text("alpha beta gamma delta " * 40)
    given = ("--private", private, "--public", public, "--text", text, "--write", 600, *SHORT)
    code, said = ran(*given, "--out", out)
    assert code == 0 and f"{out} written: GPT-2, 1 blocks of width 8" in said, said
    config, params = load_model(out)
    assert config.shape() == load_model(public)[0].shape()
    assert np.abs(params["wte"] - load_model(public)[1]["wte"]).max() > 0
    assert Tokenizer.load(out).digest == Tokenizer.load(private).digest
    answers, origin = read_answers(out / "answers")
    assert sum(len(one.ids) for one in answers) >= 600 and origin.top_k == 3
    ids = Tokenizer.load(private).encode(text.read_text())
    read = [one.tokens[:8].tolist() for one in answers if one.counts[1:].all()]
    assert all(ids[i : i + 8] in read for i in range(0, len(ids) - 8, 8))  # all of the text
    written = json.loads((out / "align.json").read_text())
    assert written["answers"]["texts"] == len(answers) and written["fixed"] == []
    assert written["best"] in written["curve"] and written["curve"][0]["tokens"] == 0

    before = (out / WEIGHTS_FILE).read_bytes()
    code, again = ran(*given, "--out", out)  # all of it is done
    made = [line for line in said.splitlines() if " written: " in line]
    assert code == 0 and [line for line in again.splitlines() if " written: " in line] == made
    assert (out / WEIGHTS_FILE).read_bytes() == before

    theirs, other = tmp_path / "answers", tmp_path / "other"
    shutil.move(out / "answers", theirs)
    code, said = ran("--answers", theirs, "--public", public, "--out", other, "--epochs", "1")
    assert code == 0, said
    assert (other / WEIGHTS_FILE).read_bytes() == before
    ran(*given, "--seed", "1", "--out", tmp_path / "seeded")
    seeded = tmp_path / "seeded" / "answers"
    code, said = ran("--answers", seeded, "--public", public, "--out", other, "--epochs", "1")
    assert code == 2 and "holds other answers" in said


@pytest.mark.slow
def test_a_draft_model_with_an_encoder_is_made(tmp_path: Path, ran: Ran) -> None:
    private, public = make_t5_pair(tmp_path)
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("def read(path): return path\n" * 60)
    given = ("--private", private, "--text", text, *SHORT, "--length", "24")
    code, said = ran(*given, "--blocks", "1", "--width", "8", "--out", out)
    assert code == 0 and f"{out} written: T5, 2 blocks of width 8" in said, said
    written = json.loads((out / "align.json").read_text())
    assert written["best"]["tokens"] > 0  # more of its drafts stay than of the random one's
    assert load_model(out, encoders=True)[0].width == 8
    answers, _ = read_answers(out / "answers")
    assert {one.source for one in answers} == {13}  # half of a text, and its end
    theirs, other = out / "answers", tmp_path / "other"
    code, said = ran("--answers", theirs, "--public", public, "--out", other, "--epochs", "1")
    assert code == 0 and load_model(other, encoders=True)[0].width == 16, said
    for more in (("--write", "9"), ("--chats", str(text))):
        code, said = ran(*given, "--public", public, "--out", tmp_path / "third", *more)
        assert code == 2 and "writes after texts; give --text alone" in said


@pytest.mark.slow
@pytest.mark.parametrize("student", [("--keep", "0"), ("--blocks", "2", "--width", "8")])
def test_a_draft_model_begins_with_little(
    pair: tuple[Path, Path], tmp_path: Path, ran: Ran, student: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    given = ("--private", pair[0], *student, "--write", "600", "--as-published", *SHORT)
    code, said = ran(*given, "--out", out)
    assert code == 0, said
    config, params = load_model(out)
    assert (config.layers, config.width) == ((1, 16) if student[0] == "--keep" else (2, 8))
    kept = np.array_equal(params["wte"], load_model(pair[0])[1]["wte"])
    assert kept == (student[0] == "--keep")
    assert json.loads((out / "align.json").read_text())["settings"]["rejection"] == 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((), "one of the arguments --private --answers"),
        (("--private", "P"), "one of the arguments --public --blocks --keep"),
        (("--private", "P", "--public", "Q"), "--text, --chats or --write N"),
        (("--answers", "P", "--public", "Q", "--write", "9"), "leave out --text, --chats"),
        (("--answers", "P", "--keep", "0"), "--answers needs --public"),
        (("--answers", "P", "--public", "Q"), "holds no answers"),
        (("--private", "P", "--public", "Q", "--width", "8", "--write", "9"), "--width belongs"),
        (("--private", "P", "--public", "Q", "--write", "0"), "--write must be 1 to"),
        (("--private", "P", "--public", "Q", "--write", "9", "--length", "9"), "--length must be"),
        (("--private", "P", "--public", "Q", "--write", "9", "--length", "99"), "at most 64"),
        (("--private", "P", "--public", "Q", "--write", "9", "--top-k", "999"), "at most 288"),
        (("--private", "P", "--keep", "0,x", "--write", "9"), "numbers of blocks, as 0,15,29"),
        (("--private", "P", "--keep", "7", "--write", "9"), "0 to 0, found 7"),
        (("--private", "P", "--blocks", "1", "--width", "9", "--write", "9"), "a multiple of 8"),
        (("--private", "P", "--public", "Q", "--write", "9", "--temperature", "0"), "0.01 to 10"),
        (("--private", "P", "--public", "Q", "--write", "9", "--seed", "-1"), "--seed must be 0"),
        (("--answers", "P", "--public", "Q", "--top-k", "9"), "leave out --text"),
        (("--private", "P", "--public", "Q", "--write", "9", "--out", "P"), "--out is --private"),
        (("--private", "P", "--public", "Q", "--write", "9", "--out", "Q"), "--out is --public"),
        (("--private", "P", "--keep", "0", "--write", "9", "--out", "Q"), "align did not write"),
        (("--private", "P", "--public", "Q", "--text", "/absent"), "cannot read /absent"),
        (("--private", "P", "--public", "Q", "--chats", "/absent"), "has no chat template"),
        (("--private", "P", "--public", "/absent", "--write", "9"), "is not a directory"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    pair: tuple[Path, Path], tmp_path: Path, ran: Ran, given: tuple[str, ...], wanted: str
) -> None:
    """Before anything is answered or written."""
    names = {"P": str(pair[0]), "Q": str(pair[1])}
    out = tmp_path / "out"
    given = tuple(names.get(part, part) for part in given)
    code, said = ran(*given, *(() if "--out" in given else ("--out", out)))
    errors = [line for line in said.splitlines() if line.startswith("spu-llm: error:")]
    assert code == 2 and len(errors) == 1 and wanted in errors[0], said
    assert not out.exists()
