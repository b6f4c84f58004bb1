"""Text in files as editors and other programs write it: every command reads the same."""

from __future__ import annotations

import argparse
import codecs
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.tokenizer import Tokenizer
from spu_llm.app import calibration_texts, config, serving
from spu_llm.app.cli import command_line, main
from spu_llm.app.commands import watermark
from spu_llm.core.errors import InputError
from spu_llm.core.text_files import read_json_texts, read_text
from spu_llm.systems.dp_text.prompts import read_references
from spu_llm.systems.split.texts import tokens_of
from tests.kit.models import save_tokenizer

BOM = codecs.BOM_UTF8
TEXT = "one\nn\u00e4chste\u2028Zeile\rhere\n"
SPELLINGS = {
    "plain": TEXT.encode(),
    "mark": BOM + TEXT.encode(),
    "crlf": TEXT.replace("\n", "\r\n").encode(),
    "mark and crlf": BOM + TEXT.replace("\n", "\r\n").encode(),
}
LINES = '{"text": "a\u2028b"}\n{"text": "c\\r\\nd"}\n'
LINE_SPELLINGS = {
    "plain": LINES.encode(),
    "no last end": LINES.removesuffix("\n").encode(),
    "blank lines at the end": LINES.encode() + b"\n \t\r\n",
    "mark": BOM + LINES.encode(),
    "mark, crlf, blank line": BOM + LINES.replace("\n", "\r\n").encode() + b"\r\n",
}
BAD_LINES = [
    "",
    "secret",
    '["secret"]',
    '{"text": 1}',
    '{"a": "secret"}',
    '{"text": "\\ud800"}',
    100_000 * "[",
]
WANTED = ["a\u2028b", "c\r\nd"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer.load(folder)


def calibrated_text(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what `calibrate` gives to the tokenizer."""
    seen: list[str] = []
    kept = SimpleNamespace(beginning=[], encode=lambda text, **_: seen.append(text) or [])
    monkeypatch.setattr("models.tokenizer.Tokenizer.load", lambda *_: kept)
    with pytest.raises(InputError, match="is empty"):
        of_calibrate(path)
    return seen[0]


def of_calibrate(path: Path) -> object:
    """Return the texts that `calibrate --text` runs, of a model of 8 positions."""
    options = argparse.Namespace(text=path, chats=None, public_prefix="", model=path.parent)
    return calibration_texts.texts_of(options, 8)


@pytest.mark.parametrize("data", SPELLINGS.values(), ids=list(SPELLINGS))
def test_a_text_is_the_same_in_each_spelling(
    data: bytes, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    assert read_text(path) == TEXT
    assert serving._text_of(path, "--system-prompt") == TEXT
    assert watermark._text(path) == TEXT
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert watermark._text(Path("-")) == TEXT
    end = min(tokenizer.eos_ids)
    assert tokens_of([path], tokenizer).tolist() == [*tokenizer.encode(TEXT), end]
    assert calibrated_text(path, monkeypatch) == TEXT


def test_one_mark_alone_is_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(BOM + BOM + b"a" + BOM)
    assert read_text(path) == "\ufeffa\ufeff"
    path.write_bytes(BOM)
    with pytest.raises(InputError, match="is empty"):
        serving._text_of(path, "--system-prompt")


@pytest.mark.parametrize("data", LINE_SPELLINGS.values(), ids=list(LINE_SPELLINGS))
def test_json_lines_are_the_same_in_each_spelling(
    data: bytes, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(data)
    assert read_references(path) == WANTED
    end = min(tokenizer.eos_ids)
    wanted = [token for text in WANTED for token in (*tokenizer.encode(text), end)]
    assert tokens_of([path], tokenizer).tolist() == wanted


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("option", ["--references", "--texts"])
def test_a_line_that_cannot_be_used_is_named(line: str, option: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(f'{{"text": "\u2028"}}\r\n{line}\r\n{{"text": "b"}}\n', encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_json_texts(path, option)
    said = str(error.value)
    assert said.startswith(f"{path}, of {option}, line 2: must be a JSON object")
    assert "secret" not in said and "\n" not in said


READERS: dict[str, Callable[[Path, Tokenizer], object]] = {
    "--references": lambda path, _: read_references(path),
    "--texts": lambda path, tokenizer: tokens_of([path], tokenizer),
    "--system-prompt": lambda path, _: serving._text_of(path, "--system-prompt"),
    "--text": lambda path, _: of_calibrate(path),
    "--config": lambda path, _: config.with_file("serve", ["--config", str(path)], []),
    "": lambda path, _: watermark._text(path),
}


@pytest.mark.parametrize("option", READERS)
def test_what_is_not_utf8_is_named_with_its_line(
    option: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(BOM + b'{"text": "a"}\r\n{"text": "caf\xe9"}\r\n')
    name = f"{path}, of {option}" if option else str(path)
    with pytest.raises(InputError) as error:
        READERS[option](path, tokenizer)
    assert str(error.value) == f"cannot read {name}: line 2 is not UTF-8; save it as UTF-8"
    with pytest.raises(InputError) as error:
        READERS[option](tmp_path, tokenizer)
    assert str(error.value).replace(str(tmp_path), "").startswith("cannot read ")
    assert str(error.value).endswith(": Is a directory")


def test_options_are_the_same_in_each_spelling(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(BOM + b'[generate]\r\nserver = "h:1"\r\ninsecure = true\r\n')
    options = command_line().parse_args(["generate", "--config", str(path)])
    assert options.server == "h:1" and options.insecure


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[generate]\r\nserver = \r\n", "line 2"),
        ("[generate]\nx = " + 9999 * "[", "nested too deeply"),
        ("[generate]\nx = " + 9999 * "9", "is no TOML file"),
    ],
)
def test_options_that_cannot_be_read_are_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode())
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--config", str(path)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and str(path) in error
    assert error.count("\n") == 1
