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
from typing import Any

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
    found: dict[str, list[dict[str, Any]]] = {}
    for name in NETWORKS:
        options = Options(
            request.prompt_tokens, request.max_new_tokens, request.draft_length, name
        )
        played = f"seconds {options.shape.name}"
        found[name] = [
            figures(
                replace(w, counts=w.counts | {played: w.counts[f"seconds {name}"]}), options, prices
            )
            for w in works
        ]
    some = found[NETWORKS[0]]
    written = request.prompt_tokens + (request.draft_length + 1) * len(accepted)
    if not request.hide_progress:
        written = request.prompt_tokens + sum(accepted[:-1]) + len(accepted)
        written += request.draft_length
    rows = next((s for s in request.sizes(config) if s >= written), request.capacity(config))

    def both_ways(part: dict[str, Any]) -> float:
        return float(part["client_to_provider"] + part["provider_to_client"])

    return Cost(
        rows=rows,
        steps=len(accepted),
        messages=sum(s["messages"] for s in some),
        online_bytes=round(sum(map(both_ways, some))),
        offline_messages=round(sum(s["offline"]["messages"] for s in some)),
        offline_bytes=round(sum(both_ways(s["offline"]) for s in some)),
        seconds={
            name: (sum(s["seconds"] for s in steps), sum(s["offline"]["seconds"] for s in steps))
            for name, steps in found.items()
        },
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

        def more(of_hidden: float, of_shown: float) -> str:
            return f"{100 * (of_hidden / of_shown - 1):+.1f} %"

        seconds = ", ".join(
            f"{more(hidden.total_seconds(n), shown.total_seconds(n))} {n}" for n in NETWORKS
        )
        lines.append(
            f"| {rate:g} | more | | | {more(hidden.messages, shown.messages)} | "
            f"{more(hidden.offline_messages, shown.offline_messages)} | "
            f"{more(hidden.online_bytes, shown.online_bytes)} | "
            f"{more(hidden.offline_bytes, shown.offline_bytes)} | "
            f"{more(hidden.total_bytes, shown.total_bytes)} | in all: {seconds} | |"
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
