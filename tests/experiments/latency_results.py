"""Results of the latency study, made up."""

from __future__ import annotations

from typing import Any

from experiments.completions import latency
from tests.experiments import costs

LOCAL = {1: 0.8, 2: 1.0, 8: 1.6}


LAN = {1: 2.4, 2: 2.6, 8: 3.6}


def results(stock: bool = True) -> list[dict[str, Any]]:
    collected: list[dict[str, Any]] = []
    for network, ours, peers in (("local", LOCAL, 14.0), ("lan", LAN, 42.0)):
        layers = costs.spu_layers(network, {n: peers + n for n in ours}) if stock else None
        collected.append(
            latency.analyse(costs.sweep(network, ours), layers, collected[0] if collected else None)
            | {"machine": costs.MACHINE, "config": {}}
        )
    return collected
