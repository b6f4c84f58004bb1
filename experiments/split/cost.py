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
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.report import Column, both_ways, rows_table
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
    columns: list[Column[tuple[str, dict[str, Any]]]] = [
        Column("", lambda of: of[0]),
        Column("messages", lambda of: str(of[1]["messages"])),
        Column("rounds", lambda of: str(of[1]["rounds"])),
        Column("kB online", lambda of: f"{of[1]['bytes'] / 1e3:.0f}"),
        *(Column(f"s on {n}", partial(_seconds, n)) for n in NETWORKS),
        Column("material, MB stored a party", lambda of: f"{of[1]['stored_bytes'] / 1e6:.1f}"),
        Column("MB moved", lambda of: f"{of[1]['offline_bytes'] / 1e6:.1f}"),
        Column("s on lan", lambda of: f"{of[1]['offline_seconds']['lan']:.1f}"),
    ]
    sizes = {"prefill": result["prompt_tokens"], "step": result["positions"]}
    names = {"whole": "whole", "middle": "split {},{}".format(*result["split"])}
    rows = (
        (f"{of} of {size}, {name}", result[way][of])
        for of, size in sizes.items()
        for way, name in names.items()
    )
    return "\n".join(rows_table(columns, rows))


def _seconds(network: str, row: tuple[str, dict[str, Any]]) -> str:
    return f"{row[1]['seconds'][network]:.2f}"


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
