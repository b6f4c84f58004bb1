"""`spu-llm split`: two processes, one model; what is refused; tuning that is killed and goes on."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models.split import Split
from spu_llm.api import split as split_api
from spu_llm.api.provider import Provider
from spu_llm.api.split import SplitClient
from spu_llm.api.tuning import TuneOptions, begun
from spu_llm.app import cli
from spu_llm.app.commands import split
from spu_llm.app.options import record
from spu_llm.core.errors import InputError
from spu_llm.core.ledger import Ledger
from spu_llm.systems.split import modes
from spu_llm.systems.split.boundary import Boundary
from spu_llm.systems.split.mechanisms import MECHANISMS
from spu_llm.systems.split.records import declare_tuning
from spu_llm.systems.split.state import Tunings, own_directory
from spu_llm.systems.split.tuning import halves
from spu_llm.systems.split.vocabulary import DEFAULT
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import ERROR, Command, Start
from tests.systems.split.sessions import make_model

EVERY = 5  # rounds from save to save
MORE = 50  # rounds after a process was killed
ENDLESS = "1000000"  # rounds: whatever is to be killed does not end before
HERE = ["--insecure", "--mode"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("split") / "model")


@pytest.fixture(scope="module")
def noir(start_shared: Start, model: Path) -> Iterator[Command]:
    """Yield a provider of the middle in noir, which keeps tunings in its directory."""
    yield serving(start_shared, model, "noir", "tunings")


def serving(start: Start, model: Path, mode: str, tunings: str) -> Command:
    return start(
        "split",
        "serve",
        *HERE,
        mode,
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        "--tunings",
        tunings,
    )


def tune(port: int, model: Path, secrets: Path, *more: str) -> list[str]:
    texts = secrets.parent / "private.jsonl"
    texts.write_text(40 * '{"text": "def read(path):\\n    return alpha beta gamma"}\n')
    return [
        "split",
        "tune",
        *HERE,
        "noir",
        "--server",
        f"127.0.0.1:{port}",
        "--model",
        str(model),
        "--texts",
        str(texts),
        "--secrets",
        str(secrets),
        "--batch",
        "4",
        "--length",
        "16",
        "--epsilon",
        "4",
        "--lora",
        "2",
        "--save-every",
        str(EVERY),
        *more,
    ]


def generate(port: int, model: Path, mode: str, *more: str) -> list[str]:
    return [
        "split",
        "generate",
        *HERE,
        mode,
        "--server",
        f"127.0.0.1:{port}",
        "--model",
        str(model),
        "--prompt",
        "def read(path):",
        "--max-new-tokens",
        "6",
        "--temperature",
        "0",
        *more,
    ]


def first_round(command: list[str], tunings: Path) -> Path:
    """Return what such a command and its provider keep before the first round; the provider's
    folder.
    """
    options = cli.command_line().parse_args([*command, "1"], argparse.Namespace(started=0.0))
    client = split._client(options)
    config, params = client.loaded()
    asked = record(TuneOptions, options).settings(client, config, params, options.texts)
    begun(options.secrets, asked, config, params, lambda event: None)
    boundary, labels = Boundary(config.width, asked.precision), np.arange(config.vocab_size)
    _, host = halves(
        params,
        config,
        asked.split,
        codebook=None,
        labels=labels,
        boundary=boundary,
        learning_rate=asked.learning_rate,
        rank=asked.lora,
    )
    own_directory(tunings)
    kept = Tunings(tunings, asked.id)
    kept.save(host, asked.lora, 0)
    return kept.folder


def rounds_of(secrets: Path) -> int:
    path = secrets / "loss.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kept(secrets: Path, tuning: Path) -> dict[str, bytes]:
    """Return what both parties have, the provider after the last round."""
    content = {path.name: path.read_bytes() for path in secrets.iterdir()}
    return content | {path.name: path.read_bytes() for path in sorted(tuning.glob("*.sa*"))[-1:]}


@pytest.mark.parametrize(
    ("mode", "change", "said"),
    [
        ("plain", {"leave_out": "permutation"}, "has neither codebook nor permutation"),
        ("plain", {"mechanism": "arr"}, "--mode plain is without a codebook"),
        ("noir", {"mechanism": "none"}, "protects nothing"),
        ("noir", {"leave_out": "codebook", "epsilon": 4.0}, "are of the codebook that is left out"),
    ],
)
def test_what_does_not_go_together_is_refused(
    mode: str, change: dict[str, Any], said: str, model: Path, tmp_path: Path
) -> None:
    provider = Provider.at("127.0.0.1:1", insecure=True)
    client = SplitClient(provider, mode, Split(1, 1), model, tmp_path / "secrets")
    config, params = client.loaded()
    with pytest.raises(InputError, match=said):
        TuneOptions(**change).settings(client, config, params, [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"leave_out": "codebook"}, "tuned without a codebook"),
        ({"leave_out": "permutation"}, "tuned without a permutation"),
        ({"tuned": "back"}, "tuned with a public front"),
    ],
)
def test_no_text_goes_out_under_secrets_that_lack_a_part(
    change: dict[str, Any], said: str, model: Path, tmp_path: Path
) -> None:
    provider = Provider.at("127.0.0.1:1", insecure=True)
    client = SplitClient(provider, "noir", Split(1, 1), model, tmp_path / "secrets")
    config, params = client.loaded()
    text = tmp_path / "text.txt"
    text.write_text("def read(path): return alpha beta " * 40)
    asked = TuneOptions(**change).settings(client, config, params, [text])
    assert client.secrets is not None
    secrets = begun(client.secrets, asked, config, params, lambda event: None)
    with pytest.raises(InputError, match=said):
        client.complete("def read(path):")
    # What both parties say of such a tuning.
    ledger = Ledger()
    declare_tuning(ledger, TuneOptions(**change).request(secrets))
    rows, gradients, *_ = ledger.learned()["provider"]
    assert ("insecure" in rows) == (asked.leave_out == "codebook")
    assert ("insecure" in gradients) == (asked.leave_out == "permutation")
    # The same command goes on, and another is told what differs.
    begun(client.secrets, asked, config, params, lambda event: None)
    whole = TuneOptions().settings(client, config, params, [text])
    with pytest.raises(InputError, match="the whole of noir|tuned back, not ends"):
        begun(client.secrets, whole, config, params, lambda event: None)


@pytest.mark.slow
def test_a_killed_client_goes_on_bit_for_bit(
    noir: Command, start: Start, model: Path, tmp_path: Path
) -> None:
    """What both keep is what they keep of an uninterrupted run with the same secrets and LoRA."""
    port, secrets = noir.until_listening(), tmp_path / "secrets"
    command = tune(port, model, secrets, "--rounds")
    tuning = first_round(command, noir.tmp.parent / "tunings")
    shutil.copytree(secrets, tmp_path / "whole")
    shutil.copytree(tuning, tmp_path / "of-provider")
    killed = start(*command, ENDLESS)
    assert eventually(lambda: rounds_of(secrets) > 3 * EVERY, RUN_S), killed.stderr
    killed.send(signal.SIGKILL)
    killed.wait(END_S)
    killed.assert_gone(END_S)
    noir.until("stderr", "session failed")
    rounds = rounds_of(secrets) + MORE
    again = start(*command, str(rounds))
    assert again.wait(RUN_S) == 0, again.stderr
    assert f"{rounds} rounds, loss" in again.stdout
    actual = kept(secrets, tuning)
    shutil.rmtree(tuning)
    shutil.copytree(tmp_path / "of-provider", tuning)
    whole = start(*tune(port, model, tmp_path / "whole", "--rounds", str(rounds)))
    assert whole.wait(RUN_S) == 0, whole.stderr
    assert actual == kept(tmp_path / "whole", tuning)
    # Nothing of it can be read by others, or is on a screen.
    for path in (secrets, tuning, *secrets.iterdir(), *tuning.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    curve = [json.loads(line) for line in actual["loss.jsonl"].splitlines()]
    assert [entry["round"] for entry in curve] == list(range(rounds))
    assert curve[-1]["loss"] < curve[0]["loss"] - 1
    assert "under a secret codebook" in again.stderr and "insecure" not in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["its worker", "all of it"])
def test_a_killed_provider_ends_the_client_which_goes_on(
    start: Start, model: Path, tmp_path: Path, whole: bool
) -> None:
    server, secrets = serving(start, model, "noir", "tunings"), tmp_path / "secrets"
    port = server.until_listening()
    assert start(*tune(port, model, secrets, "--rounds", "1")).wait(RUN_S) == 0
    (tuning,) = (tmp_path / "tunings").iterdir()
    shutil.copytree(secrets, tmp_path / "whole")
    shutil.copytree(tuning, tmp_path / "of-provider")
    client = start(*tune(port, model, secrets, "--rounds", ENDLESS))
    assert eventually(lambda: rounds_of(secrets) > 3 * EVERY, RUN_S), client.stderr
    workers = [process for process in server.processes() if process.is_worker]
    for process in server.processes() if whole else workers:
        process.send(signal.SIGKILL)
    client.assert_failed(1, "peer was lost" if whole else "provider", within_s=END_S)
    rounds = rounds_of(secrets) + MORE
    if whole:
        server.wait(END_S)
        server = serving(start, model, "noir", "tunings")
        port = server.until_listening()
    assert start(*tune(port, model, secrets, "--rounds", str(rounds))).wait(RUN_S) == 0
    actual = kept(secrets, tuning)
    shutil.rmtree(tuning)
    shutil.copytree(tmp_path / "of-provider", tuning)
    again = start(*tune(port, model, tmp_path / "whole", "--rounds", str(rounds)))
    assert again.wait(RUN_S) == 0, again.stderr
    assert actual == kept(tmp_path / "whole", tuning)
    options = ["--secrets", str(secrets), "--random-prefix", "--json", "out.json"]
    made = start(*generate(port, model, "noir", *options))
    assert made.wait(RUN_S) == 0, made.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert made.stdout == "def read(path):" + result["text"] + "\n"
    assert len(result["token_ids"]) == 6 and result["messages"]["online"] == 13


def test_a_text_in_plain_says_that_it_is_insecure(
    start: Start, model: Path, tmp_path: Path
) -> None:
    server = serving(start, model, "plain", "tunings")
    client = start(*generate(server.until_listening(), model, "plain", "--json", "out.json"))
    assert client.wait(RUN_S) == 0, client.stderr
    result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert client.stdout == "def read(path):" + result["text"] + "\n"
    assert (result["steps"], result["finish_reason"]) == (5, "length")
    assert set(result["seconds"]) == {"offline", "prefill", "decode"}
    assert result["bytes"]["online"]["provider_to_client"] > 5 * 4 * 16
    assert "insecure" in result["learned"]["provider"][0]
    for said in (client.stderr, server.stderr):
        assert "--mode plain is insecure" in said


@pytest.mark.slow
def test_a_provider_serves_its_own_mode_alone(noir: Command, start: Start, model: Path) -> None:
    command = generate(noir.until_listening(), model, "plain")
    said = "serves --mode noir --split 1,1, not --mode plain --split 1,1"
    start(*command).assert_failed(2, said, within_s=RUN_S)
    whole = start("serve", "--model", str(model), "--listen", "127.0.0.1:0", "--insecure")
    command = generate(whole.until_listening(), model, "plain")
    start(*command).assert_failed(2, "must be started with spu-llm split serve", within_s=RUN_S)


BAD = {
    "mode": (["generate", "--mode", "noir"], "--mode noir needs --secrets DIR"),
    "split": (["generate", "--mode", "plain", "--split", "1,2"], "leaves no middle of a model"),
    "no split": (["generate", "--mode", "plain", "--split", "1"], "--split must be F,B"),
    "front": (["tune", "--mode", "noir", "--split", "0,1"], "--mode noir --split 0,1 has no front"),
    "served": (["serve", "--mode", "noir", "--split", "0,1"], "the secret codebook's own"),
    "prefix": (["generate", "--mode", "plain", "--random-prefix"], "--random-prefix is of --mode"),
    "secrets": (["generate", "--mode", "noir", "--secrets", "nowhere"], "No such file"),
    "top-p": (["generate", "--mode", "plain", "--top-p", "0"], "--top-p must be above 0"),
    "cold": (["generate", "--mode", "plain", "--temperature", "0.01"], "--temperature must be 0"),
    "empty": (["generate", "--mode", "plain", "--prompt="], "the prompt is empty"),
    "new": (["generate", "--mode", "plain", "--max-new-tokens", "0"], "--max-new-tokens must be"),
    "tune mpc": (["tune", "--mode", "mpc"], "invalid choice: 'mpc'"),
    "nothing": (["tune", "--mode", "noir", "--mechanism", "none"], "protects nothing"),
    "codebook": (["tune", "--mode", "plain", "--mechanism", "grr"], "leave --mechanism out"),
    "of nothing": (["tune", "--mode", "plain", "--epsilon", "1"], "which --mode plain has none of"),
    "epsilon": (["tune", "--mode", "noir", "--epsilon", "-1"], "--epsilon must be above 0"),
    "texts": (["tune", "--mode", "noir", "--length", "60"], "a batch needs 61 in a row"),
    "rounds": (["tune", "--mode", "plain", "--rounds", "-1"], "--rounds must be 0"),
    "lora": (["tune", "--mode", "plain", "--lora", "65"], "--lora must be 0 (none) to 64"),
    "rate": (["tune", "--mode", "plain", "--learning-rate", "0"], "--learning-rate must be above"),
    "disk": (["serve", "--mode", "noir", "--disk", "1"], "--disk bounds what is kept in --tunings"),
    "of one": (["serve", "--mode", "noir", "--client-sessions", "2"], "there is none with --insec"),
    "memory": (["serve", "--mode", "mpc", "--client-memory", "0"], "--client-memory must be 1 or"),
    "serve": (["serve", "--mode", "mpc", "--tunings", "x"], "--mode mpc tunes nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(
    name: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (role, *options), said = BAD[name]
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("def read(path): return path")
    own = {
        "generate": ["--server", "127.0.0.1:1"],
        "serve": ["--listen", "127.0.0.1:0"],
        "tune": [
            "--server",
            "127.0.0.1:1",
            "--texts",
            "texts.txt",
            "--secrets",
            "kept",
            "--length",
            "8",
        ],
    }[role]
    with pytest.raises(SystemExit) as end:
        cli.main(["split", role, "--model", str(model), "--insecure", *own, *options])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(ERROR)]
    assert end.value.code == 2 and len(lines) == 1 and said in lines[0], lines


def test_the_mechanisms_are_those_that_there_are() -> None:
    assert modes.MECHANISMS == ("none", *MECHANISMS) and DEFAULT == "exponential"


@pytest.mark.parametrize("role", ["serve", "generate", "tune"])
def test_help_says_what_each_mode_tells(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["split", role, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for said in (
        "plain, INSECURE: rows",
        "noir: such rows under a secret codebook",
        "equal tokens are alike wherever they stand",
        "a substitution cipher, at best",
        "mpc: the rows are shared",
        "lengths of prompt and drafts",
        "how many steps there were",
        "when the text ends",
        "activations left their ranges",
        "how many drafts stay",
    ):
        assert said in words


@pytest.mark.parametrize("rounds", [0, 7])
def test_no_text_goes_out_behind_the_public_front(rounds: int, model: Path, tmp_path: Path) -> None:
    """Before the first round, and after rounds with a provider whose gradients were zero."""
    provider = Provider.at("127.0.0.1:1", insecure=True)
    client = SplitClient(provider, "noir", Split(1, 1), model, tmp_path / "secrets")
    config, params = client.loaded()
    text = tmp_path / "text.txt"
    text.write_text("def read(path): return alpha beta " * 40)
    asked = TuneOptions().settings(client, config, params, [text])
    assert client.secrets is not None
    drawn = begun(client.secrets, asked, config, params, lambda event: None)
    still = replace(drawn, round=rounds)
    assert split_api._untuned(still, config, params)
    front = jax.tree.map(lambda leaf: leaf + np.float32(1e-3), drawn.front)
    assert not split_api._untuned(replace(still, front=front, round=7), config, params)
    if not rounds:
        with pytest.raises(InputError, match="have the public model's front still"):
            client.complete("def read(path):")
