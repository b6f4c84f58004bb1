"""The options of what drafts a text (`spu_llm.api.drafting`)."""

from __future__ import annotations

import argparse

from spu_llm.api.defaults import DRAFT_LENGTH
from spu_llm.app.options import add_folder
from spu_llm.core.errors import InputError
from spu_llm.systems.decoding.limits import MAX_DRAFTS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `check` reads."""
    parser.add_argument(
        "--draft-length",
        type=int,
        default=DRAFT_LENGTH,
        metavar="G",
        help=f"drafts per secure step, 1 to {MAX_DRAFTS} (default: %(default)s)",
    )
    parser.add_argument("--standard", action="store_true", help="no drafting: one token a step")
    add_folder(
        parser,
        "--draft-model",
        "public model directory, of the provider's tokenizer "
        "(default: the shipped one, if it has that)",
    )
    parser.add_argument(
        "--drafts",
        choices=("model", "ngram", "both"),
        help="by the draft model, by what followed in the text where its last "
        "tokens stood before, or by whichever of the two is expected to stay, by this text so far "
        "(default: both; nothing drafts where there is no draft model)",
    )


def check(options: argparse.Namespace) -> None:
    """Raise InputError for options that contradict each other, or a draft length below 1. Set a
    draft length of 0 for `--standard`.
    """
    if options.drafts is not None and options.standard:
        raise InputError("--standard drafts nothing; leave it or --drafts out")
    if options.drafts == "ngram" and options.draft_model is not None:
        raise InputError("--drafts ngram takes no draft model; leave it or --draft-model out")
    options.draft_length = length_of(options.draft_length, standard=options.standard)


def length_of(length: int, *, standard: bool) -> int:
    """Return the drafts of a step, 0 with `--standard`; InputError for a length below 1."""
    if not standard and length < 1:
        raise InputError(
            f"--draft-length must be 1 to {MAX_DRAFTS}, found {length}; --standard turns drafting "
            "off"
        )
    return 0 if standard else length
