"""What drafts a text: a public model, the text's own n-grams, both, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.tokenizer import Tokenizer
from spu_llm.api.defaults import DRAFT_MODELS, shipped
from spu_llm.core.errors import InputError


@dataclass(frozen=True)
class Drafting:
    """The source of drafts for texts of one tokenizer."""

    length: int = 0  # drafts of a step; 0: nothing drafts
    directory: Path | None = None  # of the model that drafts, if one does
    ngrams: bool = False  # whether the text itself does, too

    @staticmethod
    def of(
        tokenizer: Tokenizer,
        length: int,
        model: Path | None,
        by: str | None,
        *,
        marked: bool = False,
    ) -> Drafting:
        """Return what drafts a text with this tokenizer.

        length: drafts of a step, 0 for none. model: directory of a public model with the same
        tokenizer; the shipped one, if it has that, by default. by: "model", "ngram" or "both";
        None: both where there is a model, and else nothing, since a step's drafts cost more than
        n-grams alone save while preprocessing does (docs/results, "Drafts without a
        second model"). marked: whether a provider's mark is wanted. InputError when what is
        asked for cannot draft.
        """
        if by not in (None, "model", "ngram", "both"):
            raise InputError(f"--drafts must be model, ngram or both, found {by!r}")
        if by == "ngram" and model is not None:
            raise InputError("--drafts ngram takes no draft model; leave it or --draft-model out")
        directory = None if by == "ngram" else _model(model, tokenizer)
        if directory is None and by in ("model", "both"):
            raise InputError(
                "the shipped draft model has another tokenizer than the provider's model; give "
                "--draft-model DIR, a model with the same one, or --drafts ngram"
            )
        if not length or (directory is None and by is None):
            return Drafting()
        # A provider finds marks the better, the more it can guess of the drafts: the model's.
        ngrams = by in ("ngram", "both") or (by is None and not marked)
        return Drafting(length, directory, ngrams)


def _model(given: Path | None, tokenizer: Tokenizer) -> Path | None:
    """Return the directory of the model that drafts for a text with this tokenizer: what is given,
    or else a shipped one that has the same; None where none has. InputError when the one
    that is given has another or cannot be used.
    """
    some = [given] if given is not None else map(shipped, DRAFT_MODELS)
    for directory in some:
        if Tokenizer.load(directory).digest == tokenizer.digest:
            return directory
    if given is not None:
        raise InputError(
            f"--draft-model: {given} has another tokenizer than the provider's model, which knows "
            "its drafts by other numbers; give a model with the same tokenizer, or leave "
            "--draft-model out"
        )
    return None
