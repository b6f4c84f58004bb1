"""Results of the cost study, made up."""

from __future__ import annotations

from typing import Any

from experiments.completions import cost
from tests.experiments import costs


def result(network: str = "lan", right: bool = True, stock: float = 40.0) -> dict[str, Any]:
    return cost.analyse(
        costs.stock(network, stock - 2, stock, stock + 9, right=right),
        costs.spu_layers(network, {1: stock}),
        costs.sweep(network, {1: 2.0, 8: 4.0, 16: 6.0}),
    ) | {"machine": costs.MACHINE, "config": {}}
