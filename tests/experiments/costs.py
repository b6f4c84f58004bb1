"""Made-up measurements of sessions, for the reports of cost and latency."""

from __future__ import annotations

from typing import Any

KINDS = {
    "embedding": 1,
    "norm": 9,
    "linear": 4,
    "attention products": 4,
    "softmax": 4,
    "GELU": 4,
    "head": 1,
    "verification": 1,
}
MACHINE = {
    "cores": 2,
    "processor": "some",
    "memory_gib": 23.5,
    "commit": "0123456",
    "load": [0.1, 1.9],
    "date": "2026-01-02T03:04:05+00:00",
}
UNDER = "*Commit 0123456, 2026-01-02; 2 cores, 24 GiB; load 0.10 at the start, nothing else; {}.*"
MEMORY = {"client": 900 << 20, "provider": 1100 << 20}


def figures(seconds: float, messages: int = 10, size: int = 1_000_000) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "client_to_provider": size,
        "provider_to_client": size // 2,
        "messages": messages,
    }


def step(n: int, seconds: float) -> dict[str, Any]:
    """Return a step of ours of n positions; every kind takes an eighth of its seconds."""
    kinds = {
        kind: figures(seconds / 8, messages=10 * times, size=1000 * n)
        for kind, times in KINDS.items()
    }
    total = figures(seconds, messages=280, size=8000 * n) | {"drafting": 0.2, "kinds": kinds}
    return {
        "positions": n,
        "warm_up": total,
        "runs": [total],
        "median": total,
        "segments": 0,
        "chain": {kind: 5 * times for kind, times in KINDS.items()},
        "offline": figures(0.5 * n),
        "material": {"gate": {"units": n} | figures(0.5 * n)},
        "offline_linear": figures(0.01 * n, size=40_000),
    }


def sweep(network: str, seconds: dict[int, float]) -> dict[str, Any]:
    return {
        "network": network,
        "capacity": 50,
        "prefill": {"prompt_tokens": 7, **figures(3.0)},
        "steps": [step(n, s) for n, s in seconds.items()],
        "peak_memory": MEMORY,
        "learned": {"client": [], "provider": []},
        "config": {"model.n_layer": 4},
    }


def spu_layers(network: str, seconds: dict[int, float]) -> dict[str, Any]:
    """Return every layer of the stock path takes 1/28 of a step's seconds."""
    return {
        "network": network,
        "capacity": 50,
        "steps": [
            {
                "positions": n,
                "layers": [
                    {"kind": kind, "times": times} | figures(s / 28, messages=200)
                    for kind, times in KINDS.items()
                ],
            }
            for n, s in seconds.items()
        ],
        "learned": {"client": [], "provider": []},
    }


def stock(network: str, *seconds: float, right: bool = True) -> dict[str, Any]:
    offline = {"offline": figures(0.0, 0, 0)}
    return {
        "network": network,
        "prefill": figures(60.0) | offline,
        "runs": [figures(s, messages=6000, size=30_000_000) | offline for s in seconds],
        "peak_memory": MEMORY,
        "as_in_plaintext": right,
        "learned": {"client": [], "provider": []},
    }
