"""Benchmark of silent (PCG-style) products with weights (`spu_llm.offline.silent`): the cost of
hint, key and N positions, for each matrix.

Both parties are threads of this process on a channel in memory; seconds are the processor time of
each thread, which excludes the other party and Python's lock. Errors are the errors of `linear` at
its default lift, before its truncation, in units of 2^-18, against the exact integer product.
Weights are normal with standard deviation 1 / sqrt(inputs), so that columns have length one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands, report
from protocols.arithmetic.product import LIFT, masked_product
from spu_llm.app.printing import show_table
from spu_llm.core.channel import CountingChannel, MemoryChannel
from spu_llm.core.errors import InputError
from spu_llm.core.integers import factor_from
from spu_llm.core.machine import machine
from spu_llm.core.meter import Meter
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline.silent.products import SilentProducts, matrix_of
from spu_llm.offline.silent.ring import N

SHAPES = ((256, 256), (256, 768), (256, 1024), (1024, 256), (256, 4096), (768, 768), (768, 3072))
CHECKED = 16  # columns whose errors are looked at
LARGEST = 1 << 28  # entries of a matrix


def parse(text: str) -> list[tuple[int, int]]:
    """Parse "256x1024,768x768" as shapes; InputError for anything else."""
    try:
        shapes = [(int(a), int(b)) for a, b in (part.split("x") for part in text.split(","))]
        assert all(a > 0 and b > 0 and a * b <= LARGEST for a, b in shapes)
    except (ValueError, AssertionError):
        raise InputError(
            f"--shapes must be INPUTSxOUTPUTS,..., up to {LARGEST} entries each, found {text!r}"
        ) from None
    return shapes


def of_matrix(inputs: int, outputs: int) -> dict[str, Any]:
    """Measure one matrix: making its hint, then products of N positions under one key."""
    scale = 2.0 ** SpuConfig().frac_bits / np.sqrt(inputs)
    # Not a secret: a matrix to try.
    weights = np.rint(np.random.default_rng(0).normal(0.0, scale, (inputs, outputs)))
    correlation = masked_product("bench", inputs, outputs)
    channels = MemoryChannel.pair()
    parties = [
        SilentProducts(rank, Prg.from_os(), CountingChannel(channels[rank]), Meter())
        for rank in (CLIENT, PROVIDER)
    ]
    fixed = [None, factor_from(weights)]

    def both(work: Callable[[int], Any]) -> tuple[tuple[Any, ...], tuple[float, ...]]:
        """Run `work` at both parties at once; return the results and processor seconds of each."""

        def run(rank: int) -> tuple[Any, float]:
            started = time.thread_time()
            return work(rank), time.thread_time() - started

        with ThreadPoolExecutor(2) as threads:
            results, seconds = zip(*threads.map(run, (CLIENT, PROVIDER)), strict=True)
        return results, seconds

    _, once = both(lambda rank: parties[rank].set_up([(correlation, fixed[rank])]))
    made, each = both(lambda rank: parties[rank].take(correlation, N, fixed[rank]))
    words = made[CLIENT].results[0] + made[PROVIDER].results[0]
    columns = weights[:, :CHECKED].astype(np.int64).view(np.uint64)
    wanted = made[CLIENT].masks[0] @ columns
    errors = (words[:, :CHECKED] - wanted).view(np.int64) / 2.0 ** (SpuConfig().frac_bits + LIFT)
    return {
        "inputs": inputs,
        "outputs": outputs,
        "hint_bytes": matrix_of(correlation).hint_bytes,
        "hint_seconds": once[PROVIDER],
        "key_bytes": 8 * N,
        "positions": N,
        "client_seconds": each[CLIENT],
        "provider_seconds": each[PROVIDER],
        "rms_error": float(np.sqrt(np.mean(errors**2))),
        "largest_error": float(np.max(np.abs(errors))),
    }


def table(result: dict[str, Any]) -> str:
    """Format the figures as Markdown."""
    heads = (
        "matrix",
        "hint, MB",
        "seconds to make it",
        f"seconds of {N:,} positions: client",
        "provider",
        "ms a position, both",
        "error, rms",
        "largest",
    )
    rows = []
    for row in result["matrices"]:
        client, provider = row["client_seconds"], row["provider_seconds"]
        rows.append(
            [
                f"{row['inputs']} x {row['outputs']}",
                f"{row['hint_bytes'] / 1e6:.1f}",
                f"{row['hint_seconds']:.2f}",
                f"{client:.2f}",
                f"{provider:.2f}",
                f"{1e3 * (client + provider) / row['positions']:.3f}",
                f"{row['rms_error']:.2f}",
                f"{row['largest_error']:.1f}",
            ]
        )
    key = f"one key for all matrices: {8 * N / 1e3:.1f} kB for {N:,} positions"
    return "\n".join([*report.table(heads, rows), key])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        metavar="KxM,...",
        help="inputs and outputs (default: those of GPT-2's of width 256, 768)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    commands.add_debug(parser)


def command(options: argparse.Namespace) -> None:
    shapes = SHAPES if options.shapes is None else parse(options.shapes)
    commands.check_folders(options)
    matrices = [of_matrix(*shape) for shape in shapes]
    result = {"machine": asdict(machine()), "matrices": matrices}
    commands.write(options, result)
    show_table(table(result))
