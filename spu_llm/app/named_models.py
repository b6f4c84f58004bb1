"""`serve --model [NAME=]DIR`: the models of one provider, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError
from spu_llm.service.model_names import MAX_MODELS, is_name


@dataclass(frozen=True)
class NamedModel:
    """A model's directory, and what clients call it; empty: it has no name."""

    name: str
    directory: Path

    def __str__(self) -> str:
        return f"{self.name}={self.directory}" if self.name else str(self.directory)


def named_model(text: str, folder: Path = Path()) -> NamedModel:
    """Return what `--model` names, relative to `folder`. What stands before the first "=" is a name
    where it can be one, and all of it is no directory. InputError for a name without a directory.
    """
    name, equals, directory = text.partition("=")
    if not equals or not is_name(name) or (folder / text).is_dir():
        return NamedModel("", folder / text)
    if not directory:
        raise InputError(f"--model {text} names no directory; give NAME=DIR")
    return NamedModel(name, folder / directory)


def add_option(parser: Any) -> None:
    """Add `--model`, which may be given again; `by_name` reads it."""
    parser.add_argument(
        "--model",
        type=named_model,
        action="append",
        default=[],
        required=True,
        metavar="[NAME=]DIR",
        help="private model directory; may be given again, each with a NAME that clients ask for "
        "by --served-model",
    )


def by_name(models: Sequence[NamedModel]) -> dict[str, Path]:
    """Return directories by name. InputError unless of several models each has a name of its
    own.
    """
    if len(models) > MAX_MODELS:
        raise InputError(f"one provider serves at most {MAX_MODELS} models, found {len(models)}")
    names = [model.name for model in models]
    for model in models if len(models) > 1 else ():
        if not model.name:
            raise InputError(
                f"--model {model}: of several models each has a name; give NAME=DIR, with a NAME "
                "of up to 64 letters, digits, dots, hyphens and underscores"
            )
        if names.count(model.name) > 1:
            raise InputError(f"two models are named {model.name}; give each a name of its own")
    return {model.name: model.directory for model in models}
