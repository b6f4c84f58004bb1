"""What the emulated networks give, between two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks import network_bench
from spu_llm.app import cli
from tests.experiments.committed_results import MACHINE, mistakes_of


def test_two_processes_on_a_link() -> None:
    """Never faster than what is emulated, however busy the machine; quicker without emulation."""
    lan = network_bench.measure("lan", 2, round_trips=3, nbytes=2_000_000)
    assert (len(lan["round_trip_seconds"]), len(lan["bulk_seconds"])) == (3, 2)
    assert min(lan["round_trip_seconds"]) >= 0.020
    assert 0 < max(network_bench.throughput(lan)) <= 1e9
    local = network_bench.measure("local", 1, round_trips=10, nbytes=2_000_000)
    assert 0 < min(local["round_trip_seconds"]) < 0.020


def result(*networks: str) -> dict[str, Any]:
    row = {
        "round_trip_seconds": [0.083, 0.081, 0.09],
        "bytes": 40_000_000,
        "bulk_seconds": [0.98, 1.08, 0.88],
    }
    return {"machine": MACHINE, "networks": [{"network": name} | row for name in networks]}


def test_the_table_beside_what_is_emulated(tmp_path: Path) -> None:
    actual = result("lan", "wan")
    assert network_bench.table(actual).splitlines()[2:] == [
        "| lan | 20 | 83.00 (81.00 to 90.00) | 1,000 | 333 (302 to 372) |",
        "| wan | 80 | 83.00 (81.00 to 90.00) | 400 | 356 (320 to 400) |",
    ]
    assert mistakes_of("network", actual, tmp_path) == []


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    def measure(network: str, repeat: int) -> dict[str, Any]:
        asked.append((network, repeat))
        return dict(result(network)["networks"][0])

    monkeypatch.setattr(network_bench, "measure", measure)
    file = tmp_path / "network.json"
    options = ["bench", "network", "--network", "lan,wan", "--json", str(file)]
    with pytest.raises(SystemExit) as end:
        cli.main(options)
    assert end.value.code == 0 and asked == [("lan", 5), ("wan", 5)]
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["networks"] == result("lan", "wan")["networks"] and written["machine"]["commit"]
    assert "| wan | 80 | 83.00 (81.00 to 90.00) | 400 | 356 " in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main([*options, "--repeat", "0"])
    assert end.value.code == 2 and "--repeat must be at least 1" in capsys.readouterr().err
