"""What texts are made from: docstrings of the tests of the running interpreter's standard library,
or sentences of its language reference.

Training of the shipped models skipped these files (`models.training.corpus`), so no reference is
known to them; other models have most probably read both. Nothing is downloaded; the licence is
Python's. Texts are divided by their hash: references, which stand for sensitive ones, and real
texts that results are compared with.

References stand in the order of their files (or topics), so that a batch is mostly of one file, as
the paper's reviews of one batch have one label: file and count, like label and count there, are
taken as public. Mixed batches say nothing to models of the shipped size.

Docstrings go on from a query that is source text. Sentences are asked for in words, as in table 5
of "InvisibleInk" (Vinod, Pillutla, Thakurta): as a chat where the model has a chat template.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.dp_text.manual import sentences
from models.chat import Template
from models.tokenizer import Tokenizer
from models.training.corpus import library_directory
from spu_llm.core.errors import InputError
from spu_llm.service.rendering import render_apart
from spu_llm.systems.dp_text.prompts import Prompts, Templates, prompts_for, with_room

FOLDERS = frozenset({"test", "tests", "idle_test"})
LICENCE = "PSF-2.0 (models/shipped/LICENSE.python.txt)"
SHORTEST = 8  # tokens
REAL_ONE_IN = 4  # texts
QUERY = 'def test(self):\n    """'
PRIVATE = (
    "Here is a sentence from the reference manual of a programming language: {text}\n"
    "Please output another sentence from the same page of the manual, and nothing else."
)
PUBLIC = (
    "Please output a sentence from the reference manual of a programming language, and nothing "
    "else."
)
SYSTEM = "You are a chatbot"  # as in the paper
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


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
class Origin:
    """Origin of texts. texts: yields (part, text) of a library, in order; parts: what its
    parts are called; closing: any token with it ends a text; in_words: whether a text is asked for
    in words.
    """

    name: str
    texts: Callable[[Path], Iterator[tuple[str, str]]]
    parts: str
    closing: str
    in_words: bool

    def prompts(self, directory: Path, tokenizer: Tokenizer, context: int, tokens: int) -> Prompts:
        """Return the prompts of a model's texts of so many tokens, references as long as they.
        InputError where its context has no room for them.
        """
        ends = {i for i in range(tokenizer.vocab_size) if self.closing in tokenizer.decode([i])}
        ending = replace(tokenizer, eos_ids=tokenizer.eos_ids | ends)
        if not self.in_words:
            return prompts_for(ending, QUERY, context, tokens, tokens)
        chat = Template.of_model(directory)
        templates = (
            Templates(PRIVATE, PUBLIC)
            if chat is None
            else Templates(PRIVATE, PUBLIC, (), SYSTEM, partial(render_apart, chat))
        )
        return with_room([templates.prompts(ending, {}, 0)], context, tokens, tokens)[0]


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


def docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, text), in the order of paths and in a file from top to bottom; each as often as
    it stands there. Files that are not Python (some tests are of that) are left out.
    """
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library)
        if not FOLDERS.intersection(path.parts) or "site-packages" in path.parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tests of warnings
                tree = ast.parse(file.read_bytes().decode())
        except (SyntaxError, ValueError):  # not UTF-8 among them
            continue
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and (text := (ast.get_docstring(node) or "").strip()):
                yield path.as_posix(), text


ORIGINS = {
    "tests": Origin(
        "docstrings of the tests in the standard library of CPython",
        docstrings,
        "files",
        closing='"""',
        in_words=False,
    ),
    "manual": Origin(
        "sentences of the language reference of CPython",
        sentences,
        "topics",
        closing="\n",
        in_words=True,
    ),
}


def is_real(text: str) -> bool:
    """Return whether a text is a real one, which results are compared with."""
    return int.from_bytes(_digest(text)[:8], "big") % REAL_ONE_IN == 0


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
