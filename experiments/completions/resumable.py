"""Runs that take hours, each written at once: the same command goes on where it was stopped."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from experiments.common import commands, saved
from spu_llm.app.printing import show
from spu_llm.core.errors import SpuLlmError

Run = TypeVar("Run")  # a dataclass, which a record has under "asked"
Given = TypeVar("Given")  # what a run is made of


def missing(runs: Sequence[tuple[Run, Given]], earlier: dict[str, Any]) -> list[tuple[Run, Given]]:
    """Return the runs of which the `earlier` result has no record."""
    done = [record["asked"] for record in earlier["runs"]]
    return [(run, given) for run, given in runs if _fields(run) not in done]


def made(
    options: argparse.Namespace,
    runs: Sequence[tuple[Run, Given]],
    measure: Callable[[Run, Given], dict[str, Any]],
) -> tuple[dict[str, Any], list[tuple[Run, Given]]]:
    """Make the runs that the file of `--json` has no record of, and write the file after each.
    Return all records there are, and the runs that failed: a later one may do better, and these are
    made when the command is given again.
    """
    data = saved.runs_in(options.json)
    for number, (run, given) in enumerate(left := missing(runs, data), start=1):
        show(f"{number} of {len(left)}: {' '.join(map(str, _fields(run).values()))}")
        try:
            data["runs"].append(measure(run, given))
        except SpuLlmError as exc:
            show(f"  failed: {exc}")
            data["failed"].append({"asked": _fields(run), "error": str(exc)})
        commands.write(options, data)
    return data, missing(runs, data)


def check_whole(runs: Sequence[Any], failed: Sequence[Any]) -> None:
    """Raise SpuLlmError when some of the runs failed."""
    if failed:
        raise SpuLlmError(f"{len(failed)} of {len(runs)} runs failed; give the command again")


def _fields(run: Any) -> dict[str, Any]:
    fields: dict[str, Any] = asdict(run)
    return fields
