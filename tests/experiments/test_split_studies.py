"""The studies of split models: what is run, what goes on, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.common import commands
from experiments.split import report as noir_report
from experiments.split import runs as split_runs
from experiments.split import study as noir
from models.gpt2 import GPT2Config
from models.split import Split
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.split.attacks import suite
from spu_llm.systems.split.baselines.noise import NOISES
from spu_llm.systems.split.ends import client_ends, table_of

PLAN = noir.NoirPlan(("grr", "t2t"), (0.5, 6.0), rounds=7, attacks=("a8",), texts=4)


def outcome(rate: float, at_chance: bool) -> dict[str, Any]:
    what = "the right token in its place, by trying all"
    return {
        "attack": "A8",
        "what": what,
        "rate": rate,
        "interval": [rate / 2, min(1.0, 2 * rate)],
        "at_chance": at_chance,
    }


def row(mechanism: str, epsilon: float | None, rounds: int, accuracy: float) -> dict[str, Any]:
    return {
        "mechanism": mechanism,
        "epsilon": epsilon,
        "rounds": rounds,
        "kept": 1.5,
        "loss": None,
        "perplexity": [40.0, 0.1],
        "accuracy": [accuracy, 0.02],
        "outcomes": [outcome(0.25, at_chance=False)] if rounds or epsilon is None else [],
    }


def result() -> dict[str, Any]:
    rows = [row("none", None, 0, 0.5), row("grr", 0.5, 0, 0.0), row("grr", 0.5, 7, 0.125)]
    facts = {"known_files": 3, "held_out_files": 2, "windows": 4, "length": 64, "tuning_tokens": 9}
    return {"plan": {"rounds": 7, "texts": 4}, "corpus": facts, "rows": rows}


def test_cells_are_tuned_and_not_tuned_and_baselines_are_not() -> None:
    collected = [(c.mechanism, c.epsilon, c.rounds) for c in noir.cells(PLAN)]
    assert collected == [
        ("none", None, 0),
        ("none", None, 7),
        ("grr", 0.5, 0),
        ("grr", 0.5, 7),
        ("grr", 6.0, 0),
        ("grr", 6.0, 7),
        ("t2t", 0.5, 0),
        ("t2t", 6.0, 0),
    ]


def test_a_file_of_the_same_plan_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "noir.json"
    assert commands.earlier(file, PLAN) == []
    plan = json.loads(json.dumps(noir.asdict(PLAN)))
    file.write_text(json.dumps({"plan": plan, "rows": [row("grr", 0.5, 7, 0.1)]}))
    assert [noir.row_name(r) for r in commands.earlier(file, PLAN)] == ["grr 0.5 7"]
    file.write_text(json.dumps({"plan": plan | {"rounds": 8}, "rows": []}))
    with pytest.raises(InputError, match="no cells of this very plan"):
        commands.earlier(file, PLAN)


def test_the_tables_have_what_was_measured() -> None:
    utility = noir_report.utility(result())
    assert utility[-1] == (
        "| grr, ε / m = 0.5 | 1.5 | 40 (× or / 1.11) | 0.0 ± 2.0 % | 40 (× or / 1.11) | "
        "12.5 ± 2.0 % |"
    )
    assert noir_report.attacks(result(), 0.5)[-1] == (
        "| A8: the right token in its place, by trying all | 25.0 (12.5 to 50.0) | "
        "25.0 (12.5 to 50.0) |"
    )


def test_a_mechanism_may_have_all_attacks_and_others_some() -> None:
    plan = noir.NoirPlan(("grr", "arr"), attacks=("a1", "a9"), fully=("arr",))
    assert plan.attacks_on("grr") == plan.attacks_on("none") == ("a1", "a9")
    assert plan.attacks_on("arr") == tuple(suite.ATTACKS)
    some = result()
    other = outcome(0.5, at_chance=True) | {"attack": "A10", "what": "templates"}
    some["rows"] += [row("none", None, 7, 0.4), row("arr", 0.5, 7, 0.1)]
    some["rows"][-1]["outcomes"].insert(0, other)
    lines = noir_report.attacks(some, 0.5)
    assert lines[0] == "| %, ε / m = 0.5 | no codebook | grr | no codebook, tuned | arr |"
    assert lines[2].startswith("| A8: ") and lines[3] == (
        "| A10: templates | – | – | – | 50.0 (25.0 to 100.0), at chance |"
    )
    some["inverters"] = {"base": 0.987, "corrected": 0.99, "tokens": 4096}
    assert "4,096" not in noir_report.circumstances(result())
    said = noir_report.circumstances(some)
    assert "Of 4,096 tokens" in said and "98.7%" in said and "99.0%" in said


def test_utility_is_of_the_labels() -> None:
    """A back whose logits are largest at tau(next token)."""
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    labels = np.array([3, 1, 2, 0, 7, 5, 6, 4])
    windows = np.array([[0, 4, 1], [2, 3, 5]])
    # No blocks: the back is a norm, which leaves the largest entry, and the head.
    back = {"blocks": [], "head": {"weight": np.eye(8, dtype=np.float32)}}
    y = np.eye(8, dtype=np.float32)[labels[windows[:, 1:]]]
    good = noir.utility(config, y, lambda y: y, back, windows, labels)
    bad = noir.utility(config, y, lambda y: y, back, windows, np.arange(8))
    assert good["accuracy"][0] == 1 and bad["accuracy"][0] < 1
    assert good["perplexity"][0] < 2 < bad["perplexity"][0]


def test_noisy_rows_without_noise_are_the_fronts() -> None:
    """SnD's front: each occurrence of a token has noise of its own."""
    import jax

    from models.family import family_of

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=3, n_head=1)
    params = family_of(config).init(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 32, (9, 8))
    front, _ = client_ends(params, config, Split(1, 1))
    wanted = noir._front_of(front, config, tokens)
    table, prg = table_of(params, config), Prg.from_seed(0, "noise")
    far, near = (
        noir._noisy_front(params, config, table, eta, NOISES["spherical"], prg, tokens)[0]
        for eta in (1.0, 1e9)
    )
    np.testing.assert_allclose(near, wanted, atol=1e-4)
    assert float(np.abs(np.asarray(far) - np.asarray(wanted)).max()) > 0.1


def test_mpc_is_judged_against_full_decoding_prompt_by_prompt() -> None:
    def run(mode: str, prompt: str, seconds: float, ahead: int) -> dict[str, Any]:
        ways = {"client_to_provider": ahead, "provider_to_client": 0}
        return {
            "mode": mode,
            "network": "lan",
            "prompt": prompt,
            "tokens": 2,
            "steps": 1,
            "seconds": {"offline": 1.0, "prefill": 0.0, "decode": seconds},
            "bytes": {"offline": ways, "online": ways},
            "messages": {"offline": 4, "online": 2},
        }

    runs = [
        run("full", "a", 4, 100),
        run("mpc", "a", 1, 50),
        run("full", "b", 2, 100),
        run("mpc", "b", 0.8, 50),
    ]
    seconds, material = split_runs.criteria({"runs": runs})
    assert "0.325 (median of 2 prompts, 0.25 to 0.4): holds" in seconds
    assert "0.5 (median of 2 prompts, 0.5 to 0.5): does not hold" in material
    assert len(split_runs.rows({"runs": runs})) == 4
