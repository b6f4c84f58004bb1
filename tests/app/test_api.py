"""What callers import: a completion, its events and its result; and the lines that README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import spu_llm
from spu_llm import Client, CompletionOptions, Event, Message, Provider
from spu_llm.api.events import Making, Stage, Step, Text
from spu_llm.core.errors import InputError, PeerError
from tests.app.conftest import Pair
from tests.app.processes import ROOT

OPTIONS = CompletionOptions(max_new_tokens=4, draft_length=2, seed=1)


def test_a_completion_with_its_events(pair: Pair) -> None:
    """Between two processes; the result says what the command's `--json` does."""
    options = CompletionOptions(
        max_new_tokens=4, draft_length=2, draft_model=pair.public, temperature=0.5
    )
    heard: list[Event] = []
    completion = Client(Provider.here(pair.private)).complete("def read", options, heard.append)
    assert completion.text == "".join(e.text for e in heard if isinstance(e, Text))
    assert len(completion.token_ids) == 4 or completion.finish_reason == "eos"
    kinds = [type(event) for event in heard]
    assert {Stage, Making, Text, Step} <= set(kinds) and kinds.index(Stage) < kinds.index(Text)
    assert heard[-1].wire_bytes() >= completion.wire_bytes.total > 0
    assert completion.bytes["online"].total > 0 < completion.messages["online"]
    written = completion.to_json()
    assert written["bytes"]["online"]["client_to_provider"] > 0
    assert written["per_step"][0]["messages"] == completion.per_step[0].messages
    assert set(completion.learned) == {"client", "provider"}


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("", OPTIONS, "the prompt"),
        ("x", CompletionOptions(max_new_tokens=0), "--max-new-tokens"),
        ("x", CompletionOptions(temperature=9.0), "--temperature"),
        ("x", CompletionOptions(candidates=4), "--watermark"),
    ],
)  # fmt: skip
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
    (lines,) = [code for code in re.findall(r"```python\n(.*?)```", readme, re.S)
                if "from spu_llm import" in code]  # fmt: skip
    assert lines.count("\n") <= 12
    done = subprocess.run(
        [sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "draft length" in done.stdout
