"""Options from a file, as TOML: a table for each command, its options' names as keys.

    [serve]
    model = "model"            # a path is relative to the file
    listen = "0.0.0.0:9000"
    sessions = 4

What stands on the command line goes before; of options that may be given again, all count. What is
true in a file stays so: there is no option for the contrary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spu_llm.app.named_models import named_model
from spu_llm.core.errors import InputError
from spu_llm.core.text_files import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTION = "--config"
_NOT_HERE = (OPTION, "--help", "--debug")


def with_file(
    command: str, arguments: Sequence[str], actions: Sequence[argparse.Action]
) -> list[str]:
    """Return the arguments of `command`, with those of a file before them if there is one.
    InputError for a file that cannot be read, or names what is no option.
    """
    path = _named(arguments)
    if path is None:
        return list(arguments)
    tables = read_toml(path, OPTION)
    # One file may do for both parties, or for several commands.
    unknown = [name for name, table in tables.items() if not isinstance(table, dict)]
    if unknown:
        raise InputError(f"{path}: {unknown[0]!a} stands in no table; put it below [{command}]")
    known = {string: action for action in actions for string in action.option_strings}
    from_file: list[str] = []
    for name, value in tables.get(command, {}).items():
        option = f"--{name}"
        if option not in known or option in _NOT_HERE or known[option].help == argparse.SUPPRESS:
            raise InputError(f"{path}: [{command}] has {name!a}, which is no option of {command}")
        from_file += _given(path, option, known[option], value)
    return from_file + list(arguments)


def _named(arguments: Sequence[str]) -> Path | None:
    for i, argument in enumerate(arguments):
        if argument == OPTION and i + 1 < len(arguments):
            return Path(arguments[i + 1])
        if argument.startswith(f"{OPTION}="):
            return Path(argument.removeprefix(f"{OPTION}="))
    return None


def read_toml(path: Path, option: str) -> dict[str, Any]:
    """Return the tables of the TOML file that `option` names; InputError where there are none."""
    text = read_text(path, option)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{path}, of {option}, is nested too deeply") from None
    except ValueError as exc:  # a number too long is one that is no TOMLDecodeError
        raise InputError(f"{path} is no TOML file: {exc}") from None


def _given(path: Path, option: str, action: argparse.Action, value: Any) -> Iterator[str]:
    """Yield an option of the file as it would stand on the command line."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{path}: {option[2:]} must be true or false, found {value!r:.80}")
        if value:
            yield option
        return
    several = isinstance(value, list) and isinstance(action.default, list)
    for one in value if several else [value]:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            raise InputError(f"{path}: {option[2:]} cannot be {one!r:.80}")
        yield f"{option}={_relative(path.parent, action, one) if isinstance(one, str) else one}"


def _relative(folder: Path, action: argparse.Action, text: str) -> str:
    """Return a path, or a model's name and path, as it is from where the command runs."""
    kind: Any = action.type
    if kind is named_model:
        return str(named_model(text, folder))
    return str(folder / text) if kind is Path else text
