"""What confidential prompting costs: figures 8 to 12 and 14 of "Confidential Prompting" (Gim, Li,
Zhong), on this machine, and the two-party mode beside it.

Systems (`experiments.confidential.systems`) run as processes on one machine, with the same
arithmetic; they differ in who holds what. *vault + obfuscation* is the vault with LAMBDA more
prompts of the same length for each user: what they say does not change the cost. Every text is
compared with that of one engine that has all prompts.

Parts:

    users      latency and throughput against users, and what the engine's steps are spent on
    sizes      against the model: the shipped one, and `LARGER` with random weights
    lengths    against input and output length, one user
    lambda     against the number of fake prompts, one user
    memory     of all processes together, when the prompts of 8 users are prefilled
    two-party  the same task by `spu-llm demo`, with and without drafts, one user
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import commands
from experiments.common.load import busy_seconds, own_seconds, seconds_of
from experiments.confidential.inputs import AT_ONCE, Texts, larger_model
from experiments.confidential.systems import (
    SYSTEMS,
    System,
    resident,
    started,
    summed,
    timed,
    warm_up,
)
from models.family import ModelConfig, weight_shapes
from models.hf import load_config
from models.tokenizer import Tokenizer
from spu_llm.app.printing import show_table
from spu_llm.app.progress import Progress
from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.core.machine import machine
from spu_llm.service.supervisor import python_command
from spu_llm.vault.told import MAX_LANES

LAMBDA = 8  # fake prompts beside each authentic one
OBFUSCATED = "vault + obfuscation"
ALL = (*SYSTEMS, OBFUSCATED)
PARTS = ("users", "sizes", "lengths", "lambda", "memory", "two-party")
LARGER = (12, 768, 12)  # layers, width, heads: GPT-2 small's blocks


@dataclass(frozen=True)
class ConfidentialPlan:
    """The study's settings. users: numbers of them, rising; at: the number for sizes and memory."""

    users: Sequence[int] = (1, 2, 4, 8, 16)
    at: int = 8
    lengths: tuple[int, int] = (64, 32)  # input, output where neither is varied
    inputs: Sequence[int] = (16, 64, 128)
    outputs: Sequence[int] = (16, 64)
    lambdas: Sequence[int] = (0, 8, 64, 128)
    repeat: int = 5
    larger: tuple[int, int, int] = LARGER


@dataclass(frozen=True)
class ConfidentialCell:
    """A measurement, compared by `system` when all else is equal. fakes: beside each user's
    prompt.
    """

    part: str
    model: str
    system: str
    users: int
    input: int
    output: int
    fakes: int

    @property
    def process(self) -> str:
        """Return which of `SYSTEMS` the cell runs on."""
        return "vault" if self.system == OBFUSCATED else self.system


def check(model: Path, plan: ConfidentialPlan) -> None:
    """Raise InputError for what cannot be measured."""
    commands.check_range("--repeat", plan.repeat, 1)
    for n in plan.users:
        commands.check_range("--users", n, 1, MAX_LANES // (LAMBDA + 1))
    longest = max(sum(plan.lengths), max(plan.inputs) + max(plan.outputs))
    if (context := load_config(model).context) < longest:
        raise InputError(
            f"--model: a context of {context} is too short, {longest} tokens are measured"
        )


def cells_of(
    part: str, plan: ConfidentialPlan, models: Sequence[str]
) -> list[list[ConfidentialCell]]:
    """Return groups of cells that are measured in turns. models: names, the shipped one's first."""

    def group(model: str, users: int, length: tuple[int, int]) -> list[ConfidentialCell]:
        return [
            ConfidentialCell(part, model, name, users, *length, LAMBDA if name == OBFUSCATED else 0)
            for name in ALL
        ]

    first = models[0]
    if part == "users":
        return [group(first, n, plan.lengths) for n in plan.users]
    if part == "sizes":
        return [group(model, plan.at, plan.lengths) for model in models]
    if part == "lengths":
        return [group(first, 1, (i, o)) for o in plan.outputs for i in plan.inputs]
    if part == "lambda":
        return [[ConfidentialCell(part, first, "vault", 1, *plan.lengths, n) for n in plan.lambdas]]
    return []


# ---- one run


def measure(cell: ConfidentialCell, system: System, texts: Texts, turn: int) -> dict[str, Any]:
    """Make a run; return its record."""
    prompts = prompts_of(cell, texts)
    wanted = dict(
        (tuple(row), text)
        for row, text in texts.get(cell.users * (cell.fakes + 1), cell.input, cell.output)
    )
    processes = system.processes(cell.users).values()
    pids = [os.getpid(), *(p.pid for group in processes for p in group)]
    started, before = time.perf_counter(), busy_seconds() - seconds_of(pids)
    run = timed(system, prompts, cell.output)
    others = busy_seconds() - seconds_of(pids) - before
    elapsed = time.perf_counter() - started
    wrong = sum(
        text != wanted[tuple(row)]
        for written, rows in zip(run.texts, prompts, strict=True)
        for text, row in zip(written, rows, strict=True)
    )
    failures = [f"{cell.system}, {cell.users} users: {wrong} texts differ"] if wrong else []
    return {
        **asdict(cell),
        "turn": turn,
        "first": run.first,
        "token": run.token,
        "whole": run.whole,
        "spent": system.spent(),
        "others": max(0.0, others) / elapsed,
        "failures": failures,
    }


def prompts_of(cell: ConfidentialCell, texts: Texts) -> list[list[list[int]]]:
    """Return the prompts of a cell's users, fakes included, by user."""
    mine = cell.fakes + 1
    rows = [row for row, _ in texts.get(cell.users * mine, cell.input, cell.output)]
    return [rows[i * mine : (i + 1) * mine] for i in range(cell.users)]


def compare(
    cells: Sequence[ConfidentialCell],
    systems: dict[str, System],
    texts: Texts,
    repeat: int,
    show: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Yield runs of all cells in turns, whoever is first changing, when all has been compiled. Of a
    run that broke off there is only its `error`: a slow machine may exceed what a vault waits.
    """
    for cell in cells:
        show(f"{cell.part}, {cell.model}, {cell.system}, {cell.users} users: compiling")
        warm_up(systems[cell.process], prompts_of(cell, texts))
    for turn in range(repeat):
        shift = turn % len(cells)
        for cell in (*cells[shift:], *cells[:shift]):
            show(f"{cell.part}, {cell.model}, {cell.system}, {cell.users} users, turn {turn + 1}")
            try:
                yield measure(cell, systems[cell.process], texts, turn)
            except SpuLlmError as exc:
                yield {**asdict(cell), "turn": turn, "error": str(exc)}


# ---- memory, and two parties


def memory(
    model: Path, name: str, system: str, plan: ConfidentialPlan, texts: Texts
) -> dict[str, Any]:
    """Return the bytes of all processes of one system, which is the only one that runs, by role and
    as the kernel counts them; and `needed`: weights, and keys and values of prompts.
    """
    (length, new), users = plan.lengths, plan.at
    fakes = LAMBDA if system == OBFUSCATED else 0
    cell = ConfidentialCell("memory", name, system, users, length, new, fakes)
    grown: dict[str, Any] = {}
    mine = fakes + 1
    with started([cell.process], model, users, users * mine) as (there,):
        prompts = prompts_of(cell, texts)

        def look() -> None:
            for role, processes in there.processes(users).items():
                grown[role] = summed([resident(p.pid) for p in processes])

        warm_up(there, prompts)
        timed(there, prompts, 3, look)
    config = load_config(model)
    copies = users if system == "full isolation" else 1
    return {
        **asdict(cell),
        "roles": grown,
        "needed": {
            "weights": copies * weight_bytes(config),
            "rows": users * mine * length * row_bytes(config),
        },
    }


def weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of folded weights, float32."""
    return sum(4 * int(np.prod(w.shape)) for w in jax.tree.leaves(weight_shapes(config)))


def row_bytes(config: ModelConfig) -> int:
    """Return the bytes of a token's keys and values in all layers, float32."""
    return 2 * 4 * config.layers * config.kv_heads * config.head_dim


def two_party(
    texts: Texts, model: Path, draft_model: Path, plan: ConfidentialPlan, *, drafted: bool
) -> dict[str, Any]:
    """Run one user's completion by `spu-llm demo`; return what its JSON says of seconds, and how
    many tokens are the reference's until one is not.
    """
    length, new = plan.lengths
    tokenizer = Tokenizer.load(model)
    row, wanted = next(
        (row, text)
        for row, text in texts.get(AT_ONCE, length, new)
        if list(tokenizer.encode(tokenizer.decode(row))) == row
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [
            *python_command("spu_llm.app.cli"),
            "demo",
            "--model",
            str(model),
            "--draft-model",
            str(draft_model),
            "--prompt",
            tokenizer.decode(row),
            "--temperature",
            "0",
            "--max-new-tokens",
            str(new),
            "--json",
            str(file),
            *([] if drafted else ["--standard"]),
        ]
        busy, own, begun = busy_seconds(), own_seconds(), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SpuLlmError(f"demo failed: {' '.join(done.stderr.splitlines()[-1:])}")
        others = busy_seconds() - busy - (own_seconds() - own)
        elapsed = time.perf_counter() - begun
        result = json.loads(file.read_text(encoding="utf-8"))
    tokens = result["token_ids"]
    return {
        "part": "two-party",
        "drafted": drafted,
        "input": length,
        "output": len(tokens),
        "same": len(os.path.commonprefix([tokens, wanted])),
        "others": max(0.0, others) / elapsed,
        **{k: result[k] for k in ("seconds", "first_token_seconds", "elapsed_seconds", "steps")},
    }


# ---- the command


def study(
    parts: Sequence[str],
    model: Path,
    draft_model: Path,
    plan: ConfidentialPlan,
    show: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure all parts; return the result as JSON fields. `keep` is given it after each group of
    cells.
    """
    result: dict[str, Any] = {"plan": asdict(plan), "runs": [], "broken": []}
    result |= {"memory": [], "two-party": []}

    def kept() -> None:
        failures = [text for run in result["runs"] for text in run["failures"]]
        failures += [
            f"{run['system']}, {run['users']} users: {run['error']}" for run in result["broken"]
        ]
        result.update(failures=failures, machine=asdict(machine()))
        keep(result)

    with larger_model(model, plan.larger) as larger:
        folders = {"shipped": model, "larger": larger}
        result["models"] = {name: _described(folder) for name, folder in folders.items()}
        known: dict[str, Texts] = {}

        def texts_of(name: str) -> Texts:
            if name not in known:
                known[name] = Texts(folders[name])
            return known[name]

        def compared(part: str, name: str, groups: list[list[ConfidentialCell]]) -> None:
            show(f"{part}, {name}: starting processes")
            cells = [cell for group in groups for cell in group]
            used = {cell.process for cell in cells}
            users = max(cell.users for cell in cells)
            lanes = max(cell.users * (cell.fakes + 1) for cell in cells)
            names = [system for system in SYSTEMS if system in used]
            with started(names, folders[name], users, lanes) as systems:
                of = {system.name: system for system in systems}
                for group in groups:
                    for run in compare(group, of, texts_of(name), plan.repeat, show):
                        result["broken" if "error" in run else "runs"].append(run)
                    kept()

        for part in parts:
            cells = cells_of(part, plan, list(folders))
            for name in folders:
                if groups := [group for group in cells if group[0].model == name]:
                    compared(part, name, groups)
            for name, system in itertools.product(folders, ALL if part == "memory" else ()):
                show(f"memory, {name}, {system}")
                result["memory"].append(memory(folders[name], name, system, plan, texts_of(name)))
                kept()
            for drafted in (False, True) if part == "two-party" else ():
                show(f"two-party, {'drafted' if drafted else 'standard'}")
                result["two-party"].append(
                    two_party(texts_of("shipped"), model, draft_model, plan, drafted=drafted)
                )
                kept()
    return result


def _described(model: Path) -> dict[str, Any]:
    config = load_config(model)
    return {
        "layers": config.layers,
        "width": config.width,
        "weights": weight_bytes(config),
        "row": row_bytes(config),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts",
        type=commands.names,
        default=list(PARTS),
        metavar="NAME,...",
        help=f"{', '.join(PARTS)} (default: all)",
    )
    parser.add_argument(
        "--users",
        type=commands.numbers,
        default=list(ConfidentialPlan.users),
        metavar="N,...",
        help="at a time (default: 1,2,4,8,16)",
    )
    commands.add_number(parser, "--repeat", ConfidentialPlan.repeat, "runs of each, in turns")
    commands.add_draft_model(parser)
    commands.add_plot(parser, "draw all figures into a file")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    from experiments.confidential import report

    commands.check_folders(options)
    if unknown := set(options.parts) - set(PARTS):
        raise InputError(f"--parts: there is no {min(unknown)!r}; choose from {', '.join(PARTS)}")
    pair = commands.pair(options)
    plan = ConfidentialPlan(users=sorted(set(options.users)), repeat=options.repeat)
    check(pair[0], plan)
    progress = Progress()
    try:
        result = study(
            options.parts,
            *pair,
            plan,
            progress.stage,
            lambda partial: commands.write(options, partial),
        )
    finally:
        progress.close()
    show_table(report.table(result))
    if options.plot is not None:
        report.plot(result, options.plot)
    commands.check([result], "texts differ between systems, or runs broke off")
