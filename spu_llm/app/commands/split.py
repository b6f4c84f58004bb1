"""`spu-llm split`: the client keeps both ends of an open model, the provider the middle."""

from __future__ import annotations

import argparse
import dataclasses
import math
from contextlib import closing
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import shipped
from spu_llm.app import limiting, serving, split_options
from spu_llm.app.drafting import length_of
from spu_llm.app.options import (
    address,
    given,
    identity_of,
    jobs_of,
    megabytes,
    network_of,
    provider_of,
    record,
)
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import say, show, show_table, tell
from spu_llm.core.errors import InputError
from spu_llm.systems.split.modes import ENDS, NOIR, PLAIN

if TYPE_CHECKING:
    from spu_llm.api.split import SplitClient, SplitOptions
    from spu_llm.service.provider import ServeOptions


def add_command(commands: Any) -> None:
    split = commands.add_parser(
        "split",
        help="the client keeps both ends of a model, the provider the middle",
        description=split_options.ABOUT,
    )
    roles = split.add_subparsers(dest="role", required=True, parser_class=type(split))
    split_options.add_serve(roles, _serve)
    split_options.add_generate(roles, _generate)
    split_options.add_solve(roles, _solve)
    split_options.add_score(roles, _score)
    split_options.add_prepare(roles, _prepare)
    split_options.add_tune(roles, _tune)
    split_options.add_bounds(roles, _bounds)
    split_options.add_spent(roles, _spent)


def _serve(options: argparse.Namespace) -> None:
    def make(renewed: argparse.Namespace) -> ServeOptions:
        made = _made(renewed)
        if renewed is options:
            _say_insecure(options.mode)
        return made

    serving.run_provider(options, make, f"serving the middle ({options.mode}) of")


def _made(options: argparse.Namespace) -> ServeOptions:
    from models.hf import load_config
    from models.split import Split
    from spu_llm.service.provider import ServeOptions
    from spu_llm.systems.split.records import check_front
    from spu_llm.systems.split.served import SplitModel

    serving.check_serving(options)
    model, split = options.model or shipped("private"), Split.parse(options.split)
    split.check(load_config(model, options.ranges))
    check_front(options.mode, split)
    split_options.check_serving(options)
    host, port = address(options.listen, "--listen")
    return ServeOptions(
        models={"": model},
        ranges=options.ranges,
        host=host,
        port=port,
        network=network_of(options),
        once=options.once,
        sessions=options.sessions,
        studies=False,
        identity=identity_of(options),
        exit_with_parent=options.exit_with_parent,
        system=SplitModel(options.mode, split, options.tunings),
        pool=options.pool,
        disk_bytes=megabytes(options, "disk"),
        jobs=jobs_of(options, 1),
        quotas=limiting.of(options),
    )


def _generate(options: argparse.Namespace) -> None:
    """Stream the text to stdout, progress and the summary to stderr, the result to `--json`."""
    from spu_llm.app.screen import Screen

    split_options.check_text(options)
    check_output(options.json)
    client, asked = _client(options), _text_options(options)
    _say_insecure(options.mode)
    with closing(Screen(options.prompt)) as screen:
        result = client.complete(
            options.prompt, asked, screen.on_event, on_wait=screen.say, started=options.started
        )
        screen.finish()
    screen.summary(result)
    write_json(options.json, result.to_json())


def _solve(options: argparse.Namespace) -> None:
    """Append completions to `--completions`; show progress on stderr, the count on stdout."""
    from spu_llm.api.solving import solve
    from spu_llm.app.screen import Stages
    from spu_llm.systems.split.code_tasks import read_tasks

    tasks = read_tasks(options.tasks)
    client, asked = _client(options), _text_options(options)
    check_output(options.completions, "--completions")
    _say_insecure(options.mode)
    with closing(Stages()) as stages:
        made = solve(
            client,
            tasks,
            options.completions,
            options.samples,
            asked,
            stages.on_event,
            chat=options.chat,
        )
    show(f"{options.completions}: {made} completions more")


def _score(options: argparse.Namespace) -> None:
    """Show progress on stderr, scores on stdout; write them to `--json`."""
    from spu_llm.api.code_scores import score_programs
    from spu_llm.app.code_table import lines_of
    from spu_llm.app.progress import Progress
    from spu_llm.core.machine import machine
    from spu_llm.service.untrusted import Limits
    from spu_llm.systems.split.code_tasks import read_completions, read_tasks

    check_output(options.json)
    limits = Limits(options.seconds, options.memory << 20)
    tasks = read_tasks(options.tasks)
    completions = read_completions(options.completions, tasks)
    with closing(Progress()) as progress:
        progress.stage("running programs")
        scores = score_programs(
            tasks,
            completions,
            options.r,
            limits,
            options.jobs,
            lambda done, total: progress.update(f"{done} of {total} programs run"),
        )
    write_json(options.json, scores.to_json() | {"machine": dataclasses.asdict(machine())})
    show(*lines_of(scores))


def _prepare(options: argparse.Namespace) -> None:
    """Show progress on stderr, what was made on stdout; write the result to `--json`."""
    from spu_llm.app.screen import Stages
    from spu_llm.app.stock_tables import prepared_table

    check_output(options.json)
    client, asked, disk = _client(options), _text_options(options), megabytes(options, "disk")
    prompt = options.prompt if options.prompt_tokens is None else options.prompt_tokens
    with closing(Stages()) as screen:
        made = client.prepare(prompt, asked, screen.on_event, steps=options.steps, disk_bytes=disk)
    result = made.to_json()
    write_json(options.json, result)
    show_table(prepared_table(result))


def _tune(options: argparse.Namespace) -> None:
    """Show progress on stderr, in the end the directory with what was tuned on stdout."""
    from spu_llm.api.tuning import TuneOptions, tune
    from spu_llm.app.screen import Stages, learned_lines

    client, asked = _client(options), record(TuneOptions, options)
    _say_insecure(options.mode)
    if asked.leave_out:
        say(f"noir without its {asked.leave_out} is insecure: texts can be read off what is sent")
    elif options.mode == NOIR and asked.tuned != ENDS:
        say("noir with a front that is not tuned is insecure: texts can be read off what is sent")
    with closing(Stages()) as stages:
        tuned = tune(client, options.texts, asked, stages.on_event)
    tell(*learned_lines(tuned.learned))
    loss = "" if tuned.loss is None else f", loss {tuned.loss:.3f}"
    show(f"{tuned.secrets}: {tuned.rounds} rounds{loss}")


def _bounds(options: argparse.Namespace) -> None:
    """Print the bounds, as stated and as they hold; write them to `--json`."""
    from models.hf import load_config
    from spu_llm.systems.split.bounds import bounds

    vocab = options.vocab_size
    if vocab is None:
        vocab = load_config(options.model or shipped("private")).vocab_size
    prior = 1 / vocab if options.prior is None and vocab > 0 else options.prior
    asked = {
        "vocab": (vocab, 2, 10_000_000),
        "epsilon": (options.epsilon, 0.0, 700.0),
        "tokens": (options.tokens, 1, 100_000),
        "share": (options.share, 1e-6, 1.0),
        "advantage": (options.advantage, 0.0, 1.0),
        "prior": (prior, 1e-12, 1 - 1e-12),
    }
    for name, (value, least, most) in asked.items():
        if not least <= value <= most:
            option = "vocab-size" if name == "vocab" else name
            raise InputError(f"--{option} must be {least:g} to {most:g}, found {value:g}")
    check_output(options.json)
    asked_for = {name: value for name, (value, _, _) in asked.items()}
    said = bounds(**asked_for)
    least, most = said.token_stated
    rows: list[tuple[str, str | float, str | float]] = [
        ("", "as stated", "as it holds"),
        ("a token, seen through its row (Theorem 3)", f"{most:.5f}", f"{said.token_holds:.5f}"),
        ("... at least", f"{least:.2e}", ""),
        ("the prompt (Proposition 1, Eq. 4)", said.prompt_stated, said.prompt_holds),
        ("... neighbours known (Theorem 4, Eq. 5)", said.neighbours_stated, said.neighbours_hold),
        ("... however guesses depend on each other", "", said.any_guesses),
    ]
    for name, stated, holds in rows:
        show(f"{name:<42} {_chance(stated):>12} {_chance(holds):>12}".rstrip())
    finite = {
        name: None if value == -math.inf else value
        for name, value in dataclasses.asdict(said).items()
    }
    write_json(options.json, asked_for | {"bounds": finite})


def _spent(options: argparse.Namespace) -> None:
    """Print what each mechanism spends on a feature of a model's table; write it to `--json`."""
    from models.hf import load_model
    from spu_llm.systems.split.ends import table_of
    from spu_llm.systems.split.spent import spent_on

    check_output(options.json)
    if not 0 < options.epsilon <= 100:
        raise InputError(f"--epsilon must be above 0 and at most 100, found {options.epsilon:g}")
    config, params = load_model(options.model or shipped("private"))
    table = table_of(params, config)
    for name, value, most in (
        ("tokens", options.tokens, min(len(table), split_options.MOST_TOKENS)),
        ("feature", options.feature, table.shape[1] - 1),
    ):
        least = 2 if name == "tokens" else 0
        if not least <= value <= most:
            raise InputError(f"--{name} must be {least} to {most}, found {value}")
    column = table[: options.tokens, options.feature]
    rows = spent_on(column, options.epsilon, table.shape[1])
    heads = ("mechanism", "a row sums to", "within a token", "between tokens", "epsilon given")
    lines: list[tuple[str, ...]] = [heads]
    for name, row in rows.items():
        sums = f"{row.least_sum:.4f} to {row.most_sum:.4f}"
        ratios = (f"{value:.5g}" for value in (row.within, row.between, options.epsilon))
        lines.append((name, sums, *ratios))
    for line in lines:
        show("".join(f"{cell:<20}" for cell in line).rstrip())
    write_json(
        options.json,
        {
            "tokens": options.tokens,
            "feature": options.feature,
            "epsilon": options.epsilon,
            "mechanisms": {name: dataclasses.asdict(row) for name, row in rows.items()},
        },
    )


def _chance(log10: str | float) -> str:
    """Return a chance by its log10; words as they are."""
    if isinstance(log10, str):
        return log10
    return "0" if log10 == -math.inf else f"10^{round(log10, 2) + 0.0:.2f}"


def _client(options: argparse.Namespace) -> SplitClient:
    from models.split import Split
    from spu_llm.api.split import SplitClient

    return SplitClient(
        provider_of(options),
        options.mode,
        Split.parse(options.split),
        options.model or shipped("private"),
        options.secrets,
    )


def _text_options(options: argparse.Namespace) -> SplitOptions:
    """Return how a text is to be written; options that a command lacks are as by default."""
    from spu_llm.api.split import SplitOptions

    if options.standard or options.draft_length is not None:
        options.draft_length = length_of(options.draft_length, standard=options.standard)
    return given(SplitOptions, options)


def _say_insecure(mode: str) -> None:
    """Say on stderr where a mode protects nothing."""
    if mode == PLAIN:
        say("--mode plain is insecure: the provider can read the text off what it gets")
