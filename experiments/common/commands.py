"""Parts that the commands of studies share: options; printing, writing and checking a result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from experiments.common.report import PLOTS
from models.tokenizer import Tokenizer
from spu_llm.api.defaults import PROMPT, shipped
from spu_llm.app.options import add_ray
from spu_llm.app.output import write_json
from spu_llm.app.printing import show_table
from spu_llm.app.progress import Progress
from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.net.shaping import shape_of

Result = TypeVar("Result")

# ---- options


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that all studies have."""
    parser.add_argument("--model", type=Path, help="the provider's private model directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    add_debug(parser)


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def add_number(
    parser: argparse.ArgumentParser, name: str, default: int, words: str, metavar: str = "N"
) -> None:
    """Add an option for a whole number; its help ends with its default."""
    parser.add_argument(
        name, type=int, default=default, metavar=metavar, help=f"{words} (default: %(default)s)"
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the option of studies whose cells may be measured by a cluster."""
    add_ray(parser, "whose machines measure cells as tasks")


def add_network(
    parser: argparse.ArgumentParser,
    default: str,
    words: str = "local, lan, wan, or as 3000mbps-1ms: one after another (default: %(default)s)",
) -> None:
    parser.add_argument("--network", type=networks, default=default, metavar="NAME,...", help=words)


def add_draft_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft-model", type=Path, help="public model directory")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="default: that of demo")


def add_plot(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE", help=words)


def numbers(text: str) -> list[int]:
    """Parse the value of an option: whole numbers with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 1,2,4, found {text!r}") from None


def fractions(text: str) -> list[float]:
    """Parse the value of an option: numbers with commas between them."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 0.5,6, found {text!r}") from None


def names(text: str) -> list[str]:
    """Parse the value of an option: words with commas between them."""
    return text.split(",")


def networks(text: str) -> list[str]:
    """Parse the value of an option: names of emulated networks with commas between them."""
    names = text.split(",")
    for name in names:
        try:
            shape_of(name)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None
    return names


def network(text: str) -> str:
    """Parse the value of an option: the name of one emulated network."""
    if len(names := networks(text)) > 1:
        raise argparse.ArgumentTypeError(f"expected one network, found {text!r}")
    return names[0]


def private_model(options: argparse.Namespace) -> Path:
    """Return the private model that the options name, or the shipped one."""
    return options.model or shipped("private")


def pair(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the private model and the draft model that the options name, or the shipped ones."""
    return private_model(options), options.draft_model or shipped("public")


def prompt(options: argparse.Namespace) -> str:
    """Return the prompt that the options give, or the prompt of demo."""
    return getattr(options, "prompt", None) or PROMPT


def check_range(option: str, value: int, least: int, most: int | None = None) -> None:
    """Raise InputError unless the value of an option is in its range."""
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"{least} to {most}"
        raise InputError(f"{option} must be {allowed}, found {value}")


def check_tokenizer(model: Path, draft_model: Path) -> None:
    """Raise InputError where a draft model has another tokenizer than the model."""
    if Tokenizer.load(draft_model).digest != Tokenizer.load(model).digest:
        raise InputError("--draft-model has another tokenizer than the model")


def check_folders(options: argparse.Namespace) -> None:
    """Raise InputError when the folder of `--json` or `--plot` does not exist, or a plot's kind is
    not known, before hours of work.
    """
    for name in ("json", "plot"):
        file = getattr(options, name, None)
        if file is not None and not file.resolve().parent.is_dir():
            raise InputError(f"--{name}: {file.resolve().parent} is not a directory")
    plot = getattr(options, "plot", None)
    if plot is not None and plot.suffix.lower() not in PLOTS:
        raise InputError(f"--plot: {plot.name} must end with {', '.join(PLOTS)}")


# ---- results


def with_progress(stage: str, work: Callable[[Callable[[str], None]], Result]) -> Result:
    """Return what `work` does; it gets what shows how far the stage is."""
    progress = Progress()
    try:
        progress.stage(stage)
        return work(progress.update)
    finally:
        progress.close()


def each_network(
    options: argparse.Namespace,
    measure: Callable[[str], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    plot: Callable[[list[dict[str, Any]], Path], None] | None = None,
    complaint: str = "a result is wrong",
) -> None:
    """Measure network by network; print, write and draw each result at once, since the next may
    take hours. SpuLlmError with `complaint` when results have failures.
    """
    results: list[dict[str, Any]] = []
    for network in options.network:
        results.append(measure(network))
        show_table(table(results[-1]) + "\n")
        write(options, {"networks": results})
        if plot is not None and options.plot is not None:
            plot(results, options.plot)
    check(results, complaint)


def conclude(options: argparse.Namespace, result: dict[str, Any], table: str) -> None:
    """Print and write the result; SpuLlmError when it has failures: its criterion does not hold."""
    show_table(table)
    write(options, result)
    check([result], "the criterion does not hold")


def write(options: argparse.Namespace, result: Any) -> None:
    """Write the result to the file of `--json`, if given."""
    if options.json is not None:
        write_json(options.json, result)


def earlier(path: Path | None, plan: Any) -> list[dict[str, Any]]:
    """Return the rows that an earlier run with the same plan (a dataclass) wrote to the file, none
    without a file; InputError when the file is of another plan. A setting that the plan of the file
    lacks, since the study had none then, has its default.
    """
    if path is None or not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        lacking = {of.name: of.default for of in fields(plan) if of.name not in content["plan"]}
        there = json.loads(json.dumps(content["plan"] | lacking))
        same = there == json.loads(json.dumps(asdict(plan)))
        rows: list[dict[str, Any]] = content["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        same, rows = False, []
    if not same:
        raise InputError(f"--json: {path} holds no cells of this very plan; name another")
    return rows


def resumed(
    options: argparse.Namespace,
    plan: Any,
    measure: Callable[
        [Callable[[str], None], Callable[[dict[str, Any]], None], list[dict[str, Any]], str | None],
        dict[str, Any],
    ],
) -> dict[str, Any]:
    """Run measure(say, keep, done, ray) for a plan, resuming from the rows `done` that the file of
    `--json` holds; `say` shows progress, `keep` writes an unfinished result, `ray` is the address
    of the cluster that measures.
    """
    done, progress = earlier(options.json, plan), Progress()
    try:
        return measure(progress.update, lambda result: write(options, result), done, options.ray)
    finally:
        progress.close()


def check(results: Iterable[dict[str, Any]], complaint: str = "a result is wrong") -> None:
    """Raise SpuLlmError, which begins with `complaint`, when a result has failures."""
    if failures := [text for result in results for text in result.get("failures", ())]:
        raise SpuLlmError(f"{complaint}: {'; '.join(failures[:3])}")
