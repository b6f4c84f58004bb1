"""What texts are made from: docstrings of the running interpreter's standard library, of its tests
or of all else, or sentences of its language reference.

Training of the shipped models skipped tests (`models.training.corpus`), so no reference of them is
known to these models; other models have most probably read all three. Nothing is downloaded; the
licence is Python's. Texts are divided by their hash: references, which stand for sensitive ones,
and real texts that results are compared with.

References stand in the order of their files (or topics), so that a batch is mostly of one file, as
the paper's reviews of one batch have one label: file and count, like label and count there, are
taken as public. Mixed batches say nothing to models of the shipped size.

Docstrings of tests go on from a query that is source text. Sentences are asked for in words, as in
table 5 of "InvisibleInk" (Vinod, Pillutla, Thakurta): as a chat where the model has a chat
template.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.dp_text import docstrings
from experiments.dp_text.manual import sentences
from models.chat import Template
from models.tokenizer import Tokenizer
from models.training.corpus import library_directory
from spu_llm.core.errors import InputError
from spu_llm.service.rendering import render_apart
from spu_llm.systems.dp_text.baselines import augpe
from spu_llm.systems.dp_text.prompts import Prompts, Templates, prompts_for, with_room

LICENCE = "PSF-2.0 (models/shipped/LICENSE.python.txt)"
SHORTEST = 8  # tokens
REAL_ONE_IN = 4  # texts
QUERY = 'def test(self):\n    """'
SYSTEM = "You are a chatbot"  # as in the paper


@dataclass(frozen=True)
class Corpus:
    """Texts of `SHORTEST` tokens to so many, each once, in the order of files. places: of each real
    text, how many references stand before its file's.
    """

    references: list[str]
    real: list[str]
    places: list[int]
    facts: dict[str, Any]  # of a result

    def batches(self, batch: int, texts: int) -> list[list[str]]:
        """Return a batch for each text, evenly over all disjoint ones. Where there are fewer
        batches than texts, some are read again: the guarantee of such a text is of it alone.
        """
        size = min(batch, len(self.references))
        there = len(self.references) // size
        starts = [number * there // texts * size for number in range(texts)]
        return [self.references[start : start + size] for start in starts]

    def beside(self, number: int, batch: int) -> list[str]:
        """Return the references that stand where a real text's file does."""
        start = max(0, min(self.places[number], len(self.references) - batch))
        return self.references[start : start + batch]


@dataclass(frozen=True)
class Words:
    """Words in which a text is asked for, with {text} where a reference is to stand (`Templates`),
    and those in which AugPE asks for a variation, {style} in them.
    """

    private: str
    public: str
    variation: str

    @staticmethod
    def of(kind: str, source: str, part: str) -> Words:
        """Return the words for a kind of text, a sentence say, from parts of some source."""
        return Words(
            f"Here is a {kind} from {source}: {{text}}\n"
            f"Please output another {kind} from the same {part}, and nothing else.",
            f"Please output a {kind} from {source}, and nothing else.",
            f"Please rephrase this {kind} from {source} {{style}}: {{text}}\n"
            f"Output the {kind} and nothing else.",
        )


@dataclass(frozen=True)
class Origin:
    """Origin of texts. texts: yields (part, text) of a library, in order; parts: what its
    parts are called; closing: any token with it ends a text; words: None where a text goes on from
    a query.
    """

    name: str
    texts: Callable[[Path], Iterator[tuple[str, str]]]
    parts: str
    closing: str
    words: Words | None = None

    def prompts(self, directory: Path, tokenizer: Tokenizer, context: int, tokens: int) -> Prompts:
        """Return the prompts of a model's texts of so many tokens, references as long as they.
        InputError where its context has no room for them.
        """
        ends = {i for i in range(tokenizer.vocab_size) if self.closing in tokenizer.decode([i])}
        ending = replace(tokenizer, eos_ids=tokenizer.eos_ids | ends)
        if self.words is None:
            return prompts_for(ending, QUERY, context, tokens, tokens)
        return with_room(
            [self._templates(directory).prompts(ending, {}, 0)], context, tokens, tokens
        )[0]

    def variations(
        self, directory: Path, tokenizer: Tokenizer, context: int, tokens: int
    ) -> list[Prompts]:
        """Return AugPE's prompts for variations; none where texts go on from a query."""
        if self.words is None:
            return []
        words = self.words.variation
        return augpe.variations(self._templates(directory), words, tokenizer, context, tokens)

    def _templates(self, directory: Path) -> Templates:
        assert self.words is not None
        private, public, chat = self.words.private, self.words.public, Template.of_model(directory)
        if chat is None:
            return Templates(private, public)
        return Templates(private, public, (), SYSTEM, partial(render_apart, chat))


def corpus(
    tokenizer: Tokenizer, longest: int, origin: Origin, library: Path | None = None
) -> Corpus:
    """Return the texts of the running interpreter's library, or of another folder. InputError where
    there is none: many packages of Python leave its tests out.
    """
    library = library or library_directory()
    sides: tuple[dict[str, int], dict[str, int]] = ({}, {})  # references, real: lengths of texts
    files: tuple[set[str], set[str]] = (set(), set())
    places: list[int] = []
    before: dict[str, int] = {}  # of each file
    for path, text in origin.texts(library):
        before.setdefault(path, len(sides[0]))
        length, real = len(tokenizer.encode(text)), is_real(text)
        if SHORTEST <= length <= longest and text not in sides[real]:
            sides[real][text] = length
            files[real].add(path)
            places += [before[path]] * real
    if not all(sides):
        raise InputError(
            f"{library} has too few {origin.name}, of {SHORTEST} to {longest} tokens; use a Python "
            "that comes with them (python.org's sources, pyenv)"
        )
    parts = [list(side) for side in sides]
    facts = {
        "origin": origin.name,
        "parts": origin.parts,
        "python": platform.python_version(),
        "licence": LICENCE,
        "sha256": _digest("\0".join(itertools.chain(*parts))).hex(),
        "sides": {
            name: {
                "texts": len(side),
                "files": len(of),
                "tokens": np.percentile(list(side.values()), [0, 25, 50, 75, 100]).tolist(),
            }
            for name, side, of in zip(("references", "real"), sides, files, strict=True)
        },
    }
    return Corpus(parts[0], parts[1], places, facts)


ORIGINS = {
    "tests": Origin(
        "docstrings of the tests in the standard library of CPython",
        docstrings.of_tests,
        "files",
        closing='"""',
    ),
    "manual": Origin(
        "sentences of the language reference of CPython",
        sentences,
        "topics",
        closing="\n",
        words=Words.of("sentence", "the reference manual of a programming language", "page"),
    ),
    "library": Origin(
        "first sentences of docstrings in the standard library of CPython, its tests left out",
        docstrings.summaries,
        "files",
        closing="\n",
        words=Words.of("line of documentation", "the library of a programming language", "file"),
    ),
}


def is_real(text: str) -> bool:
    """Return whether a text is a real one, which results are compared with."""
    return int.from_bytes(_digest(text)[:8], "big") % REAL_ONE_IN == 0


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
