"""`spu-llm import`: what it says, and one line and exit code 2 for what cannot be imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from models.hf import load_model
from spu_llm.app import cli
from tests.kit.models import LLAMA, make_pair, save_tokenizer, tiny_params
from tests.models.gguf_files import tensors, write_gguf


def run(args: list[str | Path], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["import", *map(str, args)])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    save_tokenizer(tmp_path / "made")
    path = tmp_path / "made" / "model.gguf"
    write_gguf(path, LLAMA, tensors(LLAMA, tiny_params(LLAMA, 1)), tmp_path / "made")
    return path


def test_a_file_becomes_a_directory(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, said, errors = run([gguf, "--out", out], capsys)
    assert (code, errors) == (0, "")
    assert said.startswith(f"{out} written: LLaMA, 1 blocks of width 16, 288 tokens, context 64, ")
    assert load_model(out)[0].family == "llama"
    again = run([gguf, "--out", out], capsys)
    assert again[0] == 2 and "is there already" in again[2]


def test_a_directory_is_imported_likewise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = make_pair(tmp_path)[0], tmp_path / "out"
    code, said, _ = run([source, "--out", out], capsys)
    assert code == 0 and "written: GPT-2, 1 blocks" in said
    config = json.loads((source / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == config


@pytest.mark.parametrize("what", ["absent", "cut", "text", "config"])
def test_what_cannot_be_imported_ends_in_one_line(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    source = tmp_path / "made" / what
    if what == "cut":
        source.write_bytes(gguf.read_bytes()[:-5])
    elif what == "text":
        source.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif what == "config":
        shutil.copytree(make_pair(tmp_path / "pair")[0], source)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "model_type": "phi3"}))
        shutil.rmtree(tmp_path / "pair")
    code, said, errors = run([source, "--out", tmp_path / "out"], capsys)
    (line,) = errors.splitlines()
    assert (code, said) == (2, "") and str(source) in line
    expected = {
        "absent": "No such file",
        "cut": "ends beyond the end of the file",
        "text": "is no GGUF file",
        "config": "config.json is a phi3 model; only",
    }
    assert expected[what] in line
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_no_place_to_write(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run([gguf, "--out", tmp_path / "no" / "out"], capsys)
    assert code == 2 and "cannot be made: No such file or directory" in errors
