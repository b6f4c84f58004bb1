"""`bench verify`: what it refuses, its checks of outcomes, table, plot, and one real session."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.benchmarks import verify_bench, verify_data, verify_report
from experiments.benchmarks.verify_data import Step, mistakes, places
from experiments.spu_baseline import block as spu_block
from experiments.spu_baseline.block import BlockShape
from protocols.verification import post
from protocols.verification.variants import VARIANTS, verifier
from spu_llm.app import cli
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.program import stated
from tests.experiments.verify_results import BLOCKS, REQUEST, RESULT, ROWS


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--vocab", "1"], "--vocab must be 2 to 262144, found 1"),
        (["--vocab", "262145"], "--vocab must be 2 to 262144"),
        (["--vocab", "many"], "invalid int value: 'many'"),
        (["--draft-length", "4,0"], "--draft-length must be 1 to 32, found 0"),
        (["--draft-length", "33"], "--draft-length must be 1 to 32, found 33"),
        (["--draft-length", "4,x"], "expected numbers like 1,2,4, found '4,x'"),
        (["--variants", "token,tree"], "unknown --variants 'tree'; choose from token, post"),
        (["--from", "thin air"], "unknown --from 'thin air'; choose from probabilities, logits"),
        (["--variants", "race", "--from", "probabilities", "--no-block"], "marked take logits"),
        (["--repeat", "0"], "--repeat must be at least 1, found 0"),
        (["--network", "moon"], "unknown network 'moon'"),
        (["--json", "/nowhere/a"], "--json: /nowhere is not a directory"),
        (["--plot", "/nowhere/a"], "--plot: /nowhere is not a directory"),
    ],
)
def test_bad_input(arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "verify", *arguments])
    assert end.value.code == 2
    assert wanted in capsys.readouterr().err


def test_settings_arrive_as_they_were_sent() -> None:
    for request in (REQUEST, dataclasses.replace(REQUEST, variants=(), block=True)):
        assert verify_bench.PROGRAM.asked(json.loads(json.dumps(stated(request)))) == request
    assert ("race", "logits") in REQUEST.cells and ("race", "probabilities") not in REQUEST.cells


# ---- the checks


def test_noise_of_either_party_costs_the_same() -> None:
    ours, theirs = (verify_bench.cost(name, "logits", 2, 64) for name in ("marked", "race"))
    assert ours == theirs and ours.messages > 0


def test_a_place_is_where_a_fraction_falls() -> None:
    weights, exact = np.array([1.0, 0, 2, 1]), np.zeros(4)
    assert [places(weights, exact, u) for u in (0.1, 0.3, 0.7, 0.8)] == [
        range(0, 1),
        range(2, 3),
        range(2, 3),
        range(3, 4),
    ]
    assert places(weights, np.full(4, 0.1), 0.24) == range(0, 3)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_wrong_outcomes_are_found(name: str, exact: bool) -> None:
    """The plaintext outcome passes; another stop, token or row does not."""
    if exact and name in verify_bench.NOISY:
        return
    chosen = verifier(name, verify_data.SAMPLING)
    logits = verify_data.step_logits(1000, 4)
    stops = set()
    for run in range(8):
        step = Step.drafted(chosen, logits, exact, run)
        outcome = plain_outcome(step)
        assert mistakes(step, outcome) == []
        for bad in broken(outcome):
            assert mistakes(step, bad), (run, bad)
        stops.add(int(chosen.resolve(outcome, step.drafts, step.q, lambda: 0.5)[0]))
    assert len(stops) > 1


def plain_outcome(step: Step) -> Any:
    """Return the outcome by the variant's own plaintext, on whole ring words."""
    if step.verifier.name in verify_bench.NOISY:
        z = (step.logits / 2.0**18).astype(np.float32)
        function = verify_bench.function_of(step.verifier, exact=False).fn
        outcome, _ = function(z, step.client, step.provider)
    else:
        with jax.experimental.enable_x64():
            function = verify_bench.function_of(step.verifier, exact=True).fn
            words = np.stack([verify_data.exact_weights(z) for z in step.logits])
            wide = jax.tree.map(lambda x: x.astype(np.int64), (step.client, step.provider))
            outcome, _ = function(words.astype(np.int64), *wide)
    seen = jax.tree.map(np.asarray, outcome)
    if isinstance(seen, post.PostOutcome):  # a row is fixed-point numbers
        seen = seen._replace(row=seen.row / 2.0**18)
    return seen


def broken(outcome: Any) -> list[Any]:
    if isinstance(outcome, post.PostOutcome):
        row = outcome.row.copy()
        row[0] += 5 / 2.0**18
        return [outcome._replace(row=row), outcome._replace(rejected=~outcome.rejected)]
    far = (int(outcome.token) + 500) % 1000
    return [outcome._replace(token=far), outcome._replace(token=1000)]


# ---- the block


def test_a_block_in_plaintext_is_causal() -> None:
    shape, rng = BlockShape(16, 2, 8, 24, 3), np.random.default_rng(0)
    weights = spu_block.random_weights(shape, rng)
    inputs = spu_block.random_inputs(shape, 4, rng)
    rows = spu_block.block(weights, inputs, shape)
    changed = inputs.x.copy()
    changed[2] += 1
    others = spu_block.block(weights, inputs._replace(x=changed), shape)
    same = np.abs(rows - others).max(axis=1) < 1e-5
    assert rows.shape == (4, 16) and same.tolist() == [True, True, False, False]
    assert BlockShape().sliced(32) == BlockShape(4096, 1, 128, 344, 64)


def test_a_small_block_between_two_parties(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_bench, "BlockShape", lambda: BlockShape(32, 64, 8, 32 * 48, 5))

    def program(session: PartySession) -> Any:
        return verify_bench.VerifyBench(session, REQUEST).block(2)

    block = simulation.run(program)[CLIENT]
    assert (block["draft_length"], block["slices"]) == (2, 32)
    for name in ("norms", "slice"):
        assert 0 < block[name]["error"] < verify_report.BLOCK_ERROR
        assert block[name]["seconds"] > 0 < block[name]["messages"]
    whole = verify_bench.whole_block(block, block)
    assert whole["seconds"] > block["slice"]["seconds"]
    assert verify_report.failures([], [whole], "memory") == []


def test_a_block_is_scaled_from_its_slice() -> None:
    block = BLOCKS[0]
    assert block["seconds_local"] == 1 + 4 * 4  # norms, and four slices less their norms
    assert block["seconds"] == 17 + 3  # and what the network adds to one slice
    assert block["client_to_provider"] == 3_000_000


# ---- the report


def test_the_table_shows_everything_beside_the_paper() -> None:
    text = verify_report.table(RESULT)
    lines = text.splitlines()
    assert lines[0].startswith("network lan: verification of drafts over 32,000 tokens; medians of")
    block = "| 4 | SPU's decoder block | 1/4 of it | 20.00 ˢ | 1 | 7.11 | ≥ 3,000,000 "
    assert block + "| ≥ 4,000,000 | ≥ 60 |" in text
    assert (
        "| 8 | naive | logits | 2.0000 | 0.1 (1) | 28.26 | 3,000,000 | 4,000,000 | 60 | 30 "
        "| 20.00 | 3,000,000 | 4,000,000 | 60 | 700, 650 | 20, 9 |" in lines
    )
    # The paper has no such variant.
    assert "| 8 | token | logits | 2.0000 | 0.1 (1) |  |" in text
    assert "one after the other" in text and "unscaled" in text
    assert "at most 0.25 of SPU's block: 8 drafts: 0.1000: holds (with" in text
    assert lines[-1] == "outcomes: all as in plaintext"


def test_several_results_in_one_table() -> None:
    """Exact columns are left out."""
    other = RESULT | {"network": "local", "vocab": 50257, "blocks": [], "rows": ROWS[:1]}
    lines = verify_report.together([RESULT, other])
    assert len(lines) == 2 + len(BLOCKS) + len(ROWS) + 1
    assert lines[2].startswith("| lan | 32,000 | 4 | SPU's decoder block | 1/4 of it | 20.00 ˢ |")
    assert lines[-1] == (
        "| local | 50,257 | 4 | token | probabilities | 1.0000 | 0.05 (0.5) |  | 10.00 | 3,000,000 "
        "| 4,000,000 | 60 | 700, 650 |"
    )


def test_the_paper_is_left_out_elsewhere() -> None:
    text = verify_report.table(RESULT | {"vocab": 64, "blocks": [], "criterion": []})
    assert "28.26" not in text and "was not measured" in text


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, results in {
        "both": [RESULT, RESULT | {"network": "wan"}],
        "alone": [RESULT | {"network": "local", "blocks": []}],
    }.items():
        file = tmp_path / f"{name}.png"
        verify_report.plot(results, file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_is_said() -> None:
    assert verify_report.failures(ROWS, BLOCKS, "lan") == []
    rows, blocks = copy.deepcopy((ROWS[:1], BLOCKS[:1]))
    rows[0]["mistakes"] = ["run 1: token 3 is not where the draws fall"]
    blocks[0]["measured"]["slice"]["error"] = float("nan")
    assert verify_report.failures(rows, blocks, "lan") == [
        "token from probabilities, 4 drafts, lan: run 1: token 3 is not where the draws fall",
        "SPU's block, 4 drafts: slice: off by nan standard deviations",
    ]


def test_a_failure_is_written_and_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = RESULT | {"failures": ["a token is wrong"]}
    monkeypatch.setattr(verify_bench, "measure", lambda *args: failed)
    file = tmp_path / "verify.json"
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "verify", "--no-block", "--json", str(file)])
    assert end.value.code == 1
    written = capsys.readouterr()
    assert "a token is wrong" in written.err and written.out.count("| 8 | token | logits |") == 2
    assert len(json.loads(file.read_text(encoding="utf-8"))["networks"]) == 2


@pytest.mark.slow
def test_all_variants_between_two_processes(tiny_pair: tuple[Path, Path]) -> None:
    result = verify_bench.measure(tiny_pair[0], REQUEST, "local")
    assert result["passed"] and result["failures"] == [] == result["blocks"]
    assert json.loads(json.dumps(result)) == result
    assert [(r["variant"], r["source"]) for r in result["rows"]] == REQUEST.cells
    assert "known seeds" in result["learned"]["client"][0]
    for one in result["rows"]:
        assert len(one["runs"]) == 1 and one["wrong"] == 0 and one["ratio"] is None
        assert 0 < one["seconds"] < 60 and 0 < one["delays"] < one["messages"] < 200
        assert one["segment_messages"] == 0  # nothing but our own ops
        assert one["offline"]["client_to_provider"] > 0 and one["stored_bytes"] > 0
        assert all(size > 50 << 20 for size in one["peak_memory"].values())
        # Whatever the secrets: what dry runs say.
        stated = dataclasses.asdict(verify_bench.cost(one["variant"], one["source"], 2, 64))
        assert one["delays"] == stated.pop("rounds") and stated.items() <= one.items()
    cheap, dear = (
        next(r for r in result["rows"] if (r["variant"], r["source"]) == ("token", source))
        for source in verify_bench.SOURCES
    )
    assert cheap["provider_to_client"] < dear["provider_to_client"]
    assert "| 2 | race | logits |" in verify_report.table(result)
