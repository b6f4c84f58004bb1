"""What it costs to hide progress: a whole text, hidden and shown, from the plans alone.

`python -m experiments.completions.hiding --json FILE` writes the figures and prints the table.
Bytes and messages online, and the correlated randomness that is demanded, are exact for steps of so
many tokens (`experiments.cost_model.workload`); bytes and seconds of the correlated randomness and
seconds online are estimates (`experiments.cost_model.estimate`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.common.measured import summed
from experiments.common.report import both_ways
from experiments.cost_model.estimate import Options, figures
from experiments.cost_model.prices import Prices
from experiments.cost_model.workload import of_steps
from models.family import ModelConfig
from models.hf import load_config
from spu_llm.api.defaults import shipped
from spu_llm.app.output import write_json
from spu_llm.app.printing import show, show_table
from spu_llm.core.machine import machine
from spu_llm.net.shaping import NETWORKS as SHAPES
from spu_llm.systems.decoding.request import Request

NETWORKS = ("local", "lan")
PROMPT_TOKENS, DRAFTS = 6, 7
TEXTS = ((64, 2.5), (64, 3.0), (64, 3.5), (128, 3.0), (240, 3.0))  # tokens, and how many a step


@dataclass(frozen=True)
class Cost:
    """The cost of a whole text, summed over the prefill and all steps. `seconds`: by network,
    online and offline.
    """

    rows: int  # of the cache block in the end
    steps: int
    messages: int
    online_bytes: int
    offline_messages: int
    offline_bytes: int
    seconds: dict[str, tuple[float, float]]

    @property
    def total_bytes(self) -> int:
        return self.online_bytes + self.offline_bytes

    def total_seconds(self, network: str) -> float:
        return sum(self.seconds[network])

    def compared(self) -> list[float]:
        """Return what the table compares: messages and bytes, online, offline; seconds by
        network.
        """
        return [
            self.messages,
            self.offline_messages,
            self.online_bytes,
            self.offline_bytes,
            self.total_bytes,
            *map(self.total_seconds, NETWORKS),
        ]


def course(tokens: int, per_step: float, draft_length: int) -> list[int]:
    """Return the accepted drafts per step until `tokens` are there, the prefill's included: as even
    as can be, with so many tokens a step in the mean.
    """
    stays: list[int] = []
    while len(stays) + sum(stays) + 1 < tokens:
        i = len(stays)
        emitted = int((i + 1) * per_step) - int(i * per_step)
        stays.append(min(max(emitted - 1, 0), draft_length))
    return stays


def cost(config: ModelConfig, request: Request, accepted: Sequence[int], prices: Prices) -> Cost:
    """Return the cost of a text whose steps accept so many drafts."""
    works = of_steps(config, request, [SHAPES[name] for name in NETWORKS], accepted)
    spent = {}  # by network, online and offline
    for name in NETWORKS:
        options = Options(request.prompt_tokens, request.max_new_tokens, request.draft_length, name)
        played = f"seconds {options.shape.name}"
        steps = [
            figures(
                replace(w, counts=w.counts | {played: w.counts[f"seconds {name}"]}), options, prices
            )
            for w in works
        ]
        spent[name] = summed(steps), summed(step["offline"] for step in steps)
    online, offline = spent[NETWORKS[0]]
    written = request.prompt_tokens + request.step_rows * len(accepted)
    if not request.hide_progress:
        written = request.prompt_tokens + sum(accepted[:-1]) + len(accepted)
        written += request.draft_length
    rows = next((s for s in request.sizes(config) if s >= written), request.capacity(config))
    return Cost(
        rows=rows,
        steps=len(accepted),
        messages=online["messages"],
        online_bytes=round(both_ways(online)),
        offline_messages=round(offline["messages"]),
        offline_bytes=round(both_ways(offline)),
        seconds={name: (on["seconds"], off["seconds"]) for name, (on, off) in spent.items()},
    )


def both(
    config: ModelConfig, prompt_tokens: int, tokens: int, drafts: int, rate: float
) -> dict[str, Any]:
    """Return the costs of a text shown and hidden, as JSON fields."""
    prices, rows = Prices.load(), {}
    for name in ("shown", "hidden"):
        request = Request(prompt_tokens, tokens, drafts, 0.7, show_progress=name == "shown")
        rows[name] = asdict(cost(config, request, course(tokens, rate, drafts), prices))
    return {"tokens": tokens, "per_step": rate} | rows


def more(text: dict[str, Any]) -> list[float]:
    """Return what hiding adds, as a part of the shown text's: see `Cost.compared`."""
    shown, hidden = (Cost(**text[name]).compared() for name in ("shown", "hidden"))
    return [b / a - 1 for a, b in zip(shown, hidden, strict=True)]


def table(result: dict[str, Any]) -> str:
    """Return shown and hidden beside each other, as Markdown."""
    lines = [
        "| tokens | a step | progress | steps | rows in the end | messages online | offline ᵖ "
        "| MB online | offline ᵖ | in all ᵖ | seconds local (lan), online ᵖ | offline ᵖ |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for text in result["texts"]:
        begin = f"| {text['tokens']} | {text['per_step']:g} |"
        for name in ("shown", "hidden"):
            c = Cost(**text[name])
            (online, offline), (online_lan, offline_lan) = (c.seconds[n] for n in NETWORKS)
            lines.append(
                f"{begin} {name} | {c.steps} | {c.rows} | {c.messages:,} | "
                f"{c.offline_messages:,} | "
                f"{c.online_bytes / 1e6:.1f} | {c.offline_bytes / 1e6:.0f} | "
                f"{c.total_bytes / 1e6:.0f} | {online:.0f} ({online_lan:.0f}) | "
                f"{offline:.0f} ({offline_lan:.0f}) |"
            )
        *counts, local, lan = (f"{100 * part:+.1f} %" for part in more(text))
        lines.append(
            f"{begin} more | | | {' | '.join(counts)} | in all: {local} local, {lan} lan | |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=shipped("private"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    o = parser.parse_args()
    config, texts = load_config(o.model), []
    for tokens, rate in TEXTS:
        show(f"{tokens} tokens, {rate:g} a step")
        texts.append(both(config, PROMPT_TOKENS, tokens, DRAFTS, rate))
    result = {"machine": asdict(machine()), "texts": texts}
    write_json(o.json, result)
    show_table(table(result))


if __name__ == "__main__":
    main()
