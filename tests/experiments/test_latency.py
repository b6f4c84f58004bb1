"""Latency against input length: the parts of its seconds, and how it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.common.kinds import kind_of
from experiments.completions import exact, latency
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from tests.experiments import costs
from tests.experiments.latency_results import results
from tests.kit.models import PRIVATE


def test_ours_is_predicted_from_chains_bytes_and_local_seconds() -> None:
    local, lan = results()
    softmax = lan["paths"]["ours"][2]["kinds"]["softmax"]
    assert softmax["seconds"] == pytest.approx(3.6 / 8)
    assert softmax["delay"] == pytest.approx(20 * 0.010)
    assert softmax["transmission"] == pytest.approx(8 * 8000 / 1e9)  # the busier direction
    assert softmax["compute"] == pytest.approx(1.6 / 8)
    assert local["paths"]["ours"][2]["kinds"]["softmax"]["delay"] == 0
    assert latency.parts_of(lan["paths"]["ours"][0])["delay"] == pytest.approx(140 * 0.010)


def test_of_the_stock_path_the_delay_is_what_is_left() -> None:
    norm = results()[1]["paths"]["stock"][0]["kinds"]["norm"]
    assert norm["seconds"] == pytest.approx(9 * 43 / 28)
    assert norm["compute"] == pytest.approx(9 * 15 / 28)
    assert norm["transmission"] == pytest.approx(8 * 9 * 1_500_000 / 1e9)
    assert norm["delay"] == pytest.approx(9 - 0.108)


def test_a_layer_that_is_faster_on_a_network_has_no_delay() -> None:
    """Noise: it is not counted against other layers' delay."""

    def of(network: str, seconds: float, local: Any) -> dict[str, Any]:
        layers = costs.spu_layers(network, {1: seconds})
        return latency.analyse(costs.sweep(network, {1: 1.0}), layers, local)

    (step,) = of("lan", 7.0, of("local", 14.0, None))["paths"]["stock"]
    assert [cell["delay"] for cell in step["kinds"].values()] == [0.0] * len(costs.KINDS)
    assert latency.parts_of(step)["compute"] == pytest.approx(14.0)


def test_drafting_pays_by_what_is_accepted() -> None:
    path = results()[1]["paths"]["ours"]
    assert latency.growth(path) == pytest.approx([1.0, 2.6 / 2.4, 1.5])
    assert latency.speedup(path, 0.0, 7) == pytest.approx(1 / 1.5)
    assert latency.speedup(path, 1.0, 7) == pytest.approx(8 / 1.5)
    assert latency.speedup(path, 0.5, 7) == pytest.approx(2 * (1 - 0.5**8) / 1.5)
    # No result says what a pair gains: its tokens per step are of other runs than these seconds.
    assert not {"tokens_per_step", "alpha"} & set(results()[1])


@pytest.mark.parametrize(
    ("scope", "op", "kind"),
    [
        ("embedding/look_up", "linear", "embedding"),
        ("attention/rms_norm", "sum_squares", "norm"),
        ("rms_norm", "scale_rows", "norm"),
        ("attention/dense", "linear", "linear"),
        ("mlp/dense", "linear", "linear"),
        ("attention/attention", "times_rows", "attention products"),
        ("attention/rotate", "times_factors", "attention products"),
        ("attention/attention", "scale_rows", "softmax"),
        ("attention/attention", "maximum", "softmax"),
        ("mlp/gelu_of_product", "sign", "GELU"),
        ("head/dense", "linear", "head"),
        ("verification", "reveal", "verification"),
        ("", "reveal", "other"),
        ("attention", "", "other"),
    ],
)
def test_scopes_say_which_layer_an_op_is_of(scope: str, op: str, kind: str) -> None:
    assert kind_of(scope, op) == kind


def test_the_tables(tmp_path: Path) -> None:
    lines = latency.table(results()[1]).splitlines()
    assert lines[2].startswith("| ours, lan: positions | embedding | norm | linear |")
    assert lines[4].startswith("| 1 | 0.3 | 0.3 |")
    assert lines[4].endswith("| 2.4 | 1.00 | 1.4 + 0.000064 + 0.8 |")
    assert sum(line.startswith("| messages at") for line in lines) == 4
    without = latency.table(results(stock=False)[1])
    assert "stock" not in without


def test_all_networks_in_one_table() -> None:
    assert latency.by_network(results()) == [
        "| positions | ours, local | ours, lan | ours, lan, in steps of one | stock, local ˢ "
        "| stock, lan ˢ | stock, lan, in steps of one | ours / stock, lan |",
        "|---|---|---|---|---|---|---|---|",
        "| 1 | 0.8 | 2.4 | 1.00 | 15 | 43 | 1.00 | 0.0558 |",
        "| 2 | 1 | 2.6 | 1.08 | 16 | 44 | 1.02 | 0.0591 |",
        "| 8 | 1.6 | 3.6 | 1.50 | 22 | 50 | 1.16 | 0.072 |",
    ]
    assert latency.by_network(results(stock=False))[2] == "| 1 | 0.8 | 2.4 | 1.00 |"


@pytest.mark.parametrize("stock", [True, False])
def test_the_plot_is_drawn(stock: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "latency.png"
    latency.plot(results(stock), file)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("positions", "repeat", "wanted"),
    [([2, 4], 1, "begin with 1"), ([1, 40], 1, "found 40"), ([1], 0, "--repeat")],
)
def test_what_cannot_be_measured_is_refused(
    positions: list[int], repeat: int, wanted: str, tiny_pair: tuple[Path, Path]
) -> None:
    with pytest.raises(InputError, match=wanted):
        latency.check(*tiny_pair, "def read", positions, repeat)


@pytest.mark.slow
def test_a_run_between_two_processes(tiny_pair: tuple[Path, Path]) -> None:
    stocks = latency.measure(*tiny_pair, "def read", [1, 2], 1, "local", stock=True, local=None)
    ours, stock = stocks["paths"]["ours"], stocks["paths"]["stock"]
    for path in (ours, stock):
        assert [step["positions"] for step in path] == [1, 2]
        assert latency.kinds_of(path)[:8] == list(costs.KINDS)
    # Every op is counted with its layer, and once.
    length = len(Tokenizer.load(tiny_pair[1]).encode("def read"))
    _, exact_steps = exact.of_sweep(PRIVATE, length, [1, 2])
    for step in ours:
        wanted = exact_steps[step["positions"]]["bytes_of"]
        found_of = {k: cell["bytes"] for k, cell in step["kinds"].items() if cell["bytes"]}
        assert found_of == {k: n for k, n in wanted.items() if n}
        spent = sum(cell["seconds"] for cell in step["kinds"].values())
        assert 0 < spent <= step["seconds"]
    for own, peers in zip(ours, stock, strict=True):
        for kind in ("norm", "softmax", "GELU"):
            assert peers["kinds"][kind]["messages"] > own["kinds"][kind]["messages"]
