"""The command `spu-llm`."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, NoReturn

from spu_llm.app import config, serving
from spu_llm.app.output import unforeseen
from spu_llm.app.printing import guard, say, tell_traceback
from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.core.jax_settings import settle
from spu_llm.core.printable import one_line


class Parser(argparse.ArgumentParser):
    """Bad options end in one line and exit code 2; options are not abbreviated. `fill` adds those
    that only a command that was chosen needs.
    """

    def __init__(self, fill: Callable[[Parser], None] | None = None, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self._fill = fill

    def filled(self) -> Parser:
        """Add the options that only a chosen command needs, once; return this parser."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.filled()
        if config.OPTION in self._option_string_actions:
            command = self.prog.rpartition(" ")[2]
            args = config.with_file(command, args or [], self._actions)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Here, and not by the parser above, which knows neither the command nor its options.
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return parsed, unknown

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
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _terminated)
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
    from spu_llm.app import studies
    from spu_llm.app.commands import (
        align,
        attack,
        calibrate,
        chat,
        demo,
        doctor,
        dp,
        gateway,
        generate,
        import_model,
        inspect,
        keygen,
        obfuscate,
        pool,
        prepare,
        split,
        vault,
        watermark,
    )

    parser = Parser(prog="spu-llm", description="Private LLM inference between two parties.")
    parser.add_argument("--version", action="version", version=f"spu-llm {version('spu-llm')}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for module in (
        demo,
        prepare,
        serving,
        generate,
        chat,
        gateway,
        doctor,
        keygen,
        pool,
        import_model,
        calibrate,
        align,
        inspect,
        vault,
        obfuscate,
        attack,
        dp,
        split,
        watermark,
        studies,
    ):
        module.add_command(commands)
    return parser
