"""`spu-llm dp generate --server`: texts from references that stay here, with a provider's model, or
with references of its own, too.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.app.options import (
    add_hint_cache,
    add_identity_options,
    add_network,
    add_served_model,
    given,
    provider_of,
)
from spu_llm.app.printing import show, tell
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from spu_llm.systems.dp_text.served import OwnReferences


def add_options(parser: Any) -> None:
    """Add what `dp generate` takes to generate with a provider's model."""
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        help="the model is that provider's, who does not see the references; "
        "--model is then where the tokenizer lies",
    )
    add_served_model(parser)
    parser.add_argument(
        "--peer-references",
        type=int,
        default=0,
        metavar="N",
        help="with --server: N of each text's references are the provider's own, "
        "and --model is one that both have",
    )
    parser.add_argument(
        "--places",
        type=int,
        metavar="N",
        help="with --server: room for candidates (default: K and a few)",
    )
    add_network(parser, "with --server: ")
    add_hint_cache(parser, "with --server: ")
    add_identity_options(parser)
    parser.set_defaults(ranges=None, pool=None, jobs=None)


def add_serve_options(parser: Any) -> None:
    """Add what `serve` takes of the provider's own references."""
    parser.add_argument(
        "--references",
        type=Path,
        metavar="FILE",
        help="sensitive ones of its own, for dp generate --peer-references: a JSON "
        'object with "text" a line; with --once',
    )
    parser.add_argument(
        "--epsilon",
        type=float,
        metavar="E",
        help="what that session may spend of each one's privacy",
    )
    parser.add_argument(
        "--delta",
        type=float,
        default=1e-6,
        metavar="D",
        help="with --epsilon (default: %(default)s)",
    )


def own_references(options: argparse.Namespace) -> OwnReferences | None:
    """Return the provider's own references, None without any. InputError where more than one
    session could spend of them.
    """
    given = [options.references is not None, options.epsilon is not None]
    if not any(given):
        return None
    if not all(given) or not options.once:
        raise InputError("--references are spent: give --epsilon E, how much, and --once")
    from spu_llm.systems.dp_text.served import OwnReferences

    return OwnReferences(options.references, options.epsilon, options.delta)


def generate(options: argparse.Namespace) -> None:
    """Run a corpus's sessions; progress and what is promised to stderr, the texts to `--out`."""
    from spu_llm.api.private_text import REFERENCE_TOKENS, PrivateTextOptions, private_texts
    from spu_llm.app.screen import Stages, learned_lines
    from spu_llm.systems.dp_text.statement import summary

    if options.method != "invisibleink" or options.centre:
        raise InputError("with --server there is --method invisibleink, uncentred")
    if options.adjacency != "replace-by-null":
        raise InputError("with --server there is --adjacency replace-by-null alone")
    if options.epsilon is None:
        raise InputError("give --epsilon, what may be spent of every reference's privacy")
    if options.reference_tokens is None:
        options.reference_tokens = REFERENCE_TOKENS
    asked = given(PrivateTextOptions, options)
    with closing(Stages()) as stages:
        made = private_texts(
            provider_of(options),
            options.references,
            options.out,
            asked,
            stages.on_event,
            model=options.model,
        )
    tell(summary(made.statement), *learned_lines(made.learned))
    show(str(options.out))
