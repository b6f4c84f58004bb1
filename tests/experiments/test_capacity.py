"""Predicted capacity: its formula, and the simulation of producers that share link and disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.common import saved
from experiments.cost_model import capacity as study
from experiments.cost_model.capacity import CapacityPlan, Completion, capacity
from experiments.cost_model.pairs import Batch, Dealt, simulate
from spu_llm.app import cli
from spu_llm.net.shaping import NETWORKS, NetworkShape

BATCH = Batch(0.05, 4.0, 200e3, 100e3, 400e3)
DEALT = Dealt(items=64, batches=20, setup_s=6.0, disk=200e6)
LAN = NETWORKS["lan"]
COMPLETION = Completion(
    tokens=10,
    online_s=5.0,
    rounds=100.0,
    online={"client_to_provider": 1e6, "provider_to_client": 3e6},
    ahead_s=20.0,
    ahead_messages=300.0,
    ahead={"client_to_provider": 9e6, "provider_to_client": 2e6},
    batches=150.0,
    stored=50e6,
)


# ---- the simulation


def test_one_pair_takes_the_sum_of_its_parts() -> None:
    whole = 64 * (6.0 + 20 * (0.05 + 2 * LAN.delay_s + 300e3 * 8 / 1e9 + 400e3 / 200e6))
    played = simulate(BATCH, DEALT, LAN, 1)
    assert played.batches_per_s == pytest.approx(64 * 20 / whole)
    assert played.link == pytest.approx(64 * 20 * 200e3 * 8 / 1e9 / whole)
    assert played.disk == pytest.approx(64 * 20 * 400e3 / 200e6 / whole)


@pytest.mark.parametrize("network", ["local", "lan", "wan"])
def test_four_pairs_reach_four_fifths_of_linear(network: str) -> None:
    on = NETWORKS[network]
    alone = simulate(BATCH, DEALT, on, 1).batches_per_s
    for pairs in (2, 3, 4):
        assert 0.8 * pairs <= simulate(BATCH, DEALT, on, pairs).batches_per_s / alone <= pairs


@pytest.mark.parametrize("way", ["client_to_provider", "provider_to_client"])
def test_the_busier_direction_of_the_link_bounds_them(way: str) -> None:
    batch = replace(BATCH, client_to_provider=1e5, provider_to_client=1e5, stored=1.0)
    batch = replace(batch, **{way: 2e6})
    dealt = replace(DEALT, items=512, setup_s=0.0)
    most = 1e9 / (8 * 2e6)
    played = simulate(batch, dealt, LAN, 64)
    assert 0.95 * most < played.batches_per_s <= most and 0.95 < played.link <= 1


def test_the_disk_bounds_them() -> None:
    batch, dealt = replace(BATCH, stored=20e6), replace(DEALT, items=512, setup_s=0.0)
    played = simulate(batch, dealt, NETWORKS["local"], 64)
    assert 9.5 < played.batches_per_s <= 10 and played.disk > 0.95 and played.link == 0


def test_a_short_list_leaves_pairs_without_work() -> None:
    local, dealt = NETWORKS["local"], replace(DEALT, items=5, disk=1e15)
    alone, four = (simulate(BATCH, dealt, local, pairs).batches_per_s for pairs in (1, 4))
    assert four / alone == pytest.approx(5 / 2)


# ---- the formula


def test_capacity_follows_the_formula() -> None:
    plan = CapacityPlan(cores=4, setup_s=6.0, item_batches=50, disk_mb_s=1e9)
    network = NetworkShape("network", 100e6, 0.01)
    producing = (20.0 + 300 * 0.01 / 2 + 6.0 * 150 / 50) / 0.8
    online = 6.0 + 5.0 + 100 * 0.01 + 8 * 4e6 / 100e6
    few = capacity(COMPLETION, plan, network, 3)
    assert few["bound"] == "cores"
    assert few["tokens_per_hour"] == pytest.approx(3600 * 10 * 12 / (producing + online))
    many = [capacity(COMPLETION, plan, network, nodes) for nodes in (100, 1000)]
    for row in many:  # the client sends 10 MB in all, the provider 5
        assert row["bound"] == "link"
        assert row["tokens_per_hour"] == pytest.approx(3600 * 10 * 100e6 / (8 * 10e6))
    slow = capacity(COMPLETION, replace(plan, disk_mb_s=0.05), network, 100)
    by_disk = 3600 * 10 * 100 * 0.05e6 / (3 * 50e6)  # written, read and overwritten
    assert slow["bound"] == "disk" and slow["tokens_per_hour"] == pytest.approx(by_disk)
    unlimited = capacity(COMPLETION, plan, NETWORKS["local"], 1000)
    assert unlimited["bound"] == "cores" and "link" not in unlimited["by"]


def test_the_tables_say_what_is_predicted(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "PAIRS", (1, 4))
    monkeypatch.setattr(study, "_ITEMS", 8)
    plan = CapacityPlan((1, 100), 2, ("lan",), 4, 2, item_batches=10)
    result = study.measure([tiny_pair[0]], plan)
    (model,) = result["models"]
    of = model["completion"]
    assert of["tokens"] == 2 and of["batches"] > 0 and of["ahead"]["client_to_provider"] > 0
    assert [row["pairs"] for row in model["growth"]] == [1, 4]
    text = study.table(result)
    assert text.startswith("Predicted, not measured: ")
    assert "| private: machines of each party | cores of each | lan ᵖ |" in text
    assert "| 100 | 200 | " in text and "| 1 | 1.00 (link " in text
    page = study.in_page(result, "*origin*")
    assert page.count("*origin*") == 2 and page[0] == study.circumstances(result)


def test_the_committed_result_reaches_four_fifths_of_linear() -> None:
    result = saved.load("capacity")
    for model in result["models"]:
        few = [row for row in model["growth"] if row["pairs"] <= 4]
        assert len(few) == 12 and all(row["of_linear"] >= 0.8 for row in few)
    plan, model = CapacityPlan(**result["plan"]), result["models"][0]
    of = Completion(**model["completion"])
    dealt = Dealt(study._ITEMS, plan.item_batches, plan.setup_s, plan.disk_mb_s * 1e6)
    (row,) = (r for r in model["growth"] if (r["network"], r["pairs"]) == ("wan", 4))
    assert simulate(of.batch, dealt, NETWORKS["wan"], 4).batches_per_s == row["batches_per_s"]
    for row in model["capacity"]:
        assert capacity(of, plan, NETWORKS[row["network"]], row["nodes"]) == row


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "1,0"], "--nodes must be at least 1, found 0"),
        (["--new-tokens", "1"], "--new-tokens must be at least 2"),
        (["--setup-seconds", "-1"], "--setup-seconds must be 0 to 3600, found -1"),
        (["--disk", "0"], "--disk must be at least 1"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", "capacity", *options])
    assert end.value.code == 2 and words in capsys.readouterr().err
