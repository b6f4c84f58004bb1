"""The cost of a step: what is computed from measurements, and how it is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.benchmarks import step_sweep
from experiments.completions import cost
from experiments.completions.cost import Request
from experiments.cost_model import workload
from models.hf import load_config
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.systems.decoding.request import Request as Completion
from tests.experiments.cost_results import result


def test_steps_are_compared_with_the_stock_paths() -> None:
    actual = result()
    assert actual["stock_step"]["seconds"] == 40.0  # the median of 38, 40 and 49
    one, eight, _ = actual["lengths"]
    assert (one["seconds"], one["of_stock"], eight["of_stock"]) == (2.0, 0.05, 0.1)
    assert (one["offline"]["seconds"], eight["offline"]["seconds"]) == (0.5, 4.0)
    # No figure is divided by tokens of a step, which other runs than these had.
    assert not {"rows", "tokens_per_step", "accepted"} & set(actual)


def test_a_blocks_messages_leave_out_what_a_step_has_once() -> None:
    actual = result()
    one, eight, sixteen = actual["lengths"]
    # 8 of 9 norms, and the other kinds of a block: 240 messages of 4 layers.
    assert one["messages_per_block"] == eight["messages_per_block"] == 60
    assert actual["stock_messages_per_block"] == 2 * 200 + 4 * 200
    assert (one["chain"], one["of_stock"], sixteen["of_stock"]) == (140, 0.05, 0.15)
    assert actual["marginal_seconds"] == pytest.approx(4 / 15, rel=0.05)


def test_spus_linear_layers_are_compared_with_preprocessing() -> None:
    linear = result()["linear"]  # of 4 blocks, embedding and head
    assert linear["stock_seconds"] == pytest.approx(6 * 40 / 28)
    assert linear["times_fewer_seconds"] == pytest.approx(6 * 40 / 28 / 0.01)
    assert linear["times_fewer_bytes"] == pytest.approx(6 * 1_500_000 / 60_000)


def test_criteria_say_what_holds() -> None:
    holds = {one["name"]: one["holds"] for one in result()["criteria"]}
    assert set(holds.values()) == {True}
    assert "step of 16 against stock's of 1" in holds and "peak memory, client" in holds
    slow = {one["name"]: one["holds"] for one in result(stock=7.0)["criteria"]}
    assert not slow["step of 8 against stock's of 1"]
    assert slow["messages per block at 8"]
    assert "step of 8 against stock's of 1" not in {
        one["name"] for one in result("wan")["criteria"]
    }


def test_a_stock_path_that_is_wrong_is_a_failure() -> None:
    assert not result()["failures"]
    assert "plaintext" in result(right=False)["failures"][0]


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    lines = cost.table(result()).splitlines()
    assert lines[0].startswith("network lan, both parties on 2 cores; greedy")
    row = next(line for line in lines if line.startswith("| 8 |"))
    assert row.split("|")[2:6] == [" 4.0000 ", " 0.100 ", " 280 ", " 60 "]
    assert any(
        line.startswith("criterion step of 8 against stock's of 1, at most 0.5: 0.1: holds")
        for line in lines
    )
    pytest.importorskip("matplotlib")
    file = tmp_path / "cost.png"
    cost.plot([result("lan"), result("wan")], file)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (Request("def read", 0, 1), "--draft-length"),
        (Request("def read", 16, 1), "--draft-length"),
        (Request("def read", 7, 0), "--steps"),
        (Request("def read" * 20, 7, 1), "context"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    request_: Request, wanted: str, tiny_pair: tuple[Path, Path]
) -> None:
    with pytest.raises(InputError, match=wanted):
        request_.check(*tiny_pair)


@pytest.mark.slow
def test_a_run_between_two_processes_sends_what_a_dry_run_finds(
    tiny_pair: tuple[Path, Path],
) -> None:
    prompt = "def read"
    actual = cost.measure(*tiny_pair, Request(prompt, 3, 1), "local")
    assert not actual["failures"]
    assert [step["positions"] for step in actual["lengths"]] == [1, 4, 16]
    length = len(Tokenizer.load(tiny_pair[1]).encode(prompt))
    config = load_config(tiny_pair[0])
    for step in actual["lengths"]:
        # The same step of a completion with as much room in the cache, from shapes alone.
        n = step["positions"]
        room = step_sweep.NEW_TOKENS + cost.LONGEST - n
        asked = Completion(length, room, n - 1, 0.0, show_progress=True)
        _, wanted = workload.of_completion(config, asked, [])
        for name in ("messages", "client_to_provider", "provider_to_client"):
            assert step[name] == wanted.counts[name], (n, name)
        units: dict[str, float] = {}
        for name, made in step["material"].items():
            common = workload.common_name(name)
            units[common] = units.get(common, 0) + made["units"]
        assert units.items() <= wanted.units.items()
        _, deeper = workload.of_completion(replace(config, n_layer=2), asked, [])  # type: ignore[call-arg]
        block = deeper.counts["messages"] - wanted.counts["messages"]
        assert step["messages_per_block"] == pytest.approx(block)
    one = actual["lengths"][0]
    assert one["segments"] == 0 and one["of_stock"] < 1
    assert one["messages"] < actual["stock_messages_per_block"]
    assert actual["linear"]["times_fewer_bytes"] > 1
    assert cost.table(actual).count("criterion") == len(actual["criteria"])
