"""Committed results: `experiments/data/NAME.json`, as a command's `--json` wrote them.

Tables, notebooks and the README's figure are made from them. `index.json` has, for each result, the
command that makes it, whether nothing else ran on the machine ("quiet"), and, where needed, a
remark ("note") and a title.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError

DATA = Path(__file__).parents[1] / "data"
NO_SECONDS = "load {:.1f} before, {:.1f} at the end (no seconds in it)"


def load(name: str) -> dict[str, Any]:
    """Return the result `name`."""
    result: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return result


def origin(name: str) -> str:
    """Describe the origin of the result `name`: its command, whether its seconds are only upper
    bounds, and its note, if any.
    """
    made = load("index")[name]
    worth = "" if timed(name) else "; taken beside other work: seconds are upper bounds"
    return f"from `{made['command']}`{worth}" + (f"; {made['note']}" if "note" in made else "")


def timed(name: str) -> bool:
    """Tell whether nothing else ran on the machine, so that the result's seconds are comparable."""
    return bool(load("index")[name]["quiet"])


def title(name: str) -> str:
    """Return the title of the result's section in the index, "" if there is none."""
    return str(load("index")[name].get("title", ""))


def there(*names: str) -> list[str]:
    """Return the given names that are in the index."""
    index = load("index")
    return [name for name in names if name in index]


def machines(result: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every machine record in a result, with commit and date."""
    if isinstance(result, dict):
        if "machine" in result:
            yield result["machine"]
        result = list(result.values())
    if isinstance(result, list):
        for part in result:
            yield from machines(part)


def link(name: str) -> str:
    """Return a link to the result `name` from a page in docs/results."""
    return f"[data](../../experiments/data/{name}.json)"


def under_table(
    names: Iterable[str], machines: Iterable[Mapping[str, Any]], load_text: str = ""
) -> str:
    """Write the line under a table that tells its origin: commit, days, machine, load, and links to
    the results `names`.

    The load is by default the number of jobs that wanted a core before each run began, and what
    ran beside it by the index, as for quiet runs. ValueError unless all `machines` have one commit
    and are one machine.
    """
    names, several = list(names), list(machines)
    made = {(m["commit"], m["cores"], round(m["memory_gib"])) for m in several}
    if len(made) != 1:
        raise ValueError(f"one table, several commits or machines: {sorted(made)}")
    commit, cores, memory = made.pop()
    days = sorted({m["date"][:10] for m in several})
    day = " to ".join(sorted({days[0], days[-1]}))
    if not load_text:
        before = [m["load"][0] for m in several]
        ends = " to ".join(f"{x:.2f}" for x in sorted({min(before), max(before)}))
        index = load("index")
        beside = {index.get(name, {}).get("beside", "nothing else") for name in names}
        load_text = f"load {ends} at the start, {' and '.join(sorted(beside))}"
    links = ", ".join(map(link, names))
    counted = "1 core" if cores == 1 else f"{cores} cores"
    return f"*Commit {commit}, {day}; {counted}, {memory} GiB; {load_text}; {links}.*"


def runs_in(path: Path | None) -> dict[str, Any]:
    """Return what a study's file holds of earlier runs; nothing where there is none. InputError for
    a file that is no study's.
    """
    if path is None or not path.exists():
        return {"runs": [], "failed": []}
    try:
        runs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(runs["runs"], list) and isinstance(runs["failed"], list)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise InputError(f"--json: {path} holds no runs of this study; name another") from None
    return runs
