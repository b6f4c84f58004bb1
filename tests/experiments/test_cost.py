"""The cost of a token: what is computed from measurements, and how it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import cost, cost_report
from experiments.cost import Request
from models.training.evaluate import Speed
from spu_llm.errors import InputError
from tests.experiments import costs


def result(network: str = "lan", right: bool = True, stock: float = 40.0) -> dict[str, Any]:
    return cost.analyse(
        costs.stock(network, stock - 2, stock, stock + 9, right=right),
        costs.stock_layers(network, {1: stock}),
        costs.sweep(network, {1: 2.0, 8: 4.0, 16: 6.0}),
        costs.SPEED,
        7,
    ) | {"machine": costs.MACHINE, "config": {}}


def test_seconds_per_token() -> None:
    stock, standard, drafted = result()["rows"]
    assert (stock["seconds"], stock["speedup"], stock["seconds_with_offline"]) == (40.0, 1.0, 40.0)
    assert (standard["seconds"], standard["speedup"]) == (2.0, 20.0)
    assert (standard["seconds_with_offline"], standard["speedup_with_offline"]) == (2.5, 16.0)
    # A step of 8 positions and its drafting give 4 tokens.
    assert drafted["seconds"] == pytest.approx((4.0 + 0.2) / 4)
    assert drafted["seconds_with_offline"] == pytest.approx((4.0 + 0.2 + 0.5 * 8) / 4)
    assert drafted["messages"] == 280 / 4
    assert drafted["offline"]["client_to_provider"] == 1_000_000 / 4


def test_a_blocks_messages_leave_out_what_a_step_has_once() -> None:
    found = result()
    one, eight, sixteen = found["lengths"]
    # 8 of 9 norms, and the other kinds of a block: 240 messages of 4 layers.
    assert one["messages_per_block"] == eight["messages_per_block"] == 60
    assert found["stock_messages_per_block"] == 2 * 200 + 4 * 200
    assert (one["chain"], one["of_stock"], sixteen["of_stock"]) == (140, 0.05, 0.15)
    assert found["marginal_seconds"] == pytest.approx(4 / 15, rel=0.05)


def test_linear_layers_online_there_are_compared_with_material_here() -> None:
    linear = result()["linear"]  # of 4 blocks, embedding and head
    assert linear["stock_seconds"] == pytest.approx(6 * 40 / 28)
    assert linear["times_fewer_seconds"] == pytest.approx(6 * 40 / 28 / 0.01)
    assert linear["times_fewer_bytes"] == pytest.approx(6 * 1_500_000 / 60_000)


def test_criteria_say_what_holds() -> None:
    holds = {one["name"]: one["holds"] for one in result()["criteria"]}
    assert set(holds.values()) == {True}
    assert "step of 16 against stock's of 1" in holds and "peak memory, client" in holds
    slow = {one["name"]: one["holds"] for one in result(stock=7.0)["criteria"]}
    assert not slow["speed-up online"] and not slow["step of 8 against stock's of 1"]
    assert slow["messages per block at 8"]
    assert "step of 8 against stock's of 1" not in {
        one["name"] for one in result("wan")["criteria"]
    }


def test_a_stock_path_that_is_wrong_is_a_failure() -> None:
    assert not result()["failures"]
    assert "plaintext" in result(right=False)["failures"][0]


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    lines = cost_report.table(result()).splitlines()
    assert lines[0].startswith("network lan, both parties on 2 cores; greedy")
    row = next(line for line in lines if line.startswith("| ours, drafted"))
    assert row.split("|")[2:6] == [" 1.0500 ", " 38.1 ", " 2.0500 ", " 19.5 "]
    assert any(line.startswith("criterion speed-up online, at least 8: 38.1: holds")
               for line in lines)  # fmt: skip
    pytest.importorskip("matplotlib")
    file = tmp_path / "cost.png"
    cost_report.plot([result("lan"), result("wan")], file)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("request_", "wanted"), [
    (Request("def read", 0, 1), "--draft-length"),
    (Request("def read", 16, 1), "--draft-length"),
    (Request("def read", 7, 0), "--steps"),
    (Request("def read" * 20, 7, 1), "context"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    request_: Request, wanted: str, tiny_pair: tuple[Path, Path]
) -> None:
    with pytest.raises(InputError, match=wanted):
        request_.check(*tiny_pair)


@pytest.mark.slow
def test_a_run_between_two_processes(tiny_pair: tuple[Path, Path]) -> None:
    speed = Speed(0.0, 3, 2.0, 0.33)
    found = cost.measure(*tiny_pair, Request("def read", 3, 1), "local", speed)
    assert not found["failures"]
    assert [step["positions"] for step in found["lengths"]] == [1, 4, 16]
    assert [row["name"] for row in found["rows"]] == [
        "stock, standard", "ours, standard", "ours, drafted"
    ]  # fmt: skip
    one = found["lengths"][0]
    assert 0 < one["messages_per_block"] < found["stock_messages_per_block"] < 2000
    assert found["rows"][1]["offline"]["seconds"] > 0
    assert cost_report.table(found).count("criterion") == len(found["criteria"])
