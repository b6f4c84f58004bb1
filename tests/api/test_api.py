"""What callers import: a completion, its events and its result; and the lines that README shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import spu_llm
from models.draft import Drafter
from models.hf import load_model
from models.text_format import TextFormat
from spu_llm import Client, CompletionOptions, Event, Message, Provider
from spu_llm.api.events import Making, Stage, Step, Text
from spu_llm.core.errors import InputError, PeerError
from spu_llm.net import identity
from spu_llm.net.identity import CERTIFICATE
from tests.kit.pair import Pair
from tests.kit.paths import ROOT
from tests.kit.processes import Start, credentials

OPTIONS = CompletionOptions(max_new_tokens=4, draft_length=2, seed=1)
MARGIN = 0.05  # of every decision in logits: far above what shares blur


@pytest.mark.slow
def test_a_client_without_any_file_of_the_model_completes(
    start: Start, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two processes. The text is float32's, its format comes on first contact and is kept,
    and the result says what the command's `--json` does.
    """
    private, cache = tmp_path / "private", tmp_path / "cache"
    shutil.copytree(pair.private, private)
    own, theirs = (make_identity(tmp_path / name, name) for name in ("client", "provider"))
    server = start(
        "serve",
        "--model",
        str(private),
        "--listen",
        "127.0.0.1:0",
        "--jobs",
        "1",
        *credentials(theirs, own),
    )
    port = server.until_listening()
    for path in private.iterdir():  # the weights are in memory; nobody can read the files now
        path.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    client = Client(Provider.at(f"127.0.0.1:{port}", identity=own, trust=theirs / CERTIFICATE))
    options = CompletionOptions(max_new_tokens=4, temperature=0.0, draft_length=2, drafts="ngram")
    heard: list[Event] = []
    completion = client.complete("def", options, heard.append)

    text = TextFormat.of_model(pair.private)
    assert completion.config["model.text_format"] == text.digest
    assert [path.name for path in cache.rglob("*.json")] == [f"{text.digest}.json"]
    assert completion.config["draft_model"] is None and completion.config["ngrams"]
    assert completion.drafted == 2 * completion.steps
    assert text.tokenizer.decode(completion.token_ids) == completion.text
    model, tokens = Drafter(*load_model(pair.private), 64), text.tokenizer.encode("def")
    for token in completion.token_ids:
        row = model.logits(tokens)
        next_best, best = np.sort(row)[-2:]
        assert token == int(np.argmax(row)) and best - next_best > MARGIN
        tokens.append(token)

    for name, folder in (("client", own), ("provider", theirs)):
        shown = identity.load(folder, folder / CERTIFICATE).own.fingerprint
        assert completion.config[f"certificate.{name}"] == shown
    assert completion.text == "".join(e.text for e in heard if isinstance(e, Text))
    kinds = [type(event) for event in heard]
    assert {Stage, Making, Text, Step} <= set(kinds) and kinds.index(Stage) < kinds.index(Text)
    assert heard[-1].wire_bytes() >= completion.wire_bytes.total > 0
    written = completion.to_json()
    assert written["bytes"]["online"]["client_to_provider"] > 0
    assert written["per_step"][0]["messages"] == completion.per_step[0].messages
    assert set(completion.learned) == {"client", "provider"}


def make_identity(folder: Path, name: str) -> Path:
    identity.make(folder, f"{name}.example", 30)
    return folder


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("", OPTIONS, "the prompt"),
        ("x", CompletionOptions(max_new_tokens=0), "--max-new-tokens"),
        ("x", CompletionOptions(temperature=9.0), "--temperature"),
        ("x", CompletionOptions(candidates=4), "--watermark"),
    ],
)
def test_what_nobody_can_serve_is_refused_first(
    prompt: str, options: CompletionOptions, said: str, tmp_path: Path
) -> None:
    """Before anything is read or started: there is no such model."""
    with pytest.raises(InputError, match=re.escape(said)):
        Client(Provider.here(tmp_path / "none")).complete(prompt, options)


def test_who_failed_is_told_by_the_error() -> None:
    away = Provider.at("127.0.0.1:1", insecure=True)
    with pytest.raises(PeerError):
        Client(away).complete("x", OPTIONS)
    with pytest.raises(InputError, match="HOST:PORT"):
        Provider.at("nowhere", insecure=True)
    with pytest.raises(InputError, match="--identity"):
        Provider.at("127.0.0.1:1")


def test_a_model_without_chats_is_told(pair: Pair) -> None:
    with pytest.raises(InputError, match="no chat template"):
        Client(Provider.here(pair.private)).chat([Message("user", "hi")])


def test_names_are_imported_when_they_are_used() -> None:
    """A process that needs none of them starts without JAX; all of them are there."""
    assert all(getattr(spu_llm, name) is not None for name in spu_llm.__all__)
    code = "import sys, spu_llm; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError):
        spu_llm.nothing  # noqa: B018


@pytest.mark.slow
def test_the_lines_in_readme_run() -> None:
    """As they stand, with the shipped models."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", readme, re.S)
        if "from spu_llm import" in code
    ]
    assert lines.count("\n") <= 12
    done = subprocess.run(
        [sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "draft length" in done.stdout
