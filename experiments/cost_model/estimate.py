"""What a completion would cost on other machines and networks, by a model of any shape.

Messages, rounds and online bytes are exact: they come from dry runs of the plan on shapes
(`experiments.cost_model.workload`). Correlated randomness ahead is exact units times prices,
computing a sum of rates (`experiments.cost_model.prices`). Online, a network takes what playing the
messages on it takes (`experiments.common.replay`): about rounds x delay + bytes / bandwidth.

Making correlated randomness takes its seconds, half a delay per message and the bytes of both
directions one after the other; the messages of an extension of SPU's stocks of transfers, whose
part the correlated randomness bears, wait for nothing. Each party computes on one core, so that
more than two cores between them change nothing, and one doubles what computing takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from experiments.common import commands, report
from experiments.common.measured import summed
from experiments.common.report import both_ways
from experiments.cost_model.prices import Prices
from experiments.cost_model.workload import Workload, of_completion
from models.family import ModelConfig, config_from
from models.hf import load_config
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.core.values import CLIENT
from spu_llm.net.shaping import NETWORKS, NetworkShape
from spu_llm.systems.decoding.request import Request

_CORES = 2  # that the prices' runs had between both parties, one for each


@dataclass(frozen=True)
class Options:
    """A greedy completion's public settings, the network, and the machine."""

    prompt_tokens: int
    new_tokens: int
    draft_length: int
    network: str = "local"
    bandwidth: float | None = None
    delay: float | None = None
    cores: int = _CORES
    steps: int = 1
    public_tokens: int = 0

    @property
    def request(self) -> Request:
        return Request(
            self.prompt_tokens,
            self.new_tokens,
            self.draft_length,
            temperature=0.0,
            public_prefix=(0,) * self.public_tokens,
        )

    @property
    def shape(self) -> NetworkShape:
        shape = NETWORKS[self.network]
        if self.bandwidth is not None:
            shape = replace(shape, bits_per_s=self.bandwidth * 1e6 or None)
        if self.delay is not None:
            shape = replace(shape, delay_s=self.delay / 1e3)
        return replace(shape, name="network")

    def check(self, config: ModelConfig) -> None:
        """Raise InputError for a completion that cannot be estimated."""
        commands.check_range("--public-tokens", self.public_tokens, 0)
        config.check_public(self.public_tokens, "give --public-tokens N")
        self.request.check(config)
        if self.bandwidth is not None and not 0 <= self.bandwidth <= 1e9:
            raise InputError(f"--bandwidth must be 0 to 1e9 Mbps, found {self.bandwidth}")
        if self.delay is not None and not 0 <= self.delay <= 1e6:
            raise InputError(f"--delay must be 0 to 1e6 ms, found {self.delay}")
        commands.check_range("--cores", self.cores, 1)
        most = max(1, (self.request.limit(config) - 1) // (self.draft_length + 1))
        if not 1 <= self.steps <= most:
            raise InputError(
                f"--steps must be 1 to {most} with so many new tokens, found {self.steps}"
            )


def estimate(model: Path, options: Options, *, growth: bool = False) -> dict[str, Any]:
    """Estimate the prefill and a decode step after it; return the figures as JSON fields. `model`:
    a directory with a `config.json`; weights are not read. `growth`: estimate also with the layers,
    the width, the prompt and the vocabulary doubled in turn.
    """
    config = load_config(model)
    options.check(config)
    prices = Prices.load()
    steps = _steps(config, options, prices)
    result: dict[str, Any] = {
        "model": config.asdict(),
        "options": asdict(options),
        "prefill": steps[0],
        "step": steps[1],
        "prices_of": prices.machine,
        "machine": asdict(machine()),
    }
    if growth:
        result["growth"] = _growth(config, options, prices, steps)
    return result


def _steps(config: ModelConfig, options: Options, prices: Prices) -> list[dict[str, Any]]:
    work = of_completion(config, options.request, [options.shape], options.steps)
    return [figures(w, options, prices) for w in work]


def figures(work: Workload, options: Options, prices: Prices) -> dict[str, Any]:
    """Return the figures of one step; its seconds also in parts: delay, transmission, compute."""
    shape, slower = options.shape, max(1.0, _CORES / options.cores)
    counts = work.counts
    network = counts[f"seconds {shape.name}"]
    delay = counts["rounds"] * shape.delay_s
    parts = {
        "delay": delay,
        "transmission": max(0.0, network - delay),
        "compute": slower * prices.computing(work),
    }
    material = prices.of_material(work)
    offline, extensions = summed(material.values()), prices.extensions(work)
    making = slower * offline["seconds"] + offline["messages"] / 2 * shape.delay_s
    if shape.bits_per_s:
        making += 8.0 / shape.bits_per_s * both_ways(offline)
    stored = [
        8 * kind.stored_words(CLIENT) * work.units[name]
        for name, kind in work.correlations.items()
        if kind.fixed is None
    ]
    whole = ("messages", "rounds", "client_to_provider", "provider_to_client", "hint_bytes")
    return {
        "seconds": sum(parts.values()),
        "seconds_of": parts,
        **{name: round(counts[name]) for name in whole},
        "bytes_of": {kind: round(n) for kind, n in work.bytes_of.items()},
        "offline": offline | {"seconds": making},
        "material": material,
        "extensions": extensions,
        "stored_bytes": round(sum(stored)),
    }


def _growth(
    config: ModelConfig, options: Options, prices: Prices, base: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the figures of the prefill and of a step for each variant, with one size doubled."""
    longer = 2 * options.prompt_tokens
    room = max(config.context, options.public_tokens + longer + options.new_tokens)
    variants = [
        ("layers", config.with_layers(2 * config.layers), options),
        ("width", config.widened(2), options),
        ("prompt", config.with_context(room), replace(options, prompt_tokens=longer)),
        ("vocabulary", replace(config, vocab_size=2 * config.vocab_size), options),
    ]
    rows = [("nothing", base)]
    rows += [(name, _steps(larger, asked, prices)) for name, larger, asked in variants]
    return [{"twice": name, "prefill": prefill, "step": step} for name, (prefill, step) in rows]


# ---- as text


def table(result: dict[str, Any]) -> str:
    """Format the estimate as Markdown."""
    model, options = config_from(result["model"]), result["options"]
    network = Options(**options).shape
    rate = f"{network.bits_per_s / 1e6:g} Mbps" if network.bits_per_s else "unlimited bandwidth"
    positions = options["draft_length"] + 1
    public = options["public_tokens"]
    after = f" after {public} in the clear" if public else ""
    names = ("prefill", "step")
    heads = "", "delay s", "transmission s", "compute s", "rounds", "stored MB per party"
    lines = [
        f"{model.layers} layers of width {model.width}, {model.vocab_size:,} tokens; "
        f"{rate}, {network.delay_s * 1e3:g} ms one way; {options['cores']} cores",
        "",
        *_costs(
            "",
            [
                (f"prefill of {options['prompt_tokens']}{after}", result["prefill"]),
                (f"step of {positions}", result["step"]),
            ],
        ),
        "",
        *report.table(
            heads,
            [
                (
                    name,
                    *(f"{seconds:.2f}" for seconds in result[name]["seconds_of"].values()),
                    str(result[name]["rounds"]),
                    f"{result[name]['stored_bytes'] / 1e6:.1f}",
                )
                for name in names
            ],
        ),
    ]
    if grown := result.get("growth"):
        for name in names:
            rows = [(row["twice"], row[name]) for row in grown]
            lines += ["", *_costs(f"{name}, twice", rows)]
    extended = ", ".join(f"{name} {result[name]['extensions']:.2f}" for name in names)
    lines += ["", f"extensions of random transfers, in offline figures: {extended}"]
    hint = max(result[name]["hint_bytes"] for name in names)
    lines += ["", f"hint of the weights, once for a client: {hint / 1e6:.0f} MB"]
    of = result["prices_of"]
    lines += ["", f"prices measured on: {of['processor']}, {of['cores']} cores"]
    return "\n".join(lines)


def _costs(first: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the lines of a table of steps with their names; `first`: the first column's head."""
    heads = first, "seconds", "MB", "messages", "offline seconds", "offline MB"
    return report.table(
        heads,
        [
            (
                name,
                f"{step['seconds']:.2f}",
                f"{both_ways(step) / 1e6:.2f}",
                str(step["messages"]),
                f"{step['offline']['seconds']:.1f}",
                f"{both_ways(step['offline']) / 1e6:.1f}",
            )
            for name, step in rows
        ],
    )


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Messages and online bytes are exact; correlated randomness and computing are priced as "
        "`experiment prices` measured them. Only the config.json of the model is read."
    )
    commands.add_number(parser, "--prompt-tokens", 64, "prefilled")
    commands.add_number(parser, "--public-tokens", 0, "before them, in the clear")
    commands.add_number(parser, "--new-tokens", 32, "that the cache has room for")
    commands.add_number(parser, "--draft-length", 7, "drafts per step, 0 to 16", "G")
    parser.add_argument(
        "--network", choices=tuple(NETWORKS), default="lan", help="default: %(default)s"
    )
    parser.add_argument("--bandwidth", type=float, metavar="MBPS", help="in its place")
    parser.add_argument("--delay", type=float, metavar="MS", help="one way, in its place")
    commands.add_number(parser, "--cores", _CORES, "of both parties together", "C")
    commands.add_number(parser, "--steps", 1, "the mean of the first K steps", "K")
    parser.add_argument(
        "--growth",
        action="store_true",
        help="also with layers, width, prompt and vocabulary doubled in turn",
    )
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    asked = Options(**{f.name: getattr(options, f.name) for f in fields(Options)})
    result = estimate(commands.private_model(options), asked, growth=options.growth)
    show_table(table(result))
    commands.write(options, result)
