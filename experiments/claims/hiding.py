"""What it costs to hide progress: a whole text, hidden and shown, from the plans alone.

`python -m experiments.claims.hiding` prints the table. Bytes and messages online, and the material
that is demanded, are exact for steps of so many tokens (`experiments.cost_model.workload`); bytes
and seconds of the material and seconds online are estimates (`experiments.cost_model.estimate`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.common.measured import summed
from experiments.common.report import both_ways
from experiments.cost_model.estimate import Options, figures
from experiments.cost_model.prices import Prices
from experiments.cost_model.workload import of_steps
from models.family import ModelConfig
from models.hf import load_config
from spu_llm.app.defaults import shipped
from spu_llm.net.shaping import NETWORKS as SHAPES
from spu_llm.systems.decoding.request import Request

NETWORKS = ("local", "lan")


@dataclass(frozen=True)
class Cost:
    """Of a whole text: sums over the prefill and all steps. `seconds`: by network, online and
    offline.
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
        """What the table compares: messages and bytes, online, offline; seconds by network."""
        return [
            self.messages, self.offline_messages, self.online_bytes, self.offline_bytes,
            self.total_bytes, *map(self.total_seconds, NETWORKS),
        ]  # fmt: skip


def course(tokens: int, per_step: float, draft_length: int) -> list[int]:
    """Accepted drafts per step until `tokens` are there, the prefill's included: as even as can be,
    with so many tokens a step in the mean.
    """
    stays: list[int] = []
    while len(stays) + sum(stays) + 1 < tokens:
        i = len(stays)
        emitted = int((i + 1) * per_step) - int(i * per_step)
        stays.append(min(max(emitted - 1, 0), draft_length))
    return stays


def cost(config: ModelConfig, request: Request, accepted: Sequence[int], prices: Prices) -> Cost:
    """Of a text whose steps accept so many drafts."""
    works = of_steps(config, request, [SHAPES[name] for name in NETWORKS], accepted)
    spent = {}  # by network, online and offline
    for name in NETWORKS:
        options = Options(
            request.prompt_tokens, request.max_new_tokens, request.draft_length, name
        )
        played = f"seconds {options.shape.name}"
        steps = [
            figures(
                replace(w, counts=w.counts | {played: w.counts[f"seconds {name}"]}), options, prices
            )
            for w in works
        ]
        spent[name] = summed(steps), summed(step["offline"] for step in steps)
    online, offline = spent[NETWORKS[0]]
    written = request.prompt_tokens + (request.draft_length + 1) * len(accepted)
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


def table(
    config: ModelConfig, prompt_tokens: int, tokens: int, drafts: int, rates: Sequence[float]
) -> str:
    """Shown and hidden beside each other, as Markdown."""
    prices = Prices.load()
    lines = [
        f"{prompt_tokens} prompt tokens, {tokens} tokens, {drafts} drafts a step",
        "",
        "| tokens a step | progress | steps | rows in the end | messages online | offline "
        "| MB online | offline | in all | seconds local (lan), online | offline |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in rates:
        shown, hidden = (
            cost(
                config,
                Request(prompt_tokens, tokens, drafts, 0.7, show_progress=show),
                course(tokens, rate, drafts),
                prices,
            )
            for show in (True, False)
        )
        for name, c in (("shown", shown), ("hidden", hidden)):
            (online, offline), (online_lan, offline_lan) = (c.seconds[n] for n in NETWORKS)
            lines.append(
                f"| {rate:g} | {name} | {c.steps} | {c.rows} | {c.messages:,} | "
                f"{c.offline_messages:,} | "
                f"{c.online_bytes / 1e6:.1f} | {c.offline_bytes / 1e6:.0f} | "
                f"{c.total_bytes / 1e6:.0f} | {online:.0f} ({online_lan:.0f}) | "
                f"{offline:.0f} ({offline_lan:.0f}) |"
            )
        *counts, local, lan = (
            f"{100 * (b / a - 1):+.1f} %"
            for a, b in zip(shown.compared(), hidden.compared(), strict=True)
        )
        lines.append(
            f"| {rate:g} | more | | | {' | '.join(counts)} | in all: {local} local, {lan} lan | |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=shipped("private"), metavar="DIR")
    parser.add_argument("--prompt-tokens", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=7)
    parser.add_argument("--per-step", type=float, nargs="+", default=[2.5, 3.0, 3.5])
    o = parser.parse_args()
    config = load_config(o.model)
    print(table(config, o.prompt_tokens, o.tokens, o.draft_length, o.per_step))


if __name__ == "__main__":
    main()
