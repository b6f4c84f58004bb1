"""`dp generate --server`: two real processes, over a socket."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spu_llm.api import private_text
from spu_llm.app import cli
from spu_llm.app.screen import Stages
from spu_llm.net.relay import Counters
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import ERROR, Command, Start

TEXTS = ["alpha beta gamma", "", "delta epsilon zeta eta", "return path"]


@pytest.fixture
def references(tmp_path: Path) -> Path:
    path = tmp_path / "references.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def asked(port: int, model: Path, references: Path, out: Path, *options: str) -> list[str]:
    return [
        "dp",
        "generate",
        "--server",
        f"127.0.0.1:{port}",
        "--insecure",
        "--model",
        str(model),
        "--references",
        str(references),
        "--query",
        "def ",
        "--out",
        str(out),
        "--epsilon",
        "10",
        "--batch",
        "2",
        "--top-k",
        "3",
        "--max-new-tokens",
        "2",
        "--reference-tokens",
        "6",
        *options,
    ]


def results(out: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Texts, statement, ledger."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    beside = (out.with_name(out.name + end) for end in (".privacy.json", ".ledger"))
    statement, ledger = (json.loads(path.read_text()) for path in beside)
    return lines, statement, ledger


@pytest.mark.slow
def test_a_provider_writes_texts_it_cannot_read(
    start: Start, pair: Pair, references: Path, tmp_path: Path
) -> None:
    """Killed in the middle and begun again: the text that was begun is lost and stays spent, the
    next one has a batch of its own; nothing of a reference is on the provider's side.
    """
    server, out = start(*pair.serve()), tmp_path / "new.jsonl"
    options = asked(server.until_listening(), pair.public, references, out, "--texts", "2")
    killed: Command = start(*options)
    killed.until("stderr", "text 1 of 2")
    killed.send(signal.SIGKILL)
    killed.wait(END_S)
    again = start(*options)
    assert again.wait(RUN_S) == 0, again.stderr
    lines, statement, ledger = results(out)
    assert [line.get("lost", False) for line in lines] == [True, False]
    assert 1 <= len(lines[1]["tokens"]) + lines[1]["ended"] <= 3
    assert ledger["begun"] == 2 and ledger["key"] is None
    assert ledger["spent"]["epsilon"] == statement["epsilon"] <= 10
    assert statement["noise"]["bound"] > 0
    assert "place of the token among its candidates" in again.stderr
    assert not any(text in server.stdout + server.stderr for text in TEXTS if text)


@pytest.mark.slow
def test_both_bring_references(start: Start, pair: Pair, references: Path, tmp_path: Path) -> None:
    """The provider's are spent within its own limit, in one session, whatever texts there are."""
    out = tmp_path / "new.jsonl"
    own = ["--references", str(references), "--once", "--epsilon"]
    server = start(*pair.serve(*own, "10"))
    options = ["--texts", "2", "--peer-references", "1"]
    client = start(*asked(server.until_listening(), pair.private, references, out, *options))
    assert client.wait(RUN_S) == 0, client.stderr
    assert server.wait(END_S) == 0, server.stderr
    lines, statement, ledger = results(out)
    assert [1 <= len(line["tokens"]) + line["ended"] <= 3 for line in lines] == [True, True]
    assert statement["run"]["of_provider"] == 1 and ledger["begun"] == 2
    # One that gives less ends the session, and says why to its own user.
    server = start(*pair.serve(*own, "9"))
    client = start(
        *asked(server.until_listening(), pair.private, references, tmp_path / "no", *options)
    )
    server.assert_failed(2, "of the provider's references", within_s=RUN_S)
    client.assert_failed(1, "the provider", within_s=RUN_S)


def test_each_text_has_a_line_however_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where there is no terminal, too: what waits for the next look may be over by then."""

    def run_as_client(
        server: Any, program: Any, request: Any, inputs: Any, on_event: Any, **rest: Any
    ) -> Any:
        for number in range(2):
            on_event({"event": "stage", "name": f"text {number + 1}"}, relay)
            on_event({"event": "token", "tokens": 1}, relay)
        return SimpleNamespace(result={}), {}

    monkeypatch.setattr(private_text, "run_as_client", run_as_client)
    prompts = SimpleNamespace(tokenizer=None)
    asked = SimpleNamespace(
        of_provider=0, request=None, texts=5, prompts=prompts, prompts_of=lambda part: []
    )
    provider: Any = SimpleNamespace(server="there", hint_cache=1, jobs=1)
    relay = SimpleNamespace(snapshot=lambda: Counters())
    with closing(Stages()) as stages:
        private_text.sessions(provider, asked, tmp_path, stages.on_event)(2, [["a"], ["b"]])
    said = capsys.readouterr().err
    assert said.count("[text 3 of 5: 0 s") == said.count("[text 4 of 5: 0 s") == 1


def test_what_cannot_be_had_between_two_parties(
    pair: Pair, references: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One clear line, before anything is connected or spent."""
    out = tmp_path / "new.jsonl"

    def refused(words: str, arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        errors = capsys.readouterr().err
        assert end.value.code == 2 and errors.count(ERROR) == 1 and words in errors, errors

    for options, words in (
        (["--method", "amin"], "--method invisibleink"),
        (["--top-k", "0"], "--top-k"),
        (["--adjacency", "zero-out"], "replace-by-null"),
        (["--peer-references", "2"], "below --batch"),
        (["--texts", "9"], "--texts must be 1 to 2"),
    ):
        refused(words, asked(1, pair.public, references, out, "--texts", "1", *options))
    refused("--once", pair.serve("--references", str(references), "--epsilon", "3"))
    assert not out.exists()
