"""What the commands that complete a prompt have in common: their options, and the call."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from spu_llm.api.defaults import PROMPT
from spu_llm.app import drafting, marking
from spu_llm.app.options import (
    add_backend,
    add_hint_cache,
    add_jobs,
    add_prompt,
    add_session_options,
    add_stop,
    add_system,
    given,
    provider_of,
)
from spu_llm.app.output import check_output, write_json
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from spu_llm.api.client import CompletionOptions


def add_client_options(parser: argparse.ArgumentParser) -> None:
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
    add_request_options(parser)
    add_backend(parser)
    add_session_options(parser)
    add_jobs(parser)
    add_hint_cache(parser)


def add_request_options(parser: argparse.ArgumentParser) -> None:
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


def complete(options: argparse.Namespace) -> None:
    """Stream the text to stdout, progress and the summary to stderr, the result to `--json`."""
    from spu_llm.api.client import Client
    from spu_llm.api.texts import messages_of
    from spu_llm.app.screen import Screen

    client = Client(provider_of(options))
    drafting.check(options)
    check_output(options.json)
    asked = completion_options(options)
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


def completion_options(options: argparse.Namespace) -> CompletionOptions:
    """Return how a completion is to be written."""
    from spu_llm.api.client import CompletionOptions

    return given(CompletionOptions, options)
