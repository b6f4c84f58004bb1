"""What a split model asks of its client (the paper's Q11): memory and seconds of its part, beside
those of the whole model.

Three kinds of work: a text (a prompt, then tokens one by one), a round of tuning, and the draw of a
codebook. The client's part is front and back; the whole model is the same program with all blocks
in front. The middle is left out: rows come back as they went, since neither memory nor seconds
depend on their numbers. Each kind of work of each part has a process of its own, whose resident
memory is the kernel's count: the peak until it is ready, for which the client's program, too, loads
and folds the whole model, and the peak at work afterwards.

Seconds are those that processors spent on the process, all its threads together, so that what else
runs on the machine counts little: medians of short pieces of work, each repeated after one that
compiles.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import commands, report
from experiments.common.measured import forget_peak, resident
from experiments.common.report import Column
from experiments.common.saved import under_table
from models import split as parts
from models.family import ModelConfig, Params
from models.hf import load_config, load_model
from models.split import Split
from spu_llm.app.progress import Progress
from spu_llm.core.machine import machine
from spu_llm.core.prg import Prg
from spu_llm.systems.split import vocabulary
from spu_llm.systems.split.boundary import Boundary
from spu_llm.systems.split.ends import client_ends, table_of
from spu_llm.systems.split.generating import Cached
from spu_llm.systems.split.modes import EPSILON, FEATURES
from spu_llm.systems.split.tuning import HostHalf, Loopback, halves

PROMPT, TOKENS = 64, 16  # of a text
BATCH, LENGTH, LEARNING_RATE = 4, 64, 1e-3  # of a round of tuning
ENDS, WHOLE = "client's ends", "whole model"
TEXT, TUNING, CODEBOOK = "a text", "a round of tuning", "a codebook"
REPEAT = 5

Row = dict[str, Any]
Seconds = dict[str, list[float]]  # by kind of piece
Work = Callable[[], Seconds]  # measures each kind of piece once


# ---- the work of a part


def of_text(params: Params, config: ModelConfig, split: Split) -> Work:
    """Prepare texts by front and back with their caches, as the client's program has them."""
    front, back = client_ends(params, config, split)
    ends = [
        Cached(part, weights, config, layers, PROMPT + TOKENS)
        for part, weights, layers in (
            (parts.front, front, split.front),
            (parts.back, back, split.back),
        )
    ]

    def work() -> Seconds:
        for end in ends:
            end.begin()
        first = _seconds(lambda: ends[1](ends[0](np.arange(PROMPT, dtype=np.int32))))
        token = np.zeros(1, np.int32)
        each = [_seconds(lambda: ends[1](ends[0](token))) for _ in range(TOKENS)]
        return {"prompt": [first], "token": each}

    return work


def of_tuning(params: Params, config: ModelConfig, split: Split) -> Work:
    """Prepare rounds of tuning of front and back, with a codebook's relabelling, and Adam."""
    boundary = Boundary(config.width, "float32")
    client, _ = halves(
        params,
        config,
        split,
        codebook=None,
        labels=np.arange(config.vocab_size),
        boundary=boundary,
        learning_rate=LEARNING_RATE,
    )
    host = HostHalf(config, [], boundary, [], LEARNING_RATE)
    windows = np.resize(np.arange(config.vocab_size), (BATCH, LENGTH + 1))

    def work() -> Seconds:
        channel = Loopback(host.round(0, BATCH, LENGTH))
        return {"round": [_seconds(lambda: client.round(channel, boundary, 0, windows))]}

    return work


def of_codebook(params: Params, config: ModelConfig, split: Split) -> Work:
    """Prepare draws of a codebook at the paper's epsilon."""
    table, prg = table_of(params, config), Prg.from_seed(0, "split client")
    epsilon = EPSILON / FEATURES * config.width

    def work() -> Seconds:
        draw = partial(vocabulary.draw_codebook, table, vocabulary.DEFAULT, epsilon, prg)
        return {"codebook": [_seconds(draw)]}

    return work


WORKS: Mapping[str, Callable[[Params, ModelConfig, Split], Work]] = {
    TEXT: of_text,
    TUNING: of_tuning,
    CODEBOOK: of_codebook,
}


def _seconds(piece: Callable[[], Any]) -> float:
    started = time.process_time()
    piece()
    return time.process_time() - started


def measured(model: Path, kind: str, split: Split, repeat: int) -> Row:
    """Measure one kind of work in this process, which has done nothing before."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.zeros(1, np.float32)))
    base = resident("VmRSS")
    config, params = load_model(model)
    work = WORKS[kind](params, config, split)
    del params
    work()  # compiles
    gc.collect()
    ready = resident("VmHWM")
    forget_peak()
    pieces: dict[str, list[float]] = {}
    for _ in range(repeat):
        for name, seconds in work().items():
            pieces.setdefault(name, []).extend(seconds)
    return {"base": base, "ready": ready, "working": resident("VmHWM"), "seconds": pieces}


def apart(model: Path, kind: str, split: Split, repeat: int) -> Row:
    """Return what `measured` does in a process of its own."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(measured, model, kind, split, repeat).result()


# ---- all of it


def cells(config: ModelConfig, split: Split) -> Iterator[tuple[str, str, Split]]:
    """Yield each kind of work, the part that does it, and how that part is split."""
    for kind in (TEXT, TUNING):
        yield from ((kind, ENDS, split), (kind, WHOLE, Split(config.layers, 0)))
    yield CODEBOOK, ENDS, split


def measure(model: Path, split: Split, repeat: int, say: Callable[[str], None]) -> Row:
    """Measure all cells of a model, one after the other."""
    config, rows = load_config(model), []
    split.check(config)
    for kind, part, of_part in cells(config, split):
        say(f"{kind}, {part}")
        rows.append({"kind": kind, "part": part, **apart(model, kind, of_part, repeat)})
    return {
        "model": model.name,
        "blocks": config.layers,
        "split": list(split),
        "repeat": repeat,
        "rows": rows,
        "machine": asdict(machine()),
    }


# ---- the report


def _pieces(row: Row) -> str:
    """Write the median of each kind of piece, with its first and third quartiles."""
    texts = []
    for name, seconds in row["seconds"].items():
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        quartiles = f"{report.duration_text(low)} to {report.duration_text(high)}"
        median = report.duration_text(statistics.median(seconds))
        texts.append(f"{name} {median} ({quartiles})")
    return ", ".join(texts)


_COLUMNS: Sequence[Column[Row]] = (
    Column("work", lambda row: row["kind"]),
    Column("of", lambda row: row["part"]),
    Column("Python and JAX alone", lambda row: report.bytes_text(row["base"])),
    Column("peak until ready", lambda row: report.bytes_text(row["ready"])),
    Column("peak at work", lambda row: report.bytes_text(row["working"])),
    Column("processor seconds: median and quartiles", _pieces),
)


def circumstances(result: Row) -> str:
    """Say what the rows are of."""
    front, back = result["split"]
    return (
        f"{result['model']}: {front} + {back} of {result['blocks']} blocks at the client. A text "
        f"is a prompt of {PROMPT} tokens and {TOKENS} tokens after it; a round of tuning has "
        f"{BATCH} texts of {LENGTH} tokens. Each is done {result['repeat']} times. Seconds are the "
        "processors', not the clock's."
    )


def table(result: Row) -> str:
    """Return the whole result as Markdown."""
    return "\n".join([circumstances(result), "", *report.rows_table(_COLUMNS, result["rows"])])


def in_results(files: report.Files) -> list[str]:
    """Return the results of all models as paragraphs of their page in docs/results."""
    paragraphs = []
    for name, data in files.items():
        load = "load {:.1f} before, {:.1f} at the end".format(*data["machine"]["load"])
        rows = "\n".join(report.rows_table(_COLUMNS, data["rows"]))
        origin = under_table((name,), [data["machine"]], load)
        paragraphs += [circumstances(data), rows, origin]
    return paragraphs


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "A few minutes; the whole model is tuned, too, which takes its memory."
    parser.add_argument(
        "--split",
        default="1,1",
        metavar="F,B",
        help="blocks of the client's front and back (default: %(default)s)",
    )
    commands.add_number(parser, "--repeat", REPEAT, "of each piece of work")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--repeat", options.repeat, 2)
    model, split = commands.private_model(options), Split.parse(options.split)
    progress = Progress()
    try:
        result = measure(model, split, options.repeat, progress.update)
    finally:
        progress.close()
    commands.conclude(options, result, table(result))
