"""Runs that succeed: the result's fields, what is shown, and what the other party can see."""

from __future__ import annotations

import json
import shutil
import signal
import stat
import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from models.hf import save_model
from models.tokenizer import Tokenizer
from tests.kit.models import PRIVATE, tiny_params
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Command, Process, Start

CANARY = "kanarie vogel"
STOPS = [option for c in string.ascii_letters for option in ("--stop", c)]


def check_types(result: dict[str, Any]) -> None:
    """Check the command line contract: every field, with its type."""
    both_ways = {"client_to_provider": int, "provider_to_client": int}
    contract: dict[str, Any] = {
        "text": str,
        "token_ids": list,
        "steps": int,
        "drafted": int,
        "accepted": int,
        "seconds": {"offline": float, "prefill": float, "decode": float},
        "made_beside": {"batches": int, "seconds": float},
        "first_token_seconds": float,
        "elapsed_seconds": float,
        "bytes": {"offline": both_ways, "online": both_ways},
        "messages": {"offline": int, "online": int},
        "wire_bytes": both_ways,
        "learned": {"client": list, "provider": list},
        "machine": {
            "cores": int,
            "processor": str,
            "memory_gib": float,
            "load": list,
            "commit": str,
            "date": str,
            "python": str,
            "spu": str,
        },
        "config": dict,
    }

    def check(value: Any, expected: Any, name: str) -> None:
        if isinstance(expected, dict):
            assert value.keys() == expected.keys(), name
            for key, inner in expected.items():
                check(value[key], inner, f"{name}.{key}")
        else:
            assert type(value) is expected, name

    check({name: result[name] for name in contract}, contract, "result")


def check_counts(result: dict[str, Any], draft_length: int) -> None:
    steps, drafted, accepted = result["steps"], result["drafted"], result["accepted"]
    assert drafted == steps * draft_length
    assert 0 <= accepted <= drafted
    # Every step adds its accepted drafts and one token; the end may cut the last step short.
    assert steps < len(result["token_ids"]) <= 1 + steps + accepted
    assert len(result["per_step"]) == steps
    for kind in ("client_to_provider", "provider_to_client"):
        assert result["bytes"]["online"][kind] > 20_000
    assert result["messages"]["online"] > 100
    assert result["seconds"]["prefill"] > 0
    for kind in ("client_to_provider", "provider_to_client"):  # framing and handshake come on top
        payload = result["bytes"]["online"][kind] + result["bytes"]["offline"][kind]
        assert payload < result["wire_bytes"][kind] < 1.2 * payload
    # The first token comes after the prefill and before all decoding.
    first, elapsed = result["first_token_seconds"], result["elapsed_seconds"]
    assert result["seconds"]["prefill"] < first < elapsed
    assert first + result["seconds"]["decode"] < elapsed
    assert sum(result["seconds"].values()) < elapsed
    # Prefill gives the first token, which may be the last.
    assert (result["seconds"]["decode"] > 0) == (steps > 0)


@dataclass
class Served:
    """A server that served two clients and was then told to end."""

    server: Command
    provider: list[Process]  # its processes while it served, at different times
    clients: list[Command]
    results: list[dict[str, Any]]
    files: list[Path]
    code: int


@pytest.fixture(scope="module")
def served(start_shared: Start, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Served:
    files = [tmp_path_factory.mktemp("json") / "result.json" for _ in range(2)]
    server = start_shared(*pair.serve())
    port = server.until_listening()
    drafting = ["--draft-length", "3", "--max-new-tokens", "6"]
    standard = ["--standard", "--max-new-tokens", "24", *STOPS]
    clients, provider = [], []
    for file, options in zip(files, (drafting, standard), strict=True):
        client = start_shared(
            *pair.generate(port, "--prompt", CANARY, "--json", str(file), *options)
        )
        for phase in ("preparing", "prefilling", "decoding"):
            client.until_phase(phase)
            provider += server.processes()
        assert client.wait(RUN_S) == 0, client.stderr
        clients.append(client)
    server.send(signal.SIGTERM)
    code = server.wait(END_S)
    server.assert_gone()
    results = [json.loads(file.read_text()) for file in files]
    return Served(server, provider, clients, results, files, code)


def test_result_has_the_fields_of_the_contract(served: Served) -> None:
    for result in served.results:
        check_types(result)
        assert result["learned"]["client"] and result["learned"]["provider"]


def test_counts_and_text_agree(served: Served, pair: Pair) -> None:
    drafting, standard = served.results
    check_counts(drafting, 3)
    check_counts(standard, 0)
    tokenizer = Tokenizer.load(pair.public)
    assert drafting["text"] == tokenizer.decode(drafting["token_ids"])
    assert drafting["finish_reason"] == "length"
    assert len(drafting["token_ids"]) == 6


def test_stop_ends_the_text_before_it(served: Served, pair: Pair) -> None:
    result = served.results[1]
    decoded = Tokenizer.load(pair.public).decode(result["token_ids"])
    assert result["finish_reason"] == "stop"
    assert not set(result["text"]) & set(string.ascii_letters)
    assert decoded.startswith(result["text"]) and decoded[len(result["text"])].isascii()


def test_text_is_streamed_after_the_prompt(served: Served) -> None:
    for client, result in zip(served.clients, served.results, strict=True):
        assert client.stdout == f"{CANARY}{result['text']}\n"
        assert "provider learned:" in client.stderr
        assert client.errors == []


def test_the_result_is_for_its_owner_only(served: Served) -> None:
    for file in served.files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert list(file.parent.iterdir()) == [file]  # no temporary file beside it


def test_the_prompt_is_in_no_output_of_the_provider(served: Served) -> None:
    assert len({p.pid for p in served.provider}) == 3  # its supervisor, and a worker per session
    for process in served.provider:
        assert CANARY not in process.argv and CANARY not in process.environ
    assert CANARY not in served.server.stdout + served.server.stderr
    # The client's worker gets it through a pipe: nobody else on the machine sees it there.
    assert served.server.stderr.count("session finished") == 2


def test_no_temporary_file_is_left(served: Served) -> None:
    for command in (served.server, *served.clients):
        assert list(command.tmp.iterdir()) == []


def test_sigterm_ends_the_server(served: Served) -> None:
    assert served.code == 128 + signal.SIGTERM
    assert "Traceback" not in served.server.stderr


@pytest.mark.slow
def test_demo_stops_at_the_context_limit(start: Start, pair: Pair, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(pair.private, short)
    save_model(short, config := replace(PRIVATE, n_positions=12), tiny_params(config, 1))
    file = tmp_path / "result.json"
    file.write_text("an earlier result")
    options = ["--max-new-tokens", "1000", "--temperature", "0", "--draft-length", "2"]
    demo = start(
        *Pair(short, pair.public).demo, "--prompt", "zqzqzqzq", "--json", str(file), *options
    )
    assert demo.wait(RUN_S) == 0, demo.stderr
    demo.assert_gone()
    result = json.loads(file.read_text())
    check_types(result)
    check_counts(result, 2)
    assert result["finish_reason"] == "length"
    assert 8 + len(result["token_ids"]) == 12
    assert result["config"]["request.temperature"] == 0
    assert list(demo.tmp.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        ["--standard"],
        *(
            ["--draft-length", "3", *v]
            for v in (
                [],
                ["--show-progress"],
                ["--verify", "race"],
                ["--verify", "naive"],
                ["--verify", "post", "--top-k", "50"],
            )
        ),
    ],
    ids=" ".join,
)
def test_a_seed_fixes_the_tokens(start: Start, pair: Pair, tmp_path: Path, mode: list[str]) -> None:
    tokens = []
    for name in ("first", "second"):
        file = tmp_path / name
        options = ["--seed", "5", "--max-new-tokens", "5", "--prompt", "def read("]
        demo = start(*pair.demo, *options, *mode, "--json", str(file))
        assert demo.wait(RUN_S) == 0, demo.stderr
        tokens.append(json.loads(file.read_text())["token_ids"])
    assert tokens[0] == tokens[1]
