"""Correlated randomness made in the background of steps, between two processes: when, at what cost,
and how it ends.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Start

pytestmark = pytest.mark.slow


def test_only_a_slow_network_has_it_at_the_same_cost(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    """The number of steps is known, so nothing is made for nothing; SPU's encryptions vary by some
    bytes.
    """
    options = ["--prompt", "def read(", "--standard", "--max-new-tokens", "50", "--seed", "5"]
    options += ["--temperature", "0"]
    collected: dict[str, Any] = {}
    for network in ("local", "lan"):
        file = tmp_path / f"{network}.json"
        command = start(
            *pair.demo,
            *options,
            "--network",
            network,
            "--json",
            str(file),
            XDG_CACHE_HOME=str(tmp_path / network),  # both fetch the hints
        )
        assert command.wait(RUN_S) == 0, command.stderr
        collected[network] = json.loads(file.read_text())
    local, lan = collected["local"], collected["lan"]
    assert local["made_beside"] == {"batches": 0, "seconds": 0.0}
    assert lan["made_beside"]["batches"] > 0 and lan["made_beside"]["seconds"] > 0
    for name in ("token_ids", "text", "steps", "messages"):
        assert local[name] == lan[name], name
    assert local["bytes"]["online"] == lan["bytes"]["online"]
    for way, sent in local["bytes"]["offline"].items():
        assert lan["bytes"]["offline"][way] == pytest.approx(sent, rel=0.001)
    # What ran beside is in no phase, which are the time of the completion.
    assert sum(lan["seconds"].values()) < lan["elapsed_seconds"]


@pytest.mark.parametrize("victim", ["provider", "client"])
def test_a_party_killed_while_it_is_made_ends_both(start: Start, pair: Pair, victim: str) -> None:
    command = start(
        *pair.demo,
        "--prompt",
        "def read(",
        "--max-new-tokens",
        "50",
        "--draft-length",
        "1",
        "--network",
        "lan",
    )
    assert eventually(lambda: bool(command.stdout), RUN_S), command.stderr
    time.sleep(0.5)  # into the first step
    supervisor, worker = command.provider()
    workers = [p for p in command.processes() if p.is_worker]
    (own,) = [p for p in workers if p.pid != worker.pid]
    {"provider": worker, "client": own}[victim].send(signal.SIGKILL)
    command.assert_failed(1, "signal 9", within_s=END_S)


def test_ctrl_c_while_it_is_made_leaves_nothing(start: Start, pair: Pair) -> None:
    command = start(
        *pair.demo,
        "--prompt",
        "def read(",
        "--max-new-tokens",
        "50",
        "--draft-length",
        "1",
        "--network",
        "lan",
    )
    assert eventually(lambda: bool(command.stdout), RUN_S), command.stderr
    time.sleep(0.5)  # into the first step
    command.send(signal.SIGINT)
    assert command.wait(END_S) == 130
    command.assert_gone()
