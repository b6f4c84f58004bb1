"""Ranges of a model whose directory is read-only: written elsewhere, and served from there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.gpt2 import GPT2Config
from models.hf import load_config, save_model, save_ranges
from spu_llm.app import cli
from spu_llm.app.options import provider_of
from spu_llm.service import agreeing, provider
from tests.kit.models import VOCAB, save_tokenizer, tiny_params
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Start

WIDE = GPT2Config(VOCAB, n_positions=64, n_embd=16, n_layer=1, n_head=2)
Ran = Callable[..., tuple[object, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model whose activations may leave the default ranges."""
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
    monkeypatch.setattr(provider, "_serve", lambda options, models, *rest: served.append(models))
    serve = ("serve", "--model", model, "--listen", "127.0.0.1:0", "--insecure")
    assert "spu-llm calibrate" in ran(*serve)[1] and not served
    assert ran(*serve, "--ranges", ranges)[0] == 0
    (models,) = served
    config, _ = agreeing.stated_model(models.first.stated)
    assert config != WIDE and config.shape() == WIDE.shape()


@pytest.mark.parametrize("command", [["demo"], ["prepare", "--pool", "pool"]])
def test_a_provider_here_gets_them(
    command: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = cli.command_line().parse_args([*command, "--model", str(model), "--ranges", "FILE"])
    parsed.server = None
    assert provider_of(parsed).ranges == Path("FILE")


CHATS = [
    {"messages": [{"role": "user", "content": "alpha beta"}]},
    {"messages": [{"role": "user", "content": "gamma"}, {"role": "assistant", "content": "zeta"}]},
]


def test_ranges_are_chosen_on_chats_and_shown_by_site(
    model: Path, tmp_path: Path, ran: Ran
) -> None:
    """What the template puts before the first message is public. A text that leaves the ranges is
    seen with the sites that it left.
    """
    template = "{% for m in messages %}def {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (model / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "<|endoftext|>"})
    )
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(map(json.dumps, CHATS)) + "\n")
    code, said = ran("calibrate", "--model", model, "--chats", chats)
    assert code == 0, said
    again, _ = ran("calibrate", "--model", model, "--chats", chats)
    assert again == 0
    config = load_config(model)
    assert len(config.norm_low) == 3 and len(config.largest_score) == 1

    file = tmp_path / "sites.json"
    code, said = ran("inspect", "--model", model, "--chats", chats, "--json", file)
    assert code == 0 and said.count("norm of") == 2 and "last norm" in said, said
    content = json.loads(file.read_text())["sites"]
    rooms = {site["name"]: site["head_room"] for site in content}
    assert all(room >= 1 for room in rooms.values()), rooms
    assert {site["held"] for site in content if "norm" in site["name"]} == {"checked"}
    code, said = ran("inspect", "--model", model)
    assert code == 0 and " - " in said

    narrow = tmp_path / "narrow"
    low = tuple(high / 2 for high in config.norm_high)
    save_ranges(narrow, replace(config, norm_low=low))
    given = ("inspect", "--model", model, "--chats", chats, "--ranges", narrow, "--json", file)
    assert ran(*given)[0] == 0
    left = [
        site["name"]
        for site in json.loads(file.read_text())["sites"]
        if site["held"] == "checked" and site["head_room"] < 1
    ]
    assert left == ["norm of attention", "norm of feed-forward", "last norm"]


@pytest.mark.slow
def test_the_client_alone_is_told_where_a_text_left_the_ranges(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    """Between two processes, with a network on which the provider's last message is under way when
    it says goodbye: both end with the reason, and nothing is shown of the text.
    """
    ranges, config = tmp_path / "ranges.json", load_config(pair.private)
    save_ranges(ranges, replace(config, norm_low=(1024.0,), norm_high=(4096.0,)))
    server = start(
        "serve",
        "--model",
        str(pair.private),
        "--ranges",
        str(ranges),
        "--listen",
        "127.0.0.1:0",
        "--insecure",
        "--once",
        "--network",
        "lan",
    )
    client = start(
        *pair.generate(server.until_listening(), "--prompt", "def read"),
        "--max-new-tokens",
        "2",
        "--network",
        "lan",
        "--standard",
    )
    assert client.wait(RUN_S) == 1 == server.wait(END_S)
    assert "on shares hold, first at norm of attention in block 0" in client.stderr
    assert "block 0" not in server.stderr and "left the ranges" in server.stderr
    assert client.stdout == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("{", "line 1 of .* is not valid JSON"),
        ("[]", 'has no "messages"'),
        ('{"messages": []}', 'has no "messages"'),
        ("[" * 99_999, "is not valid JSON"),
        ('{"messages": [{"role": "tool", "content": ""}]}', 'has no "messages"'),
    ],
)
def test_chats_that_are_none(
    model: Path, tmp_path: Path, ran: Ran, content: str, said: str
) -> None:
    (model / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    chats = tmp_path / "chats.jsonl"
    chats.write_text(content)
    code, actual = ran("calibrate", "--model", model, "--chats", chats)
    assert code == 2 and re.search(said, actual) and actual.count("\n") == 1, actual


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
