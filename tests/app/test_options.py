"""Prompts that no list of processes shows, and options that are nearly right."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from spu_llm.app import cli
from tests.kit.command_line import parsed, refused

# Every command that takes a prompt, with what it needs beside it.
TAKES = {
    "demo": ["demo"],
    "generate": ["generate", "--server", "h:1"],
    "prepare": ["prepare", "--pool", "pool"],
    "vault": ["vault", "generate", "--vault", "h:1"],
    "split": ["split", "generate", "--mode", "plain", "--server", "h:1"],
    "split prepare": ["split", "prepare", "--mode", "mpc", "--server", "h:1", "--pool", "pool"],
    "obfuscate": ["obfuscate"],
    "watermark": ["watermark", "embed", "--key", "key"],
}


@pytest.mark.parametrize("name", TAKES)
def test_a_prompt_from_a_file_or_from_standard_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte order mark, Windows' line ends and one last line end are the file's alone."""
    data = b"\xef\xbb\xbfgeheim\r\n\r\nmot \xe2\x80\xa8 x\n\n"
    text = "geheim\n\nmot \u2028 x\n"
    file = tmp_path / "prompt"
    file.write_bytes(data)
    assert parsed(*TAKES[name], "--prompt-file", str(file)).prompt == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert parsed(*TAKES[name], "--prompt", "-").prompt == text
    assert parsed(*TAKES[name], "--prompt", "-x- ").prompt == "-x- "


def test_every_command_with_a_prompt_takes_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """None has a `--prompt` of its own."""
    sources = Path(cli.__file__).parent.rglob("*.py")
    own = [path.name for path in sources if '"--prompt"' in path.read_text(encoding="utf-8")]
    assert own == ["options.py"]


def test_a_prompt_that_cannot_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = tmp_path / "spoilt"
    spoilt.write_bytes(b"right\n\xff")
    assert "line 2 is not UTF-8" in refused(capsys, "demo", "--prompt-file", str(spoilt))
    assert "No such file" in refused(capsys, "demo", "--prompt-file", str(tmp_path / "none"))
    both = refused(capsys, "demo", "--prompt", "a", "--prompt-file", str(spoilt))
    assert "not allowed with" in both or "line 2 is not UTF-8" in both
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        assert "no standard input" in refused(capsys, "demo", "--prompt", "-")
    empty = tmp_path / "empty"
    empty.write_bytes(b"\n")
    assert "prompt is empty" in refused(capsys, "demo", "--prompt-file", str(empty))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["generate", "--promt", "x"],
            "no option --promt; did you mean --prompt?; see spu-llm generate --help",
        ),
        (["split", "tune", "--round=3"], "did you mean --rounds?; see spu-llm split tune --help"),
        (["demo", "--zzzz"], "there is no option --zzzz; see spu-llm demo --help"),
        (["demo", "word"], "found 'word', which belongs to no option; see spu-llm demo --help"),
        (["genrate"], "no command genrate; did you mean generate?; see spu-llm --help"),
        (["watermark", "detct"], "did you mean detect?; see spu-llm watermark --help"),
        (["demo", "--\x1b]52;c;x\x07"], "see spu-llm demo --help"),
    ],
)
def test_what_is_nearly_right_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "generate": ["--server", "h:1"],
        "split": [
            "--server",
            "h:1",
            "--texts",
            "t",
            "--secrets",
            "s",
            "--model",
            "m",
            "--mode",
            "noir",
        ],
    }
    line = refused(capsys, *arguments, *given.get(arguments[0], []))
    assert words in line and "\x1b" not in line
