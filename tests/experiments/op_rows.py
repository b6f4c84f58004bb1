"""Results of the op benchmark, made up."""

from __future__ import annotations

from typing import Any

from experiments.benchmarks import op_report


def cost(seconds: float, sent: float, received: float, messages: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "client_to_provider": sent,
        "provider_to_client": received,
        "messages": messages,
    }


def row(size: int) -> dict[str, Any]:
    """Return a made-up row of `square`, which costs SPU four times the seconds and bytes."""
    growth = {"client": 20 << 20, "provider": 9 << 20}
    common: dict[str, Any] = {"wrong": 0, "memory_growth": growth}
    ours = cost(0.001 * size, 8 * size, 8 * size, 2) | common
    ours |= {"runs": [0.001 * size], "rounds": 1, "as_priced": True, "stored_bytes_per_value": 8.0}
    ours |= {"offline": cost(0.007 * size, 100 * size, 52 * size, 0.1), "units": {"square": size}}
    stock = {"way": "x * x", "runs": ours["runs"]} | common
    stock |= cost(0.004 * size, 32 * size, 32 * size, 4)
    return {
        "op": "square",
        "does": "x * x mod 2^64",
        "size": size,
        "unit": "values",
        "values": size,
        "ours": ours,
        "stock": [stock | {"ratio": op_report.ratios(ours, stock)}],
    }
