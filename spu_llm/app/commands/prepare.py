"""`spu-llm prepare`: correlated randomness for a completion, ahead of time."""

from __future__ import annotations

import argparse
import time
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import PROMPT
from spu_llm.app import drafting
from spu_llm.app.completing import add_request_options, completion_options
from spu_llm.app.options import (
    add_folder,
    add_hint_cache,
    add_identity_options,
    add_jobs,
    add_pairs,
    add_prompt,
    add_ranges,
    add_ray,
    add_served_model,
    add_session_options,
    check_pairs,
    doors_of,
    megabytes,
    provider_of,
)
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import show, show_table
from spu_llm.core.printable import one_line

if TYPE_CHECKING:
    from spu_llm.api.preparation import Prepared, Producers
    from spu_llm.api.provider import Provider


def add_command(commands: Any) -> None:
    prepare = commands.add_parser(
        "prepare",
        help="make correlated randomness for a completion ahead of time, which it then takes",
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
    add_served_model(prepare)
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
    add_ray(prepare, "whose machines make it, in pairs with the provider's sessions")
    add_pairs(prepare)
    add_request_options(prepare)
    add_session_options(prepare)
    add_jobs(prepare)
    add_hint_cache(prepare)
    add_identity_options(prepare)
    prepare.set_defaults(run=_prepare)


def _prepare(options: argparse.Namespace) -> None:
    """Prepare correlated randomness: progress to stderr, what was made to stdout, the result to
    `--json`.
    """
    from spu_llm.api.client import Client
    from spu_llm.app import keeping
    from spu_llm.app.screen import Stages
    from spu_llm.app.stock_tables import prepared_table
    from spu_llm.service.supervisor import Look

    client = Client(provider_of(options))
    check_output(options.json)
    disk_bytes = megabytes(options, "disk")
    drafting.check(options)
    asked, tokens = completion_options(options), options.prompt_tokens
    prompt = options.prompt if tokens is None else tokens
    client.check_preparation(prompt, asked, options.steps)
    check_pairs(options)

    result: list[Prepared] = []  # of the first time, with `--watch`

    def make(look: Look) -> dict[str, Any]:
        # Who watches for days wants a line for what happens, not for how far it is.
        with (
            closing(Stages(lines=not options.watch)) as screen,
            _producers(options, client.provider) as producers,
        ):
            result[:] = [
                client.prepare(
                    prompt,
                    asked,
                    screen.on_event,
                    steps=options.steps,
                    disk_bytes=disk_bytes,
                    look=look,
                    producers=producers,
                )
            ]
        made = result[0].to_json()
        write_json(options.json, made)
        return made

    def restock() -> int:
        with _producers(options, client.provider) as producers:
            assert producers is not None
            return client.restock(result[0], prompt, asked, producers, steps=options.steps)

    if options.watch:
        assert client.provider.client_pool is not None
        # A session counts what the disk has room for.
        by_producers = restock if options.ray is not None and disk_bytes is None else None
        keeping.watch(
            client.provider.client_pool, make, lambda line: show(_timed(line)), by_producers
        )
    else:
        show_table(prepared_table(make(lambda: None)))


def _producers(
    options: argparse.Namespace, provider: Provider
) -> AbstractContextManager[Producers | None]:
    """Return who makes it in place of a session of this process; None without a cluster."""
    if options.ray is None:
        return nullcontext()
    from spu_llm.cluster.producing import on_cluster

    return on_cluster(options.ray, provider.server, provider.pool, options.pairs, doors_of(options))


def _timed(line: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {one_line(line)}"
