"""Results of the verification benchmark, made up."""

from __future__ import annotations

from typing import Any

from experiments.benchmarks import verify_bench, verify_report
from experiments.benchmarks.verify_bench import Request
from protocols.verification.variants import VARIANTS

REQUEST = Request(64, (2,), VARIANTS, verify_bench.SOURCES, 1, False)


MEMORY = {
    "peak_memory": {"client": 700 << 20, "provider": 650 << 20},
    "memory_growth": {"client": 20 << 20, "provider": 9 << 20},
}


def cost(seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "client_to_provider": 3_000_000,
        "provider_to_client": 4_000_000,
        "messages": 60,
    }


def row(variant: str, source: str, count: int, seconds: float) -> dict[str, Any]:
    return (
        cost(seconds)
        | MEMORY
        | {
            "variant": variant,
            "source": source,
            "draft_length": count,
            "delays": 30,
            "ratio": seconds / 20,
            "ratio_with_offline": seconds / 2,
            "offline": cost(10 * seconds),
            "mistakes": [],
        }
    )


def measured(count: int, seconds: float) -> dict[str, Any]:
    """Return a block's slice between norms of a second."""
    norms, part = ({"error": 0.01} | MEMORY | cost(s) for s in (1.0, seconds))
    return {"draft_length": count, "slices": 4, "norms": norms, "slice": part}


BLOCKS = [verify_bench.whole_block(measured(n, 5.0), measured(n, 8.0)) for n in (4, 8)]


ROWS = [
    row(variant, source, count, count / 4) for count in (4, 8) for variant, source in REQUEST.cells
]


RESULT: dict[str, Any] = {
    "network": "lan",
    "vocab": 32000,
    "repeat": 3,
    "rows": ROWS,
    "blocks": BLOCKS,
    "criterion": verify_report.criterion(ROWS),
    "memory_after_warm_up": {"client": 690 << 20, "provider": 590 << 20},
    "machine": {"cores": 2, "processor": "a processor"},
    "failures": [],
}
