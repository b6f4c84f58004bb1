"""`spu-llm chat`: its options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from spu_llm.app import drafting
from spu_llm.app.options import (
    add_backend,
    add_folder,
    add_hint_cache,
    add_identity_options,
    add_jobs,
    add_prompt,
    add_ranges,
    add_served_model,
    add_session_options,
    add_system,
)


def add_command(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="chat with a model, a provider's or one here",
        description="Takes turns until Ctrl-D; Ctrl-C ends an answer. Both parties compute on "
        "shares all that follows the model's own beginning of a chat, --system included.",
    )
    place = chat.add_mutually_exclusive_group(required=True)
    place.add_argument("--server", metavar="HOST:PORT")
    add_folder(place, "--model", "a model directory: both parties run on this machine")
    add_ranges(chat)
    add_served_model(chat)
    add_prompt(chat, None, "one turn, after which it ends; ")
    add_system(chat)
    chat.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="of an answer (default: %(default)s)",
    )
    chat.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    drafting.add_options(chat)
    chat.add_argument("--seed", type=int, metavar="S", help="fix sampling")
    chat.add_argument(
        "--json", type=Path, metavar="FILE", help="with --prompt: write the result as JSON"
    )
    add_backend(chat)
    add_session_options(chat)
    add_jobs(chat)
    add_hint_cache(chat)
    add_folder(chat, "--pool", "keep what is made ahead of time")
    add_identity_options(chat)
    chat.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from spu_llm.app.conversing import run

    run(options)
