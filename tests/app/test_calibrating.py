"""Ranges of a model whose directory is read-only: written elsewhere, and served from there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.gpt2 import GPT2Config
from models.hf import save_model
from spu_llm.app import cli
from spu_llm.service import provider
from tests.tiny import VOCAB, save_tokenizer, tiny_params

WIDE = GPT2Config(VOCAB, n_positions=64, n_embd=16, n_layer=1, n_head=2)
Ran = Callable[..., tuple[object, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One whose activations may leave the default ranges."""
    directory = tmp_path / "model"
    directory.mkdir()
    params: Any = tiny_params(WIDE, 1)
    params["wte"] = params["wte"] * 300
    save_model(directory, WIDE, params, np.float32)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    """Exit code of a command, and all it printed."""

    def run(*arguments: str | Path) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        return end.value.code, out + err

    return run


def test_ranges_are_written_elsewhere_and_served(
    model: Path, tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, ranges = tmp_path / "text", tmp_path / "ranges"
    text.write_text("alpha beta gamma delta\n" * 9)
    before = sorted(os.listdir(model))
    code, said = ran("calibrate", "--model", model, "--text", text, "--out", ranges)
    assert code == 0 and f"{ranges} written" in said and ranges.exists()
    assert sorted(os.listdir(model)) == before

    assert "spu-llm calibrate" in ran("doctor", "--model", model)[1]
    assert "can be served" in ran("doctor", "--model", model, "--ranges", ranges)[1]

    served = []
    monkeypatch.setattr(provider, "_serve", lambda options, config, *rest: served.append(config))
    serve = ("serve", "--model", model, "--listen", "127.0.0.1:0", "--insecure")
    assert "spu-llm calibrate" in ran(*serve)[1] and not served
    assert ran(*serve, "--ranges", ranges)[0] == 0
    (config,) = served
    assert config != WIDE and config.shape() == WIDE.shape()


@pytest.mark.parametrize("command", [["demo"], ["prepare", "--pool", "pool"]])
def test_a_provider_here_gets_them(
    command: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = cli._parser().parse_args([*command, "--model", str(model), "--ranges", "FILE"])
    parsed.server = None
    assert cli._provider(parsed).ranges == Path("FILE")


def test_what_cannot_be_done_is_said_first(
    model: Path, tmp_path: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("alpha")
    given = ("calibrate", "--model", model, "--text", text)
    code, said = ran(*given, "--out", tmp_path / "none" / "ranges")
    assert code == 2 and "--out" in said
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write all
    code, said = ran(*given)
    assert code == 2 and "read-only; give --out FILE" in said
    away = ("prepare", "--pool", tmp_path, "--server", "h:1", "--insecure")
    code, said = ran(*away, "--ranges", "x")
    assert code == 2 and "leave --server out" in said
