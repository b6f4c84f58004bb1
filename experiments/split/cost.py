"""What a split takes off a completion: a step whose middle alone runs on shares beside one of the
whole model, from the plans alone.

`python -m experiments.split.cost --json FILE` writes the figures and prints the table.
Messages and bytes online, and the correlated randomness that is demanded, are exact
(`experiments.cost_model.workload`); bytes and seconds of the correlated randomness, and seconds
online, are estimates (`experiments.cost_model.estimate`), without what the client computes at its
ends.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from experiments.common import report
from experiments.common.report import both_ways
from experiments.cost_model.estimate import Options, figures
from experiments.cost_model.prices import Prices
from experiments.cost_model.workload import of_completion
from models.family import ModelConfig
from models.hf import load_config
from models.split import Split
from spu_llm.api.defaults import shipped
from spu_llm.app.output import write_json
from spu_llm.app.printing import show, show_table
from spu_llm.core.machine import machine
from spu_llm.systems.decoding.request import GenerationRequest, Request
from spu_llm.systems.split.secure_records import MiddleRequest

PROMPT_TOKENS, NEW_TOKENS, POSITIONS, STEPS = 7, 64, 8, 4
NETWORKS = ("local", "lan", "wan")
TEMPERATURE = 0.7


def compared(
    config: ModelConfig,
    split: Split,
    positions: int = POSITIONS,
    prompt_tokens: int = PROMPT_TOKENS,
) -> dict[str, Any]:
    """Return the costs of prefill and the mean of the first steps, both ways; in mode "whole" the
    model samples on shares at a temperature, by the default variant. Progress is hidden.
    """
    lengths = prompt_tokens, NEW_TOKENS, positions - 1
    whole = Request(*lengths, TEMPERATURE)
    middle = MiddleRequest(*lengths, front=split.front, back=split.back, ends="")
    prices = Prices.load()

    def of(request: GenerationRequest) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for network in NETWORKS:
            options = Options(*lengths, network)
            works = of_completion(config, request, [options.shape], STEPS)
            for name, work in zip(("prefill", "step"), works, strict=True):
                figure = figures(work, options, prices)
                kept = result.setdefault(
                    name,
                    {
                        "messages": figure["messages"],
                        "rounds": figure["rounds"],
                        "bytes": figure["client_to_provider"] + figure["provider_to_client"],
                        "offline_bytes": round(both_ways(figure["offline"])),
                        "stored_bytes": figure["stored_bytes"],
                        "hint_bytes": figure["hint_bytes"],
                        "seconds": {},
                        "offline_seconds": {},
                    },
                )
                kept["seconds"][network] = figure["seconds"]
                kept["offline_seconds"][network] = figure["offline"]["seconds"]
        return result

    return {
        "model": config.asdict(),
        "split": list(split),
        "positions": positions,
        "prompt_tokens": prompt_tokens,
        "whole": of(whole),
        "middle": of(middle),
        "machine": machine().__dict__,
    }


def shares(result: dict[str, Any], of: str = "step") -> dict[str, float]:
    """Return the part that the middle takes of what the whole model takes: seconds, messages and
    bytes online, seconds on lan; correlated randomness in bytes that are stored, moved, and in
    seconds on lan.
    """
    whole, middle = result["whole"][of], result["middle"][of]
    return {
        "seconds": middle["seconds"]["lan"] / whole["seconds"]["lan"],
        "messages": middle["messages"] / whole["messages"],
        "bytes": middle["bytes"] / whole["bytes"],
        "stored": middle["stored_bytes"] / whole["stored_bytes"],
        "offline bytes": middle["offline_bytes"] / whole["offline_bytes"],
        "offline seconds": middle["offline_seconds"]["lan"] / whole["offline_seconds"]["lan"],
    }


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    heads = (
        "",
        "messages",
        "rounds",
        "kB online",
        *(f"s on {n}" for n in NETWORKS),
        "material, MB stored a party",
        "MB moved",
        "s on lan",
    )
    rows = []
    for of in ("prefill", "step"):
        size = result["prompt_tokens"] if of == "prefill" else result["positions"]
        for way in ("whole", "middle"):
            figures = result[way][of]
            name = "whole" if way == "whole" else "split {},{}".format(*result["split"])
            rows.append(
                (
                    f"{of} of {size}, {name}",
                    str(figures["messages"]),
                    str(figures["rounds"]),
                    f"{figures['bytes'] / 1e3:.0f}",
                    *(f"{figures['seconds'][n]:.2f}" for n in NETWORKS),
                    f"{figures['stored_bytes'] / 1e6:.1f}",
                    f"{figures['offline_bytes'] / 1e6:.1f}",
                    f"{figures['offline_seconds']['lan']:.1f}",
                )
            )
    return "\n".join(report.table(heads, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=shipped("private"))
    parser.add_argument("--split", default="1,1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    split = Split(*map(int, options.split.split(",")))
    result = compared(load_config(options.model), split)
    write_json(options.json, result)
    show_table(table(result))
    show(str(shares(result)))


if __name__ == "__main__":
    main()
