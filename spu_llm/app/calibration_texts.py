"""The texts that ranges are chosen on: a text in parts, or chats by the model's template."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.core.errors import InputError
from spu_llm.core.json_values import names_once
from spu_llm.core.text_files import read_text

if TYPE_CHECKING:
    import numpy as np

    from models.chat import Message
    from models.family import ModelConfig, Params

MAX_TEXTS = 64
BEGINNING, ANSWER = 16, 64  # tokens of a short source, and of what is written after a source
PART = 1024  # tokens of a text, at most, that are run at a time


def add_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that `texts_of` reads."""
    given = parser.add_mutually_exclusive_group(required=required)
    given.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help=f"UTF-8; the first {MAX_TEXTS} parts of {PART} tokens of it are used, "
        "or of the model's context",
    )
    given.add_argument(
        "--chats",
        type=Path,
        metavar="FILE",
        help='a JSON object with "messages" a line, each with "role" and "content"; '
        f"the first {MAX_TEXTS} are put through the model's chat template",
    )
    parser.add_argument(
        "--public-prefix",
        default="",
        metavar="TEXT",
        help="with --text: what every text will begin with, as in generate: ranges "
        "need not hold for it (default: what the tokenizer puts before any text; "
        "with --chats: what the template puts before the first message)",
    )


def texts_of(options: argparse.Namespace, context: int) -> tuple[list[np.ndarray], int]:
    """Return token ids of each text, for a model of so many positions, and how many of the first
    are public in all of them. InputError for files that cannot be used.
    """
    import numpy as np

    if options.chats is not None:
        if options.public_prefix:
            raise InputError("--public-prefix is of --text; leave it out with --chats")
        parts = list(_chats(options.chats, options.model))
    else:
        parts = list(_parts(options, context))
    public = min(len(head) for head, _ in parts)
    return [np.array([*head, *rest][:context]) for head, rest in parts], public


def with_answers(
    options: argparse.Namespace, config: ModelConfig, params: Params
) -> list[np.ndarray]:
    """Return the texts of a model whose encoder reads a prompt: each that `texts_of` gives, and its
    beginning alone, with what the model writes after it. InputError for options that such a model
    has no use for.
    """
    from models.calibration import answered
    from models.text_format import TextFormat

    if options.public_prefix or options.chats is not None:
        raise InputError(
            f"a {config.title} model has no public prefix and no chats; leave --public-prefix out, "
            "and give --text"
        )
    texts, _ = texts_of(options, config.context)
    after = TextFormat.of_model(options.model).after_prompt
    whole = [[int(token) for token in text[: config.context - len(after)]] for text in texts]
    begun = [text[:BEGINNING] for text in whole if len(text) > BEGINNING]
    most = min(ANSWER, config.context - 1)
    return answered(config, params, [*whole, *begun], after, most)


Part = tuple[list[int], list[int]]  # what is public, and what comes after it


def _parts(options: argparse.Namespace, context: int) -> Iterator[Part]:
    from models.tokenizer import Tokenizer
    from spu_llm.api.texts import encoded

    text, empty = read_text(options.text, "--text"), f"{options.text} is empty"
    if not text:
        raise InputError(f"{empty}; give text like the prompts to come")
    public, ids = encoded(options.public_prefix, text, Tokenizer.load(options.model))
    if not ids:
        raise InputError(f"{empty} to the model's tokenizer; give text like the prompts to come")
    if (size := min(context - len(public), PART)) < 1:
        raise InputError(
            f"--public-prefix has {len(public)} tokens, but the model's context is {context}; "
            "shorten it"
        )
    for at in range(0, min(len(ids), size * MAX_TEXTS), size):
        yield public, ids[at : at + size]


def _chats(path: Path, directory: Path) -> Iterator[Part]:
    from models.chat import Template, cut
    from models.tokenizer import Tokenizer
    from spu_llm.service.rendering import render_apart

    template, tokenizer = Template.load(directory), Tokenizer.load(directory)
    render = functools.partial(render_apart, template)
    for _, messages in messages_in(path):
        head, rest = cut(render, messages)
        yield tokenizer.encode(head, goes_on=True), tokenizer.encode(rest, goes_on=True)


def messages_in(
    path: Path, most: int | None = MAX_TEXTS, option: str = "--chats"
) -> Iterator[tuple[dict[str, Any], list[Message]]]:
    """Read the first `most` chats of a JSON Lines file, which an option names, or all: each one's
    fields, and its messages. InputError, with the line, for what is none.
    """
    lines = [line for line in read_text(path, option).split("\n") if line][:most]
    if not lines:
        raise InputError(f"{path}, of {option}, is empty")
    for number, line in enumerate(lines, 1):
        yield _chat(line, f"line {number} of {path}")


def _chat(line: str, where: str) -> tuple[dict[str, Any], list[Message]]:
    from models.chat import ROLES, Message

    try:
        content: Any = json.loads(line, object_pairs_hook=names_once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON ({error})") from None
    given = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(given, list) or not given or not all(map(_is_message, given)):
        raise InputError(
            f'{where} has no "messages", each with "content" and a "role": {", ".join(ROLES)}'
        )
    return content, [Message(one["role"], one["content"]) for one in given]


def _is_message(given: Any) -> bool:
    from models.chat import ROLES

    return (
        isinstance(given, dict)
        and given.get("role") in ROLES
        and isinstance(given.get("content"), str)
    )
