"""`spu-llm attack` as a process, against a real vault of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.command_line import refused
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S
from tests.kit.processes import Start


@pytest.mark.slow
def test_an_attack_on_a_real_vault_reports_and_leaves_nothing(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    actual = start(
        "attack",
        "recompute",
        "--mode",
        "vault",
        "--model",
        str(pair.private),
        "--prompts",
        "3",
        "--json",
        "a.json",
    )
    assert actual.wait(RUN_S) == 0, actual.stderr
    outcomes = json.loads((tmp_path / "a.json").read_text())["outcomes"]
    assert len(outcomes) == len(actual.stdout.splitlines()) == 6
    for outcome in outcomes:
        assert outcome["tries"] == 3 and outcome["successes"] >= 2, outcome
        assert not outcome["at_chance"]
    actual.assert_gone()


BAD = {
    "name": (["nobody", "--mode", "vault"], "choose from layer0, recompute, length"),
    "mode": (["layer0", "--mode", "here"], "one of vault, published, repaired, two-party"),
    "no sense": (["rank", "--mode", "two-party"], "an attack on published, repaired; on two-party"),
    "prompts": (["layer0", "--mode", "vault", "--prompts", "1"], "--prompts must be 2 to"),
    "too many": (["length", "--mode", "vault", "--prompts", "999"], "held-out text has"),
    "seed": (["layer0", "--mode", "vault", "--seed", "-1"], "--seed must be 0 or more"),
    "folder": (["layer0", "--mode", "vault", "--model", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize("options,words", BAD.values(), ids=list(BAD))
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert words in refused(capsys, "attack", *options)
