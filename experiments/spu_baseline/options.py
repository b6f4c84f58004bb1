"""Effect of tuning on the stock path: bytes and messages of a step under SPU's options.

Every kind of layer of the stock path (`experiments.spu_baseline.layers`) runs alone on one
position, both parties as threads of this process: bytes and messages depend neither on the machine
nor on its load. A step is the sum over its layers.

    PUMA's softmax   exponentials are zero from -14 down, however extreme the mask's scores are
    PUMA's GELU      three comparisons, polynomials of degree 3 and 6
                     (both: Dong et al., "PUMA", 2023, section 4, as in SPU's example for it)
    rsqrt            a rougher first guess, and fewer steps after it
    no split         a product of matrices is not split over the cores
    concurrency      work on more than 2,048 elements is split in four
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.common import commands, report
from experiments.spu_baseline import layers as spu_layers
from models.hf import load_config
from spu_llm.app.printing import show_table
from spu_llm.core.machine import machine
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import CLIENT
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.program import Job, Nothing

CAPACITY = 64  # positions of the cache
_FIGURES = ("bytes", "messages")


# ---- PUMA's functions


def puma_softmax(x: Array, axis: int = -1) -> Array:
    """Compute PUMA's softmax: exp(x - max) / sum, with zero where x - max is -14 or less."""
    x = x - jnp.max(x, axis, keepdims=True)
    weights = jnp.exp(x) * (x > -14)
    return weights / jnp.sum(weights, axis, keepdims=True)


def puma_gelu(x: Array) -> Array:
    """Compute PUMA's GELU: 0 below -4, one polynomial up to -1.95, another up to 3, x above."""
    far, near, large = x < -4.0, x < -1.95, x > 3.0
    x2 = jnp.square(x)
    x3, x4 = x * x2, jnp.square(x2)
    x6 = jnp.square(x3)
    left = -0.011034134030615728 * x3 - 0.11807612951181953 * x2
    left = left - 0.42226581151983866 * x - 0.5054031199708174
    middle = 0.0018067462606141187 * x6 - 0.037688200365904236 * x4
    middle = middle + 0.3603292692789629 * x2 + 0.5 * x + 0.008526321541038084
    return large * x + (far ^ near) * left + (near ^ large ^ True) * middle


# ---- options


@dataclass(frozen=True)
class Tuned(SpuConfig):
    """Settings of the stock path, with more of SPU's own options."""

    exp_mode: str = "EXP_PADE"
    ot_kind: str = "EMP_Ferret"
    lower_accuracy_rsqrt: bool = False
    disable_mmul_split: bool = False

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "enable_lower_accuracy_rsqrt": self.lower_accuracy_rsqrt,
            "experimental_disable_mmul_split": self.disable_mmul_split,
        }


@dataclass(frozen=True)
class Option:
    name: str
    config: Tuned = Tuned()
    softmax: Callable[..., Array] | None = None
    gelu: Callable[..., Array] | None = None


OPTIONS = (
    Option("as measured elsewhere"),
    Option("PUMA's softmax", softmax=puma_softmax),
    Option("PUMA's GELU", gelu=puma_gelu),
    Option("lower-accuracy rsqrt", Tuned(lower_accuracy_rsqrt=True)),
    Option("no split of matrix products", Tuned(disable_mmul_split=True)),
    Option("concurrency 4", Tuned(max_concurrency=4)),
    Option(
        "PUMA's functions and lower-accuracy rsqrt",
        Tuned(lower_accuracy_rsqrt=True),
        puma_softmax,
        puma_gelu,
    ),
)


@contextmanager
def _functions(option: Option) -> Iterator[None]:
    """Replace the softmax and GELU that Flax uses by the option's, while the context is open."""
    from transformers.models.gpt2.modeling_flax_gpt2 import ACT2FN

    softmax, gelu = jax.nn.softmax, ACT2FN["gelu_new"]
    jax.nn.softmax = option.softmax or softmax  # type: ignore[assignment]
    ACT2FN["gelu_new"] = option.gelu or gelu
    try:
        yield
    finally:
        jax.nn.softmax, ACT2FN["gelu_new"] = softmax, gelu


def measure(
    model: Path, options: tuple[Option, ...] = OPTIONS, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure every option on the shape of `model`; return JSON fields. The others are compared
    with the first option.
    """
    config = load_config(model)
    job: Job[spu_layers.LayersRequest, Nothing] = Job(
        spu_layers.LayersRequest((1,), CAPACITY), config
    )
    rows = []
    for option in options:
        say(f"{option.name} ...")
        with _functions(option), Simulation(option.config) as simulation:
            made = simulation.run(
                lambda session: spu_layers.run(session, job, lambda event, **fields: None)
            )[CLIENT]
        kinds = {}
        for layer in made["steps"][0]["layers"]:
            cost = spu_layers.scaled(layer)
            kinds[layer["kind"]] = {"bytes": report.both_ways(cost), "messages": cost["messages"]}
        rows.append(
            {
                "name": option.name,
                "settings": asdict(option.config),
                **{figure: sum(cost[figure] for cost in kinds.values()) for figure in _FIGURES},
                "kinds": kinds,
            }
        )
    return {
        "machine": asdict(machine()),
        "model": config.asdict(),
        "positions": 1,
        "capacity": CAPACITY,
        "options": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Format bytes and messages of a step under each option, and their relative change."""
    first, rows = result["options"][0], []
    for row in result["options"]:
        moved = [
            f"{round(row[k] / first[k] - 1, 3) + 0.0:+.1%}" if row is not first else ""
            for k in _FIGURES
        ]
        size, messages = f"{row['bytes'] / 1e6:.1f}", f"{row['messages']:,}"
        rows.append([row["name"], size, moved[0], messages, moved[1]])
    return "\n".join(
        [
            f"the stock path's step of one position, {result['model']['n_layer']} layers of width "
            f"{result['model']['n_embd']}, cache of {result['capacity']} positions",
            "",
            *report.table(("option", "MB", "", "messages", ""), rows),
        ]
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    result = measure(commands.private_model(options))
    show_table(table(result))
    commands.write(options, result)
