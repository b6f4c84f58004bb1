"""What a token of a split model costs, by mode, beside full two-party decoding.

Complete runs by the command line, as a user starts them: two processes, `spu-llm split serve` and
`split generate` (modes plain, noir, mpc), and `demo` (full: every block, look-up, head and
verification on shares). All of the shipped private model, greedy, of prompts that the complete
generations have. Modes take turns, so that a machine that gets slower does so for all.

Noir's secrets, a codebook and ends tuned for one round, are made before: tuning changes no cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.common import commands, report
from experiments.common.load import busy_seconds, own_seconds
from experiments.common.prompts import Prompt, read_prompts
from experiments.common.report import Column
from experiments.common.saved import under_table
from experiments.common.two_parties import run_command
from spu_llm.app.printing import show_table
from spu_llm.app.progress import Progress
from spu_llm.core.errors import SpuLlmError
from spu_llm.core.machine import machine
from spu_llm.service.launching import network_options, own_provider
from spu_llm.service.supervisor import python_command

MODES = ("full", "mpc", "noir", "plain")
SPLIT = "1,1"

Run = dict[str, Any]


# ---- one run


@contextmanager
def _middle(mode: str, model: Path, network: str) -> Iterator[str]:
    """Start a provider of the middle for one session; yield where it listens."""
    command = [
        *python_command("spu_llm.app.cli"),
        "split",
        "serve",
        "--mode",
        mode,
        "--split",
        SPLIT,
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        "--insecure",
        *network_options(network),
        "--once",
        "--exit-with-parent",
    ]
    with own_provider(command, network) as server:
        yield f"{server.host}:{server.port}"


def one(
    mode: str, network: str, prompt: Prompt, tokens: int, model: Path, draft: Path, folder: Path
) -> Run:
    """Make a complete run; return its record, with how busy others kept the machine meanwhile."""
    of_text = [
        "--prompt",
        prompt.text,
        "--max-new-tokens",
        str(tokens),
        "--temperature",
        "0",
        *network_options(network),
    ]
    json_file = folder / "run.json"
    busy, own, started = busy_seconds(), own_seconds(), time.perf_counter()
    if mode == "full":
        arguments = ["demo", *of_text, "--model", str(model), "--draft-model", str(draft)]
        result = run_command(arguments, json_file)
    else:
        with _middle(mode, model, network) as server:
            arguments = [
                "split",
                "generate",
                "--mode",
                mode,
                "--split",
                SPLIT,
                "--model",
                str(model),
                "--server",
                server,
                "--insecure",
                *of_text,
            ]
            arguments += ["--draft-model", str(draft)] if mode == "mpc" else []
            arguments += ["--secrets", str(folder / "secrets")] if mode == "noir" else []
            result = run_command(arguments, json_file)
    elapsed = time.perf_counter() - started
    others = busy_seconds() - busy - (own_seconds() - own)
    return {
        "mode": mode,
        "network": network,
        "prompt": prompt.kind,
        "elapsed": elapsed,
        "others": max(0.0, others) / elapsed,
        "tokens": len(result["token_ids"]),
        **{name: result[name] for name in ("steps", "seconds", "bytes", "messages", "learned")},
    }


def measure(
    options: argparse.Namespace, say: Callable[[str], None], keep: Callable[[Run], None]
) -> Run:
    """Make all runs; `keep` is given the result so far after each."""
    model, draft = commands.pair(options)
    prompts = read_prompts()[: options.prompts]
    result: Run = {"runs": [], "plan": {"tokens": options.tokens, "prompts": options.prompts}}
    with tempfile.TemporaryDirectory() as folder:
        if "noir" in options.modes:
            say("making secrets")
            _secrets(model, Path(folder))
        for network in options.network:
            for turn, prompt in enumerate(prompts):
                shift = turn % len(options.modes)
                for mode in (*options.modes[shift:], *options.modes[:shift]):
                    say(f"{network}, {prompt.kind}, {mode}")
                    result["runs"].append(
                        one(mode, network, prompt, options.tokens, model, draft, Path(folder))
                    )
                    result["machine"] = asdict(machine())
                    keep(result)
    return result


def _secrets(model: Path, folder: Path) -> None:
    """Make noir's secrets: a codebook, and ends tuned for one round."""
    with _middle("noir", model, "local") as server:
        text = folder / "text.jsonl"
        text.write_text(json.dumps({"text": "import os\n" * 40}) + "\n", encoding="utf-8")
        arguments = [
            "split",
            "tune",
            "--mode",
            "noir",
            "--split",
            SPLIT,
            "--model",
            str(model),
            "--server",
            server,
            "--insecure",
            "--texts",
            str(text),
            "--rounds",
            "1",
            "--secrets",
            str(folder / "secrets"),
        ]
        done = subprocess.run(
            [*python_command("spu_llm.app.cli"), *arguments], capture_output=True, text=True
        )
    if done.returncode:
        raise SpuLlmError(f"split tune ended with {done.returncode}: {done.stderr[-300:]}")


# ---- the report


def online(run: Run) -> float:
    """Return the seconds for each token, online."""
    return float((run["seconds"]["prefill"] + run["seconds"]["decode"]) / run["tokens"])


def bytes_ahead(run: Run) -> float:
    """Return the bytes for each token, made ahead."""
    return float(report.both_ways(run["bytes"]["offline"]) / run["tokens"])


def _median(
    head: str, figure: Callable[[Run], float], text: Callable[[float], str]
) -> Column[list[Run]]:
    """Return a column of a figure's median over runs."""
    return Column(head, lambda runs: text(statistics.median(map(figure, runs))))


def _online(runs: list[Run]) -> str:
    """Write the median, the smallest and the largest of the seconds for each token, online."""
    seconds = sorted(map(online, runs))
    median = report.duration_text(statistics.median(seconds))
    return f"{median} ({report.three(seconds[0])} to {report.three(seconds[-1])})"


_COLUMNS: Sequence[Column[list[Run]]] = (
    Column("a token of", lambda runs: f"{runs[0]['network']}, {runs[0]['mode']}"),
    Column("runs", lambda runs: str(len(runs))),
    Column("online", _online),
    _median(
        "waited for material", lambda r: r["seconds"]["offline"] / r["tokens"], report.duration_text
    ),
    _median(
        "bytes online",
        lambda r: report.both_ways(r["bytes"]["online"]) / r["tokens"],
        report.bytes_text,
    ),
    _median("bytes ahead", bytes_ahead, report.bytes_text),
    _median("messages online", lambda r: r["messages"]["online"] / r["tokens"], report.three),
    _median("tokens a round", lambda r: r["tokens"] / (r["steps"] + 1), report.three),
)


def _of(result: Run, network: str, mode: str) -> list[Run]:
    return [r for r in result["runs"] if (r["network"], r["mode"]) == (network, mode)]


def rows(result: Run) -> list[str]:
    """Return a table of the medians of a token, by network and mode."""
    networks = dict.fromkeys(r["network"] for r in result["runs"])
    of_modes = (_of(result, network, mode) for network in networks for mode in MODES)
    return report.rows_table(_COLUMNS, (runs for runs in of_modes if runs))


MOST = {"online seconds": (online, 0.5), "material": (bytes_ahead, 0.4)}


def criteria(result: Run) -> list[str]:
    """Compare mpc with full decoding on lan, prompt by prompt."""
    checks = []
    mpc, full = ({r["prompt"]: r for r in _of(result, "lan", m)} for m in ("mpc", "full"))
    for name, (figure, most) in MOST.items():
        ratios = [figure(mpc[p]) / figure(full[p]) for p in mpc if p in full and figure(full[p])]
        if ratios:
            middle = statistics.median(ratios)
            value = (
                f"{report.three(middle)} (median of {len(ratios)} prompts, "
                f"{report.three(min(ratios))} to {report.three(max(ratios))})"
            )
            checks.append(
                report.criterion(
                    f"{name} of mpc on lan",
                    f"{most:g} of full decoding's at most",
                    value,
                    holds=middle <= most,
                )
            )
    return checks


def table(result: Run) -> str:
    """Return the whole result as Markdown."""
    return "\n".join([*rows(result), "", *criteria(result)])


def in_results(files: Mapping[str, Run]) -> list[str]:
    """Return the whole result as paragraphs of its page in docs/results."""
    ((name, data),) = files.items()
    others = [r["others"] for r in data["runs"]]
    load = f"load of other work {min(others):.2f} to {max(others):.2f} cores"
    holds = "\n".join(f"- {line}" for line in criteria(data))
    return ["\n".join(rows(data)), under_table((name,), [data["machine"]], load), holds]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Complete runs of every mode between two processes."
    commands.add_network(parser, "local,lan")
    parser.add_argument(
        "--modes",
        type=commands.names,
        default=list(MODES),
        metavar="NAME,...",
        help=f"{', '.join(MODES)} (default: all)",
    )
    commands.add_number(parser, "--prompts", 3, "the first N")
    commands.add_number(parser, "--tokens", 32, "of each completion")
    commands.add_draft_model(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--prompts", options.prompts, 1, len(read_prompts()))
    progress = Progress()
    try:
        result = measure(options, progress.update, lambda partial: commands.write(options, partial))
    finally:
        progress.close()
    show_table(table(result))
