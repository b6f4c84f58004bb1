"""Every command with its options, as docs/reference/commands.md shows them: `python -m` this
module.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from spu_llm.app.cli import Parser, command_line
from spu_llm.app.printing import show_table

_STUDIES = ("bench", "experiment")  # docs/how-to/measure.md and docs/results have their commands


def reference() -> str:
    """Return the page in Markdown."""
    parser = command_line()
    lines = [
        "# Commands",
        "",
        "Made from the command line itself by `python -m spu_llm.app.reference`. Every command has "
        "`--help` and",
        "`--debug`; every option may stand in a file (`--config`, "
        "[serving](../how-to/serve-a-model.md)). `bench` and `experiment`",
        "are in [measuring](../how-to/measure.md).",
    ]
    for name, help_, command in _commands(parser):
        if name.split()[0] not in _STUDIES:
            lines += ["", f"## {name}", "", f"{_sentence(help_)}", *_options(command.filled())]
    return "\n".join(lines) + "\n"


def _commands(parser: Parser, before: str = "") -> Iterator[tuple[str, str, Parser]]:
    """Yield the commands without commands of their own: name, help and parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                inner = list(_commands(command, f"{before}{name} "))
                yield from inner or [(f"{before}{name}", helps.get(name, ""), command)]


def _options(command: Parser) -> list[str]:
    """Return a list of a command's options with their help."""
    shown = [
        action
        for action in command._actions
        if action.help != argparse.SUPPRESS and not {"--help", "--debug"} & {*action.option_strings}
    ]
    lines = [f"- {_name(action)}: {_help(action)}".rstrip(": ") for action in shown]
    return ["", *lines] if lines else []


def _name(action: argparse.Action) -> str:
    """Return an option as it is written, with its value."""
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    shown = " ".join(value) if isinstance(value, tuple) else value
    name = ", ".join(action.option_strings) or shown
    with_value = bool(action.option_strings) and action.nargs != 0
    return f"`{name} {shown}`" if with_value else f"`{name}`"


def _help(action: argparse.Action) -> str:
    default = {"default": action.default, "prog": "spu-llm"}
    words = " ".join(((action.help or "") % default).split())
    return f"required; {words}" if action.required and action.option_strings else words


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


if __name__ == "__main__":
    show_table(reference().rstrip("\n"))
