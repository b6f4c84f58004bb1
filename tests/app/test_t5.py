"""A T5 behind the commands: a text of its own after a prompt, and what such a model does not do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models.encoder_decoder import source_logits
from models.hf import load_model
from models.text_format import TextFormat
from spu_llm.app import cli
from tests.kit.models import make_t5_pair
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S
from tests.kit.processes import ERROR, Start

PROMPT, NEW, DRAFTS = "def read(path)", 5, 2
MARGIN = 0.03  # of every decision in logits: far above what shares blur


@pytest.fixture(scope="module")
def t5s(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*make_t5_pair(tmp_path_factory.mktemp("t5")))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Run a command that is to end with one line and exit code 2."""

    def run(words: str, *arguments: str | Path) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(list(map(str, arguments)))
        printed = capsys.readouterr().err
        (line,) = (line for line in printed.splitlines() if line.startswith(ERROR))
        assert end.value.code == 2 and words in line and "Traceback" not in printed, printed

    return run


def greedy(pair: Pair) -> list[int]:
    """Return the private model's own text, in plaintext."""
    config, params = load_model(pair.private, encoders=True)
    text = TextFormat.of_model(pair.public)
    source = jnp.asarray([*text.tokenizer.encode(PROMPT), *text.after_prompt[:-1]])
    tokens = [text.after_prompt[-1]]
    for _ in range(NEW):
        row = np.asarray(source_logits(params, config, source, jnp.asarray(tokens)))[-1]
        last, first = np.sort(row)[-2:]
        assert first - last > MARGIN
        tokens.append(int(row.argmax()))
    return tokens[1:]


@pytest.mark.slow
def test_demo_writes_the_plaintext_text(start: Start, t5s: Pair, tmp_path: Path) -> None:
    """Drafted by another T5, with hidden progress; the prompt is not part of the text."""
    file = tmp_path / "result.json"
    demo = start(
        *t5s.demo,
        *("--prompt", PROMPT, "--temperature", "0"),
        *("--draft-length", str(DRAFTS), "--max-new-tokens", str(NEW)),
        *("--json", str(file)),
    )
    assert demo.wait(RUN_S) == 0, demo.stderr
    result = json.loads(file.read_text())
    assert result["token_ids"] == greedy(t5s) and result["drafted"]
    assert demo.stdout == result["text"] + "\n"
    assert result["config"]["model.family"] == "t5"
    assert "the decoder's relative position bias" in result["learned"]["client"]


@pytest.mark.slow
def test_a_provider_serves_completions_and_no_chats(
    start: Start, t5s: Pair, tmp_path: Path
) -> None:
    server = start(*t5s.serve("--pool", str(tmp_path / "provider")))
    port = server.until_listening()
    address = ["--server", f"127.0.0.1:{port}", "--insecure"]
    request = ["--prompt", PROMPT, "--max-new-tokens", "2", "--standard", "--temperature", "0"]
    both = [*address, "--draft-model", str(t5s.public), "--pool", str(tmp_path / "client")]
    files = [tmp_path / "prepared", tmp_path / "result"]
    for command, file in zip(("prepare", "generate"), files, strict=True):
        client = start(command, *both, *request, "--json", str(file))
        assert client.wait(RUN_S) == 0, client.stderr
    assert json.loads(files[1].read_text())["token_ids"] == greedy(t5s)[:2]
    for more, words in (
        (["--chat"], "no chat template"),
        (["--public-prefix", "def"], "reads all of a prompt at once"),
    ):
        client = start(*t5s.generate(port, "--prompt", PROMPT, *more))
        client.assert_failed(2, words, within_s=RUN_S)


def test_what_else_a_t5_does_not_do(
    t5s: Pair, tmp_path: Path, refused: Callable[..., None]
) -> None:
    model, text = ("--model", t5s.private), tmp_path / "text"
    text.write_text("def read(path):\n    return path\n")
    whose = "whose prompt an encoder reads"
    refused(whose, "estimate", *model, "--prompt-tokens", "5")
    listening = *model, "--listen", "127.0.0.1:0", "--insecure"
    refused(whose, "split", "serve", "--mode", "mpc", *listening)
    both = "--private", t5s.private, "--public", t5s.public
    short = "fewer than a part of 32 tokens"
    refused(short, "align", *both, "--text", text, "--out", tmp_path / "out")
    for command in ("calibrate", "inspect"):
        refused("no public prefix", command, *model, "--text", text, "--public-prefix", "def")
    refused("leave --system-prompt out", "serve", *listening, "--system-prompt", text)
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


@pytest.mark.slow
def test_ranges_are_chosen_and_listed(
    t5s: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, ranges = tmp_path / "text", tmp_path / "ranges.json"
    text.write_text("def read(path):\n    return path\n" * 3)
    for command in (["calibrate", "--out"], ["inspect", "--ranges"]):
        arguments = [command[0], "--model", t5s.private, "--text", text, command[1], ranges]
        with pytest.raises(SystemExit) as end:
            cli.main(list(map(str, arguments)))
        assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "last norm of the encoder" in printed and "norm of cross-attention" in printed
    assert len(json.loads(ranges.read_text())["norm_low"]) == 2 + 1 + 2 * 3 + 1
