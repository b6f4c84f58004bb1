"""Correlated randomness made ahead of time: kept from run to run, refused where it does not fit."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from models.family import logits
from models.hf import load_model, save_model
from models.tokenizer import Tokenizer
from spu_llm.api import preparation
from spu_llm.api.preparation import NoRoom
from spu_llm.api.provider import Provider
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from spu_llm.core.values import ROLES
from spu_llm.offline import stock
from spu_llm.service.client import Server
from spu_llm.service.supervisor import SessionOutcome
from spu_llm.systems.decoding.records import PrepareRequest
from tests.kit.models import PRIVATE, endless, tiny_params
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Command, Start

PROMPT = "def read("
NEW = 2
REQUEST = ["--max-new-tokens", str(NEW), "--standard", "--temperature", "0"]
slow = pytest.mark.slow


def prepare(pair: Pair, port: int, pool: Path, *options: str) -> list[str]:
    return [
        "prepare",
        "--server",
        f"127.0.0.1:{port}",
        "--insecure",
        "--pool",
        str(pool),
        "--draft-model",
        str(pair.public),
        *REQUEST,
        *options,
    ]


def generate(pair: Pair, port: int, pool: Path, *options: str) -> list[str]:
    return pair.generate(port, "--prompt", PROMPT, "--pool", str(pool), *REQUEST, *options)


def greedy(pair: Pair) -> list[int]:
    """Return the private model's own continuation, in plaintext."""
    config, params = load_model(pair.private)
    tokens = Tokenizer.load(pair.public).encode(PROMPT)
    for _ in range(NEW):
        tokens.append(int(np.argmax(logits(params, config, jnp.asarray(tokens))[-1])))
    return tokens[-NEW:]


@dataclass
class Prepared:
    """Both parties' directories after `prepare`, whose server was killed; what it told. `untaken`:
    a copy of both that no session has used.
    """

    client: Path
    provider: Path
    untaken: Path
    result: dict[str, Any]
    output: str

    def copy(self, to: Path) -> Path:
        """Return a client's directory to spoil."""
        return Path(shutil.copytree(self.client, to))


@pytest.fixture(scope="module")
def prepared(start_shared: Start, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp("pools")
    file = root / "result.json"
    server = start_shared(*pair.serve("--pool", str(root / "provider")))
    options = ["--prompt", PROMPT, "--steps", str(NEW - 1), "--json", str(file)]
    client = start_shared(*prepare(pair, server.until_listening(), root / "client", *options))
    assert client.wait(RUN_S) == 0, client.stderr
    server.until("stderr", "session finished")
    server.send(signal.SIGKILL)
    server.wait(END_S)
    assert "making correlated randomness, 0 of " in client.stderr
    result = json.loads(file.read_text())
    for role in ROLES:
        shutil.copytree(root / role, root / "untaken" / role)
    return Prepared(root / "client", root / "provider", root / "untaken", result, client.stdout)


@pytest.fixture(scope="module")
def server(start_shared: Start, pair: Pair, prepared: Prepared) -> Command:
    """Return a provider that goes on with what the killed one had made."""
    return start_shared(*pair.serve("--pool", str(prepared.provider)))


def made(result: dict[str, Any]) -> int:
    return sum(row["bytes"] for row in result["correlations"])


def total(result: dict[str, Any]) -> int:
    return sum(result["bytes"]["offline"].values())


def test_what_was_made_is_told(prepared: Prepared, pair: Pair) -> None:
    result = prepared.result
    assert result["steps"] >= NEW - 1
    tokens = Tokenizer.load(pair.public).encode(PROMPT)
    assert result["config"]["request.prompt_tokens"] == len(tokens)
    for row in result["correlations"]:
        assert row["available_units"] == row["made_units"]  # nothing was there before
        assert row["needed_units"] == row["prefill_units"] + (NEW - 1) * row["step_units"]
        assert row["made_units"] >= row["needed_units"]
        assert row["made_units"] == 0 or min(row["seconds"], row["stored_bytes"]) > 0
    assert 0 < made(result) < total(result)
    assert f"{result['steps']} secure steps: {1 + result['steps']} tokens" in prepared.output
    assert result["tokens"] == {"least": 1 + result["steps"], "most": 1 + result["steps"]}
    assert result["lacking_bytes"] == 0


def test_the_directories_hold_what_was_told(prepared: Prepared) -> None:
    told = {
        row["kind"]: (row["available_units"], row["stored_bytes"])
        for row in prepared.result["correlations"]
        if row["available_units"]
    }
    (client,), (provider,) = (stock.stocks(prepared.untaken / role) for role in ROLES)
    assert client.folder.name == prepared.result["config"]["peer"] != provider.folder.name
    for listed in (client, provider):
        assert {kind.name: (kind.units, kind.disk_bytes) for kind in listed.kinds} == told


@pytest.mark.slow
def test_a_step_that_the_disk_has_no_room_for_is_refused(
    start: Start, pair: Pair, server: Command, tmp_path: Path
) -> None:
    options = ["--prompt", PROMPT, "--steps", "1", "--disk", "1"]
    client = start(*prepare(pair, server.until_listening(), tmp_path / "pool", *options))
    client.assert_failed(2, "one step take", "--disk leaves 1.0 MB", "give more", within_s=RUN_S)
    (listed,) = stock.stocks(tmp_path / "pool")
    assert listed.batches == 0


@slow
def test_as_much_is_made_as_the_disk_has_room_for(start: Start, pair: Pair, tmp_path: Path) -> None:
    """Both halves lie on one machine."""

    def prepared_here(pool: str, *options: str) -> dict[str, Any]:
        file = tmp_path / f"{pool}.json"
        client = start(
            "prepare",
            "--pool",
            str(tmp_path / pool),
            "--model",
            str(pair.private),
            "--draft-model",
            str(pair.public),
            "--prompt",
            PROMPT,
            "--draft-length",
            "2",
            "--json",
            str(file),
            *options,
        )
        assert client.wait(RUN_S) == 0, client.stderr
        result: dict[str, Any] = json.loads(file.read_text())
        assert ("--disk leaves no room" in client.stdout) == (result["lacking_bytes"] > 0)
        return result

    prepared_here("small", "--steps", "1")
    room = stock.stored_bytes(tmp_path / "small") // 10**6 + 2
    result = prepared_here("bounded", "--steps", "31", "--disk", str(room))
    assert result["steps"] >= 1 and (result["steps"] < 31) == (result["lacking_bytes"] > 0)
    assert 0 < stock.stored_bytes(tmp_path / "bounded") <= room * 10**6


@pytest.mark.parametrize(
    ("client", "provider", "said"),
    [
        (3_000_000, None, "take 5.0 MB more, but --disk leaves 3.0 MB in pool"),
        (
            3_000_000,
            2_000_000,
            r"take 5.0 MB more, but the provider has room for 2.0 MB.*serve --disk",
        ),
        (None, 0, "take 5.0 MB more, but the provider has room for 0.0 MB"),
    ],
)
def test_whose_disk_has_no_room_is_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, client: int | None, provider: int | None, said: str
) -> None:
    rooms = {"client": client, "provider": provider}
    result = {"step_lacks_bytes": 5_000_000, "lacking_batches": [0], "room_bytes": rooms}
    outcome = SessionOutcome(result, 0, 0), {}
    monkeypatch.setattr(preparation, "run_as_client", lambda *given, **more: outcome)
    away = Provider("local", Server("127.0.0.1", 9, "local"), pair.private, Path("pool"), 1)
    with pytest.raises(NoRoom, match=f"a prompt of 5 tokens and one step {said}"):
        request = PrepareRequest(5, 7, 2, 0.5, steps=3)
        preparation.prepare(request, pair.public, away)


@slow
def test_a_provider_gives_no_more_disk_than_it_has(
    start: Start, pair: Pair, prepared: Prepared, tmp_path: Path
) -> None:
    """To all clients together, in completions, too: the first one takes all, the others nothing."""
    mb = stock.file_bytes(prepared.untaken / "provider") // 10**6 + 2
    provider, file = tmp_path / "provider", tmp_path / "result.json"
    server = start(*pair.serve("--pool", str(provider), "--disk", str(mb)))
    port = server.until_listening()
    long = ["--prompt", PROMPT, "--max-new-tokens", "50", "--steps", "49", "--json", str(file)]
    client = start(*prepare(pair, port, tmp_path / "first", *long))
    assert client.wait(RUN_S) == 0, client.stderr
    result = json.loads(file.read_text())
    assert 1 <= result["steps"] < 49 and result["lacking_bytes"] > 0
    room = result["room_bytes"]["provider"]
    assert f"the provider had room for {room / 1e6:.1f} MB" in client.stdout
    assert 0 < stock.stored_bytes(tmp_path / "first") <= room < mb * 10**6
    client = start(*prepare(pair, port, tmp_path / "second", "--prompt", PROMPT, "--steps", "1"))
    client.assert_failed(2, "one step take", "the provider has room for", within_s=RUN_S)
    for directory in ("second", "first"):
        client = start(*generate(pair, port, tmp_path / directory, "--json", str(file)))
        assert client.wait(RUN_S) == 0, client.stderr
        assert json.loads(file.read_text())["token_ids"] == greedy(pair)
        assert stock.file_bytes(provider) <= mb * 10**6


def test_a_completion_takes_what_was_made(
    start: Start, pair: Pair, server: Command, prepared: Prepared, tmp_path: Path
) -> None:
    file, port = tmp_path / "result.json", server.until_listening()
    client = start(*generate(pair, port, prepared.client, "--json", str(file)))
    assert client.wait(RUN_S) == 0, client.stderr
    result = json.loads(file.read_text())
    assert result["token_ids"] == greedy(pair)
    # Positions of silent products with its six matrices; nothing else.
    assert "making correlated randomness, 0 of 6 batches" in client.stderr
    # What is left offline is SPU's own set-up, which `prepare` had, too.
    assert total(result) < 1.05 * (total(prepared.result) - made(prepared.result))
    learned = "which sessions had the other one's pool directory"
    assert all(learned in result["learned"][role] for role in ("client", "provider"))


def _cut(pool: Path) -> None:
    file = next(pool.glob("*/field-square-*/*/results.npy"))
    file.write_bytes(file.read_bytes()[:-8])


def _open_to_others(pool: Path) -> None:
    pool.chmod(0o755)


@contextmanager
def in_use(pool: Path) -> Iterator[None]:
    lock = next(pool.glob("*/lock")).open("r+b")
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    lock.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_cut, ["results.npy", "damaged", "remove"]),
        pytest.param(_open_to_others, ["open to other users", "make it 700"], marks=slow),
    ],
)
def test_a_spoilt_directory_is_refused(
    start: Start,
    pair: Pair,
    server: Command,
    prepared: Prepared,
    tmp_path: Path,
    spoil: Any,
    words: list[str],
) -> None:
    pool = prepared.copy(tmp_path / "pool")
    spoil(pool)
    client = start(*generate(pair, server.until_listening(), pool))
    client.assert_failed(1, *words, within_s=END_S)


@slow
def test_a_directory_serves_one_session_at_a_time(
    start: Start, pair: Pair, server: Command, prepared: Prepared, tmp_path: Path
) -> None:
    pool = prepared.copy(tmp_path / "pool")
    with in_use(pool):
        client = start(*generate(pair, server.until_listening(), pool))
        client.assert_failed(1, "in use by another session", within_s=END_S)


def test_more_steps_than_there_are_is_refused(
    start: Start, pair: Pair, server: Command, tmp_path: Path
) -> None:
    client = start(*prepare(pair, server.until_listening(), tmp_path / "pool", "--steps", str(NEW)))
    client.assert_failed(2, "--steps", f"0 to {NEW - 1}", within_s=END_S)


def test_a_provider_without_a_pool_prepares_nothing(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    server = start(*pair.serve("--once"))
    client = start(*prepare(pair, server.until_listening(), tmp_path / "pool"))
    client.assert_failed(2, "keeps no correlated randomness", "--pool", within_s=END_S)
    server.assert_failed(2, "keeps no correlated randomness", within_s=END_S)


@slow
def test_what_was_made_serves_other_weights_as_well(
    start: Start, pair: Pair, prepared: Prepared, tmp_path: Path
) -> None:
    """Nothing in the directories depends on weights: products with them come of their hints."""
    changed = Pair(Path(shutil.copytree(pair.private, tmp_path / "other")), pair.public)
    save_model(changed.private, PRIVATE, endless(tiny_params(PRIVATE, 7)))
    both = Path(shutil.copytree(prepared.untaken, tmp_path / "pools"))
    server = start(*changed.serve("--once", "--pool", str(both / "provider")))
    file, port = tmp_path / "result.json", server.until_listening()
    client = start(*generate(changed, port, both / "client", "--json", str(file)))
    assert client.wait(RUN_S) == 0, client.stderr
    assert json.loads(file.read_text())["token_ids"] == greedy(changed) != greedy(pair)
    assert (
        "making correlated randomness, 0 of 6 batches" in client.stderr
    )  # of silent products alone


@slow
def test_a_run_that_is_killed_costs_what_it_had_taken(
    start: Start, pair: Pair, prepared: Prepared, tmp_path: Path
) -> None:
    both = [shutil.copytree(p, tmp_path / p.name) for p in (prepared.client, prepared.provider)]
    server = start(*pair.serve("--pool", str(both[1])))
    port = server.until_listening()
    client = start(*generate(pair, port, both[0], "--max-new-tokens", "50"))
    client.until_phase("decoding")
    client.send(signal.SIGKILL)
    server.until("stderr", "session failed")
    file = tmp_path / "result.json"
    client = start(*generate(pair, port, both[0], "--json", str(file)))
    assert client.wait(RUN_S) == 0, client.stderr
    result = json.loads(file.read_text())
    assert result["token_ids"] == greedy(pair)
    assert total(result) < total(prepared.result)


@slow
def test_a_completion_goes_first_while_watch_makes(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    """It takes what was made so far; both halves stay in step, and the rest is made afterwards."""
    pools = [tmp_path / role for role in ROLES]
    server = start(*pair.serve("--pool", str(pools[1])))
    port = server.until_listening()
    options = ["--watch", "--prompt", PROMPT, "--max-new-tokens", "50", "--steps", "49"]
    watch = start(*prepare(pair, port, pools[0], *options), SPU_LLM_LOOK_S="0.2")

    def batches() -> int:
        return sum(stocks.batches for stocks in stock.stocks(pools[0]))

    assert eventually(lambda: batches() >= 3, RUN_S), watch.stderr
    file = tmp_path / "result.json"
    client = start(*generate(pair, port, pools[0], "--json", str(file)))
    assert client.wait(RUN_S) == 0, client.stderr
    assert json.loads(file.read_text())["token_ids"] == greedy(pair)
    assert "waiting for prepare --watch to give way" in client.stderr
    watch.until("stdout", "making stops for now")
    assert eventually(lambda: "enough for a prompt of" in watch.stdout, RUN_S), watch.stderr
    assert eventually(lambda: server.stderr.count("session finished") == 2, END_S), server.stderr
    watch.send(signal.SIGTERM)
    assert watch.wait(END_S) == 0, watch.stderr
    kinds = [
        {kind.name: (kind.batches, kind.units) for kind in stocks.kinds}
        for pool in pools
        for stocks in stock.stocks(pool)
    ]
    assert kinds[0] == kinds[1] != {}


@slow
def test_demo_prepares_and_takes_on_one_machine(start: Start, pair: Pair, tmp_path: Path) -> None:
    pool, files = str(tmp_path / "pool"), [tmp_path / "prepared", tmp_path / "run"]
    models = ["--model", str(pair.private), "--draft-model", str(pair.public)]
    drafting = ["--max-new-tokens", "6", "--draft-length", "2", "--temperature", "0"]
    options = [*models, *drafting, "--pool", pool, "--json"]
    assert start("prepare", *options, str(files[0]), "--prompt", PROMPT).wait(RUN_S) == 0
    demo = start("demo", *options, str(files[1]), "--prompt", PROMPT)
    assert demo.wait(RUN_S) == 0, demo.stderr
    first, second = (json.loads(file.read_text()) for file in files)
    assert second["token_ids"][:NEW] == greedy(pair) and second["drafted"] > 0
    assert total(second) < total(first) / 2
    assert sorted(p.name for p in (tmp_path / "pool").iterdir()) == ["client", "provider"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--pool"),
        (["--pool", "p", "--server", "127.0.0.1:9", "--model", "m"], "--model: not allowed with"),
        (["--pool", "p", "--prompt", "a", "--prompt-tokens", "1"], "not allowed with"),
        (["--pool", "p", "--server", "127.0.0.1:9"], "--insecure"),
        (["--pool", "p", "--server", "nowhere", "--insecure"], "HOST:PORT"),
        (["--pool", "p", "--prompt", ""], "prompt is empty"),
        (["--pool", "p", "--draft-length", "0"], "--standard"),
        (["--pool", "p", "--json", "nowhere/result"], "not a directory"),
        (["--pool", "p", "--disk", "0"], "--disk must be 1 or more"),
    ],
)
def test_bad_options(options: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        parsed = cli.command_line().parse_args(["prepare", *options])
        parsed.run(parsed)
