"""`spu-llm dp generate --server`: texts from references that stay here, with a provider's model, or
with references of its own, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.api.defaults import shipped
from spu_llm.app.options import add_hint_cache, add_identity_options, hint_cache_of, server_of
from spu_llm.app.printing import show, tell
from spu_llm.app.progress import Progress
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from spu_llm.systems.dp_text.served import OwnReferences

REFERENCE_TOKENS, SPARE_PLACES = 64, 8


def add_options(parser: Any) -> None:
    """Add what `dp generate` takes to generate with a provider's model."""
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        help="the model is that provider's, who does not see the references; "
        "--model is then where the tokenizer lies",
    )
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
    parser.add_argument(
        "--network",
        choices=("local", "lan", "wan"),
        default="local",
        help="with --server: emulate a network (default: local, none)",
    )
    add_hint_cache(parser, "with --server: ")
    add_identity_options(parser)


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
    from models.tokenizer import Tokenizer
    from spu_llm.app.screen import learned_lines
    from spu_llm.systems.dp_text.generator import batches
    from spu_llm.systems.dp_text.prompts import Prompts, read_references
    from spu_llm.systems.dp_text.secure_budget import for_budget
    from spu_llm.systems.dp_text.secure_corpus import SecureCorpusRequest, write_corpus
    from spu_llm.systems.dp_text.statement import summary

    _check(options)
    hint_cache = hint_cache_of(options)
    places = options.places or options.top_k + SPARE_PLACES
    server = server_of(options)
    parameters = for_budget(
        options.epsilon,
        options.delta,
        batch=options.batch,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        top_k=options.top_k,
        places=places,
        noises=2 if options.peer_references else 1,
    )
    references = read_references(options.references)
    directory = options.model or shipped("private" if options.peer_references else "public")
    room = REFERENCE_TOKENS if options.reference_tokens is None else options.reference_tokens
    prompts = Prompts(Tokenizer.load(directory), options.query, room)
    asked = SecureCorpusRequest(
        parameters, options.delta, places, prompts, options.texts, options.peer_references
    )
    progress = Progress()
    try:
        progress.stage("connecting")
        make = _by_sessions(server, asked, directory, hint_cache, progress)
        found, learned = write_corpus(
            options.out, asked, references, batches(references, asked.own), make
        )
    finally:
        progress.close()
    tell(summary(found), *learned_lines(learned))
    show(str(options.out))


def _by_sessions(
    server: Any, asked: Any, directory: Path, hint_cache: int, progress: Progress
) -> Callable[[int, Sequence[Sequence[str]]], dict[str, Any]]:
    """Return make(number, references of each text) -> the program's result, in its own session."""
    from models.files import files_of
    from spu_llm.service.client import run_as_client
    from spu_llm.systems.dp_text.secure_records import SECRET_MODEL, SHARED_MODEL, References

    program = SHARED_MODEL if asked.of_provider else SECRET_MODEL

    def make(number: int, parts: Sequence[Sequence[str]]) -> dict[str, Any]:
        begun, tokens = 0, 0

        def on_event(event: dict[str, Any], relay: Any) -> None:
            nonlocal begun, tokens
            if event["event"] == "stage" and event["name"].startswith("text "):
                begun, tokens = begun + 1, 0
                # Each has a line, however short it is.
                progress.stage(f"text {number + begun} of {asked.texts}")
            elif event["event"] == "token":
                tokens += 1
                progress.update(f"text {number + begun} of {asked.texts}: {tokens} tokens")

        inputs = References([asked.prompts_of(part) for part in parts], str(directory))
        outcome, _ = run_as_client(
            server,
            program,
            asked.request,
            inputs,
            on_event,
            tokenizer=asked.prompts.tokenizer,
            reads=files_of(directory),
            hint_cache=hint_cache,
        )
        return dict(outcome.result)

    return make


def _check(options: argparse.Namespace) -> None:
    """Raise InputError for options that there are not between two parties."""
    if options.method != "invisibleink" or options.centre or options.top_k < 1:
        raise InputError("with --server there is --method invisibleink, with --top-k, uncentred")
    if options.adjacency != "replace-by-null":
        raise InputError("with --server there is --adjacency replace-by-null alone")
    if options.epsilon is None:
        raise InputError("give --epsilon, what may be spent of every reference's privacy")
    if not 0 <= options.peer_references < options.batch:
        raise InputError(
            f"--peer-references must be below --batch, {options.batch}; found "
            f"{options.peer_references}"
        )
    if options.texts < 1:
        raise InputError(f"--texts must be 1 or more, found {options.texts}")
    if options.reference_tokens is not None and options.reference_tokens < 1:
        raise InputError(f"--reference-tokens must be 1 or more, found {options.reference_tokens}")
