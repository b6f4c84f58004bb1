"""The step sweep's table and plot on made-up figures, its checks, and one real session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks import step_sweep
from experiments.common.report import both_ways
from experiments.completions import exact
from spu_llm.core.errors import InputError
from tests.kit.models import PRIVATE


def cost(seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "client_to_provider": 2_500_000,
        "provider_to_client": 1_000_000,
        "messages": 1200,
    }


def sweep(n: int, *seconds: float) -> dict[str, Any]:
    runs = [cost(s) for s in seconds]
    return step_sweep._with_median({"positions": n, "warm_up": cost(9.0), "runs": runs})


RESULT = {
    "network": "lan",
    "capacity": 50,
    "prefill": {"prompt_tokens": 10, **cost(20.0)},
    "steps": [sweep(1, 8.0, 12.0), sweep(8, 15.0, 16.0, 30.0)],
    "again": sweep(1, 10.5, 10.5),
}


def test_the_table_shows_medians_and_ratios() -> None:
    rows = step_sweep.table(RESULT).splitlines()
    assert rows[0].startswith("network lan: prefill of 10 tokens")
    assert rows[4:] == [
        "| prefill 10 | 20.00 |  | 2.50 | 1.00 | 1200 |",
        "| 1 | 10.00 | 1.00 | 2.50 | 1.00 | 1200 |",
        "| 8 | 16.00 | 1.60 | 2.50 | 1.00 | 1200 |",
        "| 1 (again) | 10.50 | 1.05 | 2.50 | 1.00 | 1200 |",
    ]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "steps.png"
    step_sweep.plot([RESULT], file)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("prompt_tokens", "positions", "wanted"),
    [
        (10, [], "empty"),
        (10, [0], "found 0"),
        (10, [1, 34], "found 34"),
        (0, [1], "empty"),
        (64, [1], "context"),
        (60, [1, 8], "60 prompt tokens and 8 positions"),
    ],
)
def test_impossible_sweeps_are_refused(
    prompt_tokens: int, positions: list[int], wanted: str
) -> None:
    with pytest.raises(InputError, match=wanted):
        step_sweep.check_positions(PRIVATE, prompt_tokens, positions)


@pytest.mark.slow
def test_a_sweep_between_two_processes(tiny_pair: tuple[Path, Path]) -> None:
    result = step_sweep.measure(*tiny_pair, "def read", [1, 3], repeat=1, network="local")
    assert [s["positions"] for s in result["steps"]] == [1, 3]
    prompt_tokens = result["prefill"]["prompt_tokens"]
    prefill, steps = exact.of_sweep(PRIVATE, prompt_tokens, [1, 3], temperature=1.0)
    measured = [
        (result["prefill"], prefill),
        (result["again"]["median"], steps[1]),
        *((step["median"], steps[step["positions"]]) for step in result["steps"]),
    ]
    # Parties send what the plan says, whatever the secrets are.
    for actual, wanted in measured:
        for name in ("messages", "client_to_provider", "provider_to_client"):
            assert actual[name] == wanted[name]
    for step in result["steps"]:
        kinds = step["median"]["kinds"].values()
        sizes = {k: both_ways(c) for k, c in step["median"]["kinds"].items()}
        wanted = steps[step["positions"]]["bytes_of"]
        assert {k: n for k, n in sizes.items() if n} == {k: n for k, n in wanted.items() if n}
        spent = sum(cost["seconds"] for cost in kinds)
        assert 0.3 * step["median"]["seconds"] < spent <= step["median"]["seconds"]
        # What waits for one another: between half of the messages and all of them.
        sent = sum(cost["messages"] for cost in kinds)
        assert sent / 2 <= sum(step["chain"].values()) <= sent <= step["median"]["messages"]
        assert step["offline"]["seconds"] > step["offline_linear"]["seconds"] > 0
    assert min(result["peak_memory"].values()) > 1 << 26
    assert step_sweep.table(result).count("\n") == 7
