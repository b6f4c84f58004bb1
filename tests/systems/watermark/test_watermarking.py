"""`spu-llm watermark`: a key, a marked text, what is found in it, and what is refused."""

from __future__ import annotations

import json
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from spu_llm.api.defaults import shipped
from spu_llm.app import cli
from tests.kit.processes import ERROR

PUBLIC = str(shipped("public"))
PROGRAM = """
import json, random, sys
words = [f"word{i}" for i in range(300)]
for line in sys.stdin:
    asked = json.loads(line)
    one = lambda: {"text": "".join(" " + random.choice(words) for _ in range(asked["max_tokens"])),
                   "ended": False}
    print(json.dumps({"sequences": [one() for _ in range(asked["n"])]}), flush=True)
"""
Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what a command writes to stdout."""

    def ran(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(["watermark", *map(str, arguments)])
        printed = capsys.readouterr()
        assert end.value.code == 0, printed.err
        return printed.out

    return ran


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """Return a model whose texts end at their length: its end of text is the byte 0xff, which no
    text that it learned has.
    """
    directory = tmp_path / "endless"
    shutil.copytree(PUBLIC, directory)
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab["\xff"]}))
    return directory


def test_from_a_key_to_a_verdict(run: Run, endless: Path, tmp_path: Path) -> None:
    key, other, text = tmp_path / "key", tmp_path / "other", tmp_path / "text"
    said = run("keygen", "--out", key, "--tokenizer", PUBLIC)
    secret = json.loads(key.read_text())["key"]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and secret not in said
    run("keygen", "--out", other, "--tokenizer", PUBLIC)
    told = tmp_path / "made.json"
    made = run("embed", "--key", key, "--model", endless, "--max-new-tokens", "60", "--json", told)
    result = json.loads(told.read_text())
    assert result["text"] + "\n" == made and len(result["tokens"]) == len(result["chunks"]) == 60
    assert (tmp_path / "key.history").stat().st_size > 400 and secret not in told.read_text()
    text.write_text(result["text"])
    page, actual = tmp_path / "page.html", tmp_path / "found.json"
    said = run(
        "detect", text, "--key", key, "--tokenizer", PUBLIC, "--json", actual, "--html", page
    )
    assert said.startswith("marked: p = ") and "characters" in said
    assert json.loads(actual.read_text())["keys"][0]["log10_p"] < -4
    assert page.read_text().startswith("<!DOCTYPE html>") and secret not in page.read_text()
    assert run("detect", text, "--key", other, "--tokenizer", PUBLIC).startswith("no mark")
    both = run("detect", text, "--key", key, "--key", other, "--tokenizer", PUBLIC)
    assert both.startswith("marked") and "2 keys" in both and str(other) in both
    for score in ("fisher", "lrt"):
        said = run("detect", text, "--key", key, "--tokenizer", PUBLIC, "--score", score)
        assert said.startswith("marked")


def test_a_program_writes_and_words_are_marked_under_two_keys(run: Run, tmp_path: Path) -> None:
    keys = [tmp_path / "a", tmp_path / "b"]
    for key in keys:
        run("keygen", "--out", key, "--ngram", "3", "--family", "normal")
    command = shlex.join([sys.executable, "-c", PROGRAM])
    given = [part for key in keys for part in ("--key", str(key))]
    made = run(
        "embed",
        *given,
        "--command",
        command,
        "--candidates",
        "6",
        "--chunk",
        "1",
        "--max-new-tokens",
        "80",
        "--no-history",
    )
    text = tmp_path / "text"
    text.write_text(made)
    said = run("detect", text, *given)
    assert said.startswith("marked") and "of 2 keys together" in said


def test_a_race_is_marked_without_candidates(run: Run, endless: Path, tmp_path: Path) -> None:
    key, text = tmp_path / "key", tmp_path / "text"
    run("keygen", "--out", key, "--race", "--tokenizer", PUBLIC)
    text.write_text(run("embed", "--key", key, "--model", endless, "--max-new-tokens", "40"))
    assert run("detect", text, "--key", key, "--tokenizer", PUBLIC).startswith("marked")


@pytest.mark.parametrize(("by", "chunk"), [("beam", 1), ("paraphrase", 8)])
def test_candidates_that_are_no_samples_are_told(
    run: Run, endless: Path, tmp_path: Path, by: str, chunk: int
) -> None:
    """The record says that the text does not have the model's distribution."""
    key, told, text = tmp_path / "key", tmp_path / "made.json", tmp_path / "text"
    run("keygen", "--out", key, "--tokenizer", PUBLIC)
    given = ["--key", key, "--model", endless, "--json", told, "--max-new-tokens", "64"]
    run("embed", *given, "--chunk", chunk, "--candidates-by", by)
    result = json.loads(told.read_text())
    assert result["candidates_by"] == by and result["distortion_free"] is False
    assert len(result["tokens"]) == 64 and len(result["chunks"]) == 64 // chunk
    text.write_text(result["text"])
    said = run("detect", text, "--key", key, "--tokenizer", PUBLIC)
    # Sixteen beams of a token are chosen as if each were as likely: the strongest mark there is.
    assert said.startswith("marked") or by == "paraphrase"
    for more, exact in (([], True), (["--no-history"], False)):
        run("embed", *given, "--candidates", "4", *more)
        result = json.loads(told.read_text())
        assert result["candidates_by"] == "sample" and result["distortion_free"] is exact


def test_stems_mark_what_a_program_writes(run: Run, tmp_path: Path) -> None:
    key, text = tmp_path / "key", tmp_path / "text"
    run("keygen", "--out", key, "--ngram", "2", "--stems")
    assert json.loads(key.read_text())["units"] == "stems"
    command = shlex.join([sys.executable, "-c", PROGRAM])
    made = run("embed", "--key", key, "--command", command, "--max-new-tokens", "60")
    text.write_text(made.replace(" ", " of the "))
    assert run("detect", text, "--key", key).startswith("marked")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["keygen", "--out", "words"], ["there already"]),
        (["keygen", "--out", "new", "--ngram", "0"], ["1 to 32"]),
        (["keygen", "--out", "new", "--race"], ["race marks tokens"]),
        (["keygen", "--out", "new", "--family", "cauchy"], ["choose from"]),
        (["keygen", "--out", "new", "--stems", "--tokenizer", PUBLIC], ["--stems or"]),
        (["keygen", "--out", "new", "--stems", "--scheme", "aaronson"], ["marks tokens"]),
        (["embed", "--key", "words", "--candidates-by", "guess"], ["sample, beam"]),
        (["embed", "--key", "words", "--candidates-by", "beam", "--spread"], ["--spread"]),
        (["embed", "--key", "words", "--candidates-by", "beam", "--command", "x"], ["--model"]),
        (["embed", "--key", "words", "--paraphraser", "x"], ["--paraphraser"]),
        (["embed", "--key", "race", "--candidates-by", "beam"], ["no candidates"]),
        (["embed", "--key", "none"], ["keygen makes one"]),
        (["embed", "--key", "text"], ["damaged"]),
        (["embed", "--key", "words", "--key", "words"], ["different ones"]),
        (["embed", "--key", "words", "--key", "tokens"], ["different things"]),
        (["embed", "--key", "words", "--candidates", "-1"], ["--candidates"]),
        (["embed", "--key", "words", "--candidates", "9999"], ["1 to 4096"]),
        (["embed", "--key", "words", "--candidates", "0"], ["next token alone"]),
        (["embed", "--key", "words", "--chunk", "0"], ["1 token or more"]),
        (["embed", "--key", "words", "--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["embed", "--key", "words", "--temperature", "0"], ["--temperature"]),
        (["embed", "--key", "words", "--prompt", ""], ["prompt is empty"]),
        (["embed", "--key", "words", "--prompt", "x y " * 300], ["context is 256"]),
        (["embed", "--key", "words", "--command", "/nonexistent"], ["cannot start"]),
        (["embed", "--key", "words", "--command", "'"], ["--command"]),
        (["embed", "--key", "words", "--endpoint", "ftp://x"], ["http://"]),
        (["embed", "--key", "kept"], ["no history of this key"]),
        (["embed", "--key", "words", "--json", "none/x"], ["--json"]),
        (["detect", "none", "--key", "words"], ["cannot read"]),
        (["detect", "empty", "--key", "words"], ["is empty"]),
        (["detect", "latin", "--key", "words"], ["not UTF-8"]),
        (["detect", "text", "--key", "words", "--score", "best"], ["choose from"]),
        (["detect", "text", "--key", "words", "--alpha", "2"], ["--alpha"]),
        (["detect", "text", "--key", "words", "--join", "0"], ["p-value"]),
        (["detect", "text", "--key", "words", "--html", "none/x"], ["--html"]),
        (["detect", "text"], ["--key"]),
    ],
)
def test_what_is_refused(
    options: Sequence[str],
    words: Sequence[str],
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run("keygen", "--out", "words")
    run("keygen", "--out", "tokens", "--tokenizer", PUBLIC)
    run("keygen", "--out", "kept")
    run("keygen", "--out", "race", "--race", "--tokenizer", str(shipped("private")))
    contents = {"text": b"some text", "empty": b" \n", "latin": b"caf\xe9", "kept.history": b"x"}
    for name, data in contents.items():
        Path(name).write_bytes(data)
        Path(name).chmod(0o600)
    with pytest.raises(SystemExit) as end:
        cli.main(["watermark", *options])
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith(ERROR)]
    assert end.value.code == 2 and len(lines) == 1, printed.err
    assert all(word in lines[0] for word in words), lines
