"""The command `spu-llm`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spu_llm.api.defaults import PROMPT
from spu_llm.app import config, drafting, marking, serving
from spu_llm.app.options import (
    add_folder,
    add_hint_cache,
    add_identity_options,
    add_jobs,
    add_prompt,
    add_ranges,
    add_session_options,
    add_stop,
    add_system,
    megabytes,
    provider_of,
)
from spu_llm.app.output import check_output, unforeseen, write_json
from spu_llm.app.printing import guard, say, show, show_table, tell_traceback
from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.core.jax_settings import settle
from spu_llm.core.printable import one_line

if TYPE_CHECKING:
    from spu_llm.api.client import CompletionOptions


class Parser(argparse.ArgumentParser):
    """Bad options end in one line and exit code 2; options are not abbreviated. `fill` adds those
    that only a command that was chosen needs.
    """

    def __init__(self, fill: Callable[[Parser], None] | None = None, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self._fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        if config.OPTION in self._option_string_actions:
            command = self.prog.rpartition(" ")[2]
            args = config.with_file(command, args or [], self._actions)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Here, and not by the parser above, which knows neither the command nor its options.
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the nearest command where `value` is none."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = _nearest(value, action.choices)
            self.error(f"there is no command {one_line(value)}{near}")
        super()._check_value(action, value)

    def _unknown(self, given: str) -> str:
        if not given.startswith("-"):
            return f"found {one_line(given)!r}, which belongs to no option"
        shown = [
            option
            for option, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS
        ]
        return f"there is no option {one_line(given)}{_nearest(given, shown)}"

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (one that starts with a dash is written --option=VALUE)"
        raise InputError(f"{message}; see {self.prog} --help")


def _nearest(given: str, known: Iterable[str]) -> str:
    """Return words that ask for the nearest of `known`, or none."""
    near = difflib.get_close_matches(given, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit: 0 success, 2 bad input, 1 any other failure, 130 interrupted."""
    started = time.monotonic()
    settle()
    signal.signal(signal.SIGTERM, _terminated)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with that stream closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # text that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    guard()
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # prompts, weights and keys are in memory
    try:
        own = argparse.Namespace(
            started=started, again=lambda: command_line().parse_args(arguments)
        )
        options = command_line().parse_args(arguments, own)
        options.run(options)
        sys.stdout.flush()
        code = 0
    except SpuLlmError as exc:
        code = _fail(str(exc), exc.exit_code, debug)
    except KeyboardInterrupt:
        code = _fail("interrupted", 130, debug)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - whoever read our output has gone
        code = 1
    except Exception as exc:
        code = _fail(f"{unforeseen(exc)} (--debug shows where)", 1, debug)
    sys.exit(code)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug and (error := sys.exc_info()[1]) is not None:
        tell_traceback(error)
    say(f"error: {message}")
    return code


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def command_line() -> Parser:
    """Return the parser of all commands; options of a command are added when it is chosen."""
    parser = Parser(prog="spu-llm", description="Private LLM inference between two parties.")
    parser.add_argument("--version", action="version", version=f"spu-llm {version('spu-llm')}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    demo = commands.add_parser("demo", help="both parties on this machine, shipped model pair")
    add_folder(demo, "--model", "the provider's private model directory")
    add_ranges(demo)
    _client_options(demo)
    add_folder(demo, "--pool", "keep what is made ahead of time, both parties' halves")
    marking.add_provider_option(demo, "of the provider here (default: a key for this run alone); ")
    demo.set_defaults(run=_complete, server=None)

    prepare = commands.add_parser(
        "prepare",
        help="make material for a completion ahead of time, which it then takes",
        description="Both parties make what a completion takes: on this machine, or, with "
        "--server, with a provider that was started with --pool. Give the completion the same "
        "options, a prompt of the same length, and the same --pool.",
    )
    add_folder(
        prepare,
        "--pool",
        "where it is kept: both halves, or with --server the client's",
        required=True,
    )
    place = prepare.add_mutually_exclusive_group()
    place.add_argument("--server", metavar="HOST:PORT")
    add_folder(place, "--model", "the provider's private model directory")
    add_ranges(prepare)
    add_prompt(prepare, PROMPT, "for its length alone (default: that of demo); ", of_length=True)
    prepare.add_argument(
        "--steps",
        type=int,
        metavar="K",
        help="default: --max-new-tokens at three a step, with --standard at one",
    )
    prepare.add_argument(
        "--watch",
        action="store_true",
        help="stay, and make more when a completion has used some, until Ctrl-C",
    )
    prepare.add_argument(
        "--disk",
        type=int,
        metavar="MB",
        help="make no more than fits, if --pool is to hold so much in all",
    )
    _request_options(prepare)
    add_session_options(prepare)
    add_jobs(prepare)
    add_hint_cache(prepare)
    add_identity_options(prepare)
    prepare.set_defaults(run=_prepare)

    serving.add_command(commands)

    generate = commands.add_parser("generate", help="client: complete a prompt")
    generate.add_argument("--server", required=True, metavar="HOST:PORT")
    _client_options(generate)
    add_folder(generate, "--pool", "keep what is made ahead of time, if the provider does")
    add_identity_options(generate)
    generate.set_defaults(run=_complete, model=None, ranges=None)

    from spu_llm.app import (
        attacking,
        calibrating,
        chatting,
        doctor,
        importing,
        inspecting,
        keys,
        listing,
        private_text,
        splitting,
        vaults,
        watermarking,
    )
    from spu_llm.app.studies import add_commands

    chatting.add_command(commands)
    doctor.add_command(commands)
    keys.add_command(commands)
    listing.add_command(commands)
    importing.add_command(commands)
    calibrating.add_command(commands)
    inspecting.add_command(commands)
    vaults.add_command(commands)
    attacking.add_command(commands)
    private_text.add_command(commands)
    splitting.add_command(commands)
    watermarking.add_command(commands)
    add_commands(commands)
    return parser


def _client_options(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser, PROMPT)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is the first turn of a chat, by the model's template "
        "(spu-llm chat takes further ones)",
    )
    add_system(parser, "with --chat: ")
    add_stop(parser)
    parser.add_argument("--seed", type=int, metavar="S", help="fix sampling")
    marking.add_option(parser)
    _request_options(parser)
    add_session_options(parser)
    add_jobs(parser)
    add_hint_cache(parser)


def _request_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    drafting.add_options(parser)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    parser.add_argument(
        "--verify",
        default="token",
        metavar="VARIANT",
        help="token (default; gives away tokens alone), post and naive (as "
        "published), race; marked, of a provider that marks texts",
    )
    parser.add_argument(
        "--show-progress",
        action="store_true",
        help="the provider learns how many drafts stay, step by step: somewhat "
        "cheaper (with --verify post and naive it always does)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw among the K likeliest tokens (with --verify post)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the likeliest that hold mass P (with --verify post)",
    )
    parser.add_argument(
        "--public-prefix",
        default="",
        metavar="TEXT",
        help="text before the prompt that the provider may know; it costs no secure prefill",
    )
    marking.add_candidates(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")


def _complete(options: argparse.Namespace) -> None:
    """Stream the text to stdout, progress and the summary to stderr, the result to `--json`."""
    from spu_llm.api.client import Client
    from spu_llm.api.texts import messages_of
    from spu_llm.app.screen import Screen

    client = Client(provider_of(options))
    drafting.check(options)
    check_output(options.json)
    asked = _asked(options)
    if options.system is not None and not options.chat:
        raise InputError("--system is of a chat; add --chat")
    messages = messages_of(options.system, options.prompt) if options.chat else []
    if options.chat:
        client.check_chat(messages, asked)
    else:
        asked.check(options.prompt)
    with closing(Screen("" if options.chat else options.prompt)) as screen:
        if options.chat:
            result = client.chat(
                messages, asked, screen.on_event, on_wait=screen.say, started=options.started
            )
        else:
            result = client.complete(
                options.prompt, asked, screen.on_event, on_wait=screen.say, started=options.started
            )
        screen.finish()
    screen.summary(result)
    write_json(options.json, result.to_json())


def _asked(options: argparse.Namespace) -> CompletionOptions:
    """Return how a completion is to be written; options that a command lacks are as by default."""
    from spu_llm.api.client import CompletionOptions

    names = {field.name for field in dataclasses.fields(CompletionOptions)}
    return CompletionOptions(**{k: v for k, v in vars(options).items() if k in names})


def _prepare(options: argparse.Namespace) -> None:
    """Prepare material: progress to stderr, what was made to stdout, the result to `--json`."""
    from spu_llm.api.client import Client
    from spu_llm.app import keeping
    from spu_llm.app.material import material_table
    from spu_llm.service.supervisor import Look

    client = Client(provider_of(options))
    check_output(options.json)
    disk_bytes = megabytes(options, "disk")
    drafting.check(options)
    asked, tokens = _asked(options), options.prompt_tokens
    prompt = options.prompt if tokens is None else tokens
    client.check_preparation(prompt, asked, options.steps)

    def make(look: Look) -> dict[str, Any]:
        from spu_llm.app.screen import Stages

        # Who watches for days wants a line for what happens, not for how far it is.
        with closing(Stages(lines=not options.watch)) as screen:
            result = client.prepare(
                prompt,
                asked,
                screen.on_event,
                steps=options.steps,
                disk_bytes=disk_bytes,
                look=look,
            ).to_json()
        write_json(options.json, result)
        return result

    if options.watch:
        assert client.provider.client_pool is not None
        keeping.watch(client.provider.client_pool, make, lambda line: show(_timed(line)))
    else:
        show_table(material_table(make(lambda: None)))


def _timed(line: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {one_line(line)}"
