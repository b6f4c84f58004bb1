"""Results of studies, made up."""

from __future__ import annotations

from typing import Any

from experiments.common.measured import summed
from experiments.completions.study import CompletionStudyRequest
from tests.experiments import costs


def record(
    system: str,
    prompt: str = "tiny",
    *,
    network: str = "lan",
    mode: str = "greedy",
    seconds: float = 1.0,
    emitted: int = 32,
    stock_tokens: int | None = None,
    seed: int = 3,
    others: float = 0.0,
) -> dict[str, Any]:
    """Parts cost 1, 2, 3, ... times `seconds`; half of the correlated randomness is used."""
    parts = ("launch", "set_up", "material", "planning", "prefill", "decode")
    cost = {p: costs.figures(n * seconds, n, 1000 * n) for n, p in enumerate(parts, start=1)}
    cost["hint"] = costs.figures(0.0, 0, 0)
    cost["used_material"] = {k: v / 2 for k, v in cost["material"].items()}
    cost["whole"] = summed(cost[p] for p in parts)
    return {
        "asked": vars(
            CompletionStudyRequest(network, prompt, mode, system, 32, seed, stock_tokens)
        ),
        "commit": "0123",
        "date": "2026-01-02T03:04:05+00:00",
        "machine": costs.MACHINE,
        "load_start": 0.5,
        "load_end": 2.0,
        "others": others,
        "costs": cost,
        "steps": 10,
        "emitted": emitted,
        "repetition": 0.25,
        "near_ties": 1,
        "largest_margin": 0.01,
        "peak_memory": costs.MEMORY,
        "failures": [],
        **({"same_as_plaintext": emitted} if mode == "sampled" else {}),
    }
