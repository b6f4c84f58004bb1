"""What a user can get wrong: one line that names it, exit code 2, before any cryptography.

What the command line tells by itself is tried in this process, and through one of its own once.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from models.gpt2 import GPT2Config
from models.hf import load_model, save_model
from spu_llm.app import cli
from spu_llm.app.options import add_network, network_of
from spu_llm.systems.watermark.keys import Key, Scheme, write_key
from tests.kit.command_line import nothing_begins
from tests.kit.models import PUBLIC, save_tokenizer, tiny_params
from tests.kit.pair import Pair
from tests.kit.patience import END_S
from tests.kit.processes import ERROR, Command, Start

LONG = "zq" * 70  # 140 tokens; the context is 64


def assert_refused(command: Command, *words: str) -> None:
    command.assert_failed(2, *words, within_s=END_S)
    assert "[connecting" not in command.stderr  # no worker has been given a job
    assert command.stdout == ""


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Return the same for a command that this process runs, which starts no other one."""

    def run(args: Sequence[str | bytes], *words: str) -> None:
        with nothing_begins(), pytest.raises(SystemExit) as end:
            cli.main([os.fsdecode(arg) for arg in args])
        printed = capsys.readouterr()
        (line,) = (line for line in printed.err.splitlines() if line.startswith(ERROR))
        assert (end.value.code, printed.out) == (2, "") and "[connecting" not in printed.err
        for word in words:
            assert word in line, line
        assert "Traceback" not in printed.err

    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", ""], ["prompt is empty", "give"]),
        (["--prompt", b"caf\xe9"], ["not valid UTF-8", "give it as UTF-8"]),
        (["--prompt", LONG], ["140 tokens", "context is 64", "shorten it to 63"]),
        (["--draft-length", "0"], ["--draft-length", "1 to 32", "--standard"]),
        (["--draft-length", "33"], ["--draft-length", "32", "found 33"]),
        (["--draft-length", "two"], ["--draft-length", "'two'"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens", "found 0"]),
        (["--max-new-tokens", str(10**30)], ["--max-new-tokens", "1000000"]),
        (["--temperature", "-1"], ["--temperature", "0.05 to 5", "-1"]),
        (["--temperature", "nan"], ["--temperature", "nan"]),
        (["--temperature", "inf"], ["--temperature", "inf"]),
        (["--verify", "trust"], ["--verify", "'trust'", "token"]),
        (["--verify", "post", "--temperature", "0"], ["greedy", "--verify token"]),
        (["--top-k", "5"], ["--top-k", "--verify post"]),
        (["--top-p", "0.5", "--verify", "race"], ["--top-p", "--verify post"]),
        (["--top-p", "0", "--verify", "post"], ["--top-p", "above 0"]),
        (["--top-k", "-1", "--verify", "post"], ["--top-k", "-1"]),
        (["--candidates", "4"], ["--candidates", "--watermark KEYFILE"]),
        (["--stop", ""], ["--stop", "empty"]),
        (["--stop", b"\xff"], ["--stop", "UTF-8"]),
        (["--network", "moon"], ["--network", "'moon'", "wan"]),
        (["--prompt", "-x"], ["--prompt", "--option=VALUE"]),
        (["--no-such-option"], ["--no-such-option", "--help"]),
        (["--max-new", "3"], ["--max-new", "--help"]),  # not abbreviated
        (["--json", "nowhere/result.json"], ["--json", "nowhere", "not a directory"]),
        (["--json", "."], ["--json", "is a directory", "file name"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:40].replace(LONG, "long"),
)
def test_demo_refuses_bad_options(
    refused: Callable[..., None], pair: Pair, options: list[str | bytes], words: list[str]
) -> None:
    refused([*pair.demo, *options], *words)


def test_a_process_ends_with_one_line_and_2(start: Start, pair: Pair) -> None:
    assert_refused(start(*pair.demo, "--prompt", b"caf\xe9"), "not valid UTF-8", "give it as UTF-8")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "--server", "nohost", "--insecure"], ["--server", "HOST:PORT", "'nohost'"]),
        (["generate", "--server", "h:0", "--insecure"], ["--server", "HOST:PORT", "'h:0'"]),
        (["generate", "--server", "h:99999", "--insecure"], ["--server", "HOST:PORT"]),
        (["generate", "--server", "h:²", "--insecure"], ["--server", "HOST:PORT"]),
        (["generate", "--server", f"{'x' * 70}:1", "--insecure"], ["--server", "HOST:PORT"]),
        (["generate", "--server", "localhost:1"], ["--identity", "keygen", "--insecure"]),
        (["generate", "--server", "localhost:1", "--identity", "d"], ["--trust", "--insecure"]),
        (
            ["generate", "--server", "localhost:1", "--identity", "d", "--trust", "f"],
            ["there is no d/cert.pem", "keygen"],
        ),
        (
            ["generate", "--server", "localhost:1", "--trust", "f", "--insecure"],
            ["--insecure uses no certificates"],
        ),
        (["keygen", "--name", "a b", "--out", "d"], ["--name", "host name", "'a b'"]),
        (["keygen", "--name", "host", "--out", "d", "--days", "0"], ["--days", "1 to 3650"]),
        (["generate", "--insecure"], ["--server", "--help"]),
        (["serve", "--model", "m", "--listen", ":80", "--insecure"], ["--listen", "HOST:PORT"]),
        (["serve", "--model", "m", "--listen", "127.0.0.1:0"], ["--identity", "--insecure"]),
        (["serve", "--model", "m", "--listen", "127.0.0.1:0", "--insecure"], ["m is not a dir"]),
        (
            ["serve", "--model", "m", "--listen", "127.0.0.1:0", "--insecure", "--disk", "5"],
            ["--disk", "--pool", "give both"],
        ),
        (
            [
                "serve",
                "--model",
                "m",
                "--listen",
                "127.0.0.1:0",
                "--insecure",
                "--pool",
                "p",
                "--disk",
                "0",
            ],
            ["--disk must be 1 or more"],
        ),
        ([], ["command", "--help"]),
        (["no-such-command"], ["no-such-command", "--help"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_commands_refuse_bad_arguments(
    refused: Callable[..., None], args: list[str], words: list[str]
) -> None:
    refused(args, *words)


def missing(directory: Path) -> str:
    shutil.rmtree(directory)
    return "not a directory"


def truncated(directory: Path) -> str:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return "truncated"


def without_weights(directory: Path) -> str:
    (directory / "model.safetensors").unlink()
    return "model.safetensors is missing"


def mamba(directory: Path) -> str:
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mamba"}))
    return "mamba"


def without_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.json").unlink()
    return "tokenizer.json is missing"


Damage = Callable[[Path], str]
DAMAGES = [missing, truncated, without_weights, mamba, without_tokenizer]


@pytest.fixture
def own_pair(pair: Pair, tmp_path: Path) -> Pair:
    """Return a copy of the pair, to be damaged."""
    for directory in pair:
        shutil.copytree(directory, tmp_path / directory.name)
    return Pair(tmp_path / pair.private.name, tmp_path / pair.public.name)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_named(
    refused: Callable[..., None], own_pair: Pair, damage: Damage
) -> None:
    words = damage(own_pair.private)
    refused(own_pair.serve(), str(own_pair.private), words)


def test_a_demo_says_what_its_provider_refuses(start: Start, own_pair: Pair) -> None:
    words = truncated(own_pair.private)
    assert_refused(start(*own_pair.demo), str(own_pair.private), words)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_draft_model_is_named(
    refused: Callable[..., None], own_pair: Pair, damage: Damage
) -> None:
    words = damage(own_pair.public)
    refused(own_pair.demo, str(own_pair.public), words)


def test_serve_refuses_a_model_that_may_leave_its_ranges(
    refused: Callable[..., None], own_pair: Pair
) -> None:
    config, params = load_model(own_pair.private)
    params["blocks"][0]["fc"]["weight"] = 1e3 * params["blocks"][0]["fc"]["weight"]
    save_model(own_pair.private, config, params)
    refused(own_pair.serve(), "feed-forward inputs", "cannot be served")


def test_models_with_different_tokenizers_do_not_work_together(
    refused: Callable[..., None], own_pair: Pair
) -> None:
    save_tokenizer(own_pair.private, "an entirely different text to learn merges from ")
    words = "--draft-model", str(own_pair.public), "another tokenizer"
    refused(own_pair.demo, *words)


@pytest.mark.parametrize(
    "command", [["calibrate", "--text", __file__], ["watermark", "embed", "--key", "key"]]
)
def test_a_model_that_lacks_tokens_of_its_tokenizer_is_refused(
    refused: Callable[..., None], own_pair: Pair, command: list[str], tmp_path: Path
) -> None:
    config = GPT2Config(PUBLIC.vocab_size - 1, 64, 8, 1, 2)
    save_model(own_pair.public, config, tiny_params(config, 3))
    write_key(tmp_path / "key", Key.from_os(), Scheme(4, units="words"))
    words = "vocab_size 287", "288 tokens", "tokenizer that belongs to the model"
    args = [str(tmp_path / arg) if arg == "key" else arg for arg in command]
    refused([*args, "--model", str(own_pair.public)], *words)
    refused(own_pair.demo, *words)


def test_a_prompt_too_long_for_the_provider_is_refused(start: Start, own_pair: Pair) -> None:
    config = GPT2Config(PUBLIC.vocab_size, 16, 8, 1, 2)
    save_model(own_pair.private, config, tiny_params(config, 3))
    server = start(*own_pair.serve("--once"))
    client = start(*own_pair.generate(server.until_listening(), "--prompt", "zq" * 10))
    assert_refused(client, "20 tokens", "context is 16", "shorten it to 15")
    server.assert_failed(2, "20 tokens", "context is 16", within_s=END_S)


def test_settings_that_differ_are_named_on_both_sides(start: Start, pair: Pair) -> None:
    server = start(*pair.serve("--once", "--network", "lan"))
    client = start(*pair.generate(server.until_listening()))
    words = ["settings differ", "network", '"local"', '"lan"']
    assert_refused(client, *words)
    server.assert_failed(2, *words, within_s=END_S)


def test_backends_that_differ_are_named_on_both_sides(start: Start, pair: Pair) -> None:
    server = start(*pair.serve("--once", "--backend", "spu"))
    client = start(*pair.generate(server.until_listening()))
    words = ["settings differ", "backend", '"own"', '"spu"']
    assert_refused(client, *words)
    server.assert_failed(2, *words, within_s=END_S)


def test_the_last_network_counts() -> None:
    """A command line goes before a file's options, which come first."""
    parser = argparse.ArgumentParser()
    add_network(parser)
    for given, network in (
        ([], "local"),
        (["--network", "lan", "--bandwidth", "200", "--delay", "80"], "200mbps-80ms"),
        (["--bandwidth", "200", "--delay", "80", "--network", "lan"], "lan"),
    ):
        assert network_of(parser.parse_args(given)) == network


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backend", "spu", "--references", "r.jsonl"], "leave --references out"),
        (["--backend", "tpu"], "invalid choice: 'tpu'"),
        (["--bandwidth", "400"], "--bandwidth and --delay are given together"),
        (["--network", "lan", "--delay", "4"], "--bandwidth and --delay are given together"),
        (["--bandwidth", "0", "--delay", "4"], "1 to 100000 Mbps"),
    ],
)
def test_serve_refuses_what_does_not_go_together(
    refused: Callable[..., None], pair: Pair, options: list[str], said: str
) -> None:
    refused(pair.serve(*options), said)


def test_a_port_in_use_is_named(start: Start, pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = start(
            "serve", "--model", str(pair.private), "--listen", f"127.0.0.1:{port}", "--insecure"
        )
        assert_refused(command, f"port {port}", "in use", "--listen")


# ---- a provider that is none; not bad input, so exit code 1


def test_a_port_where_nobody_listens(start: Start, pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    client = start(*pair.generate(port))
    client.assert_failed(1, f"127.0.0.1:{port}", "refused", within_s=END_S)


@pytest.fixture
def web_server() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_web_server_is_no_provider(start: Start, pair: Pair, web_server: int) -> None:
    client = start(*pair.generate(web_server))
    client.assert_failed(1, "the peer does not speak spu-llm", within_s=END_S)


def test_a_server_that_answers_something_else_breaks_the_wire(start: Start, pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = start(*pair.generate(server.getsockname()[1]))
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            client.assert_failed(1, "does not speak spu-llm", within_s=END_S)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--standard", "--drafts", "ngram"], ["--standard drafts nothing"]),
        (["--drafts", "ngram"], ["takes no draft model", "--draft-model"]),
        (["--drafts", "trigram"], ["--drafts", "trigram"]),
    ],
)
def test_drafts_by_what_cannot_draft(
    refused: Callable[..., None], pair: Pair, options: list[str], words: list[str]
) -> None:
    refused([*pair.demo, *options], *words)


def test_the_shipped_draft_model_of_another_tokenizer(
    refused: Callable[..., None], pair: Pair
) -> None:
    """Asked for by name; by default, n-grams draft in its place."""
    refused(["demo", "--model", str(pair.private), "--drafts", "model"], "another tokenizer")
