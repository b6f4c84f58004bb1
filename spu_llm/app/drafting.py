"""What drafts a text: the options, and what they come to with a provider's tokenizer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spu_llm.app.defaults import DRAFT_LENGTH, shipped
from spu_llm.app.options import add_folder
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Drafting:
    """length: drafts of a step; 0: nothing drafts. directory: of the model that drafts, if one
    does. ngrams: whether the text itself does, too.
    """

    length: int = 0
    directory: Path | None = None
    ngrams: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `check` and `chosen` read."""
    parser.add_argument("--draft-length", type=int, default=DRAFT_LENGTH, metavar="G",
                        help="drafts per secure step, 1 to 16 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--standard", action="store_true", help="no drafting: one token a step")
    add_folder(parser, "--draft-model", "public model directory, of the provider's tokenizer "
               "(default: the shipped one, if it has that)")  # fmt: skip
    parser.add_argument("--drafts", choices=("model", "ngram", "both"),
                        help="by the draft model, by what followed in the text where its last "
                        "tokens stood before, or by this where it is sure and else by the model "
                        "(default: both; nothing drafts where there is no draft model)"
                        )  # fmt: skip


def check(options: argparse.Namespace) -> None:
    """InputError for options that leave each other nothing to do. `--standard` is a draft length of
    0.
    """
    if options.drafts is not None and options.standard:
        raise InputError("--standard drafts nothing; leave it or --drafts out")
    if options.drafts == "ngram" and options.draft_model is not None:
        raise InputError("--drafts ngram takes no draft model; leave it or --draft-model out")
    if options.standard:
        options.draft_length = 0
    elif options.draft_length < 1:
        raise InputError(
            f"--draft-length must be 1 to 16, found {options.draft_length}; "
            "--standard turns drafting off"
        )


def chosen(options: argparse.Namespace, tokenizer: Tokenizer, *, marked: bool = False) -> Drafting:
    """Return what drafts a text with this tokenizer, of which a provider's mark is wanted if it is
    `marked`. InputError when that which is asked for cannot.

    The text alone drafts only where that is asked for: a step's drafts cost more than they save
    while preprocessing does (experiments/RESULTS.md, "Drafts without a second model").
    """
    asked = options.drafts
    directory = None if asked == "ngram" else _model(options.draft_model, tokenizer)
    if directory is None and asked in ("model", "both"):
        raise InputError(
            "the shipped draft model has another tokenizer than the provider's model; give "
            "--draft-model DIR, a model with the same one, or --drafts ngram"
        )
    if not options.draft_length or (directory is None and asked is None):
        return Drafting()
    # A provider finds marks the better, the more it can guess of the drafts: the model's.
    ngrams = asked in ("ngram", "both") or (asked is None and not marked)
    return Drafting(options.draft_length, directory, ngrams)


def _model(given: Path | None, tokenizer: Tokenizer) -> Path | None:
    """Return the directory of the model that drafts for a text with this tokenizer: what is given,
    or else the shipped one if it has the same; None where it has another. InputError when the one
    that is given has another or cannot be used.
    """
    from models.tokenizer import Tokenizer

    directory = given or shipped("public")
    if Tokenizer.load(directory).digest == tokenizer.digest:
        return directory
    if given is not None:
        raise InputError(
            f"--draft-model: {given} has another tokenizer than the provider's model, which knows "
            "its drafts by other numbers; give a model with the same tokenizer, or leave "
            "--draft-model out"
        )
    return None
