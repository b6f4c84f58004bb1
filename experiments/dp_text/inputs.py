"""What texts are made from: docstrings of the tests of the running interpreter's standard library.

Training of the shipped models skipped these files (`models.training.corpus`), so no reference is
known to the model. Nothing is downloaded; the licence is Python's. Texts are divided by their hash:
references, which stand for sensitive ones, and real texts that results are compared with.

References stand in the order of their files, so that a batch is mostly of one file, as the paper's
reviews of one batch have one label: file and count, like label and count there, are taken as
public. Mixed batches say nothing to models of this size.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.tokenizer import Tokenizer
from models.training.corpus import library_directory
from spu_llm.core.errors import InputError

FOLDERS = frozenset({"test", "tests", "idle_test"})
LICENCE = "PSF-2.0 (models/shipped/LICENSE.python.txt)"
SHORTEST = 8  # tokens
REAL_ONE_IN = 4  # texts
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


def corpus(tokenizer: Tokenizer, longest: int, library: Path | None = None) -> Corpus:
    """Return the texts of the running interpreter's library, or of another folder. InputError where
    there is none: many packages of Python leave its tests out.
    """
    library = library or library_directory()
    sides: tuple[dict[str, int], dict[str, int]] = ({}, {})  # references, real: lengths of texts
    files: tuple[set[str], set[str]] = (set(), set())
    places: list[int] = []
    before: dict[str, int] = {}  # of each file
    for path, text in docstrings(library):
        before.setdefault(path, len(sides[0]))
        length, real = len(tokenizer.encode(text)), is_real(text)
        if SHORTEST <= length <= longest and text not in sides[real]:
            sides[real][text] = length
            files[real].add(path)
            places += [before[path]] * real
    if not all(sides):
        raise InputError(
            f"{library} has too few docstrings of {SHORTEST} to {longest} tokens in its tests; use "
            "a Python that comes with them (python.org's sources, pyenv)"
        )
    parts = [list(side) for side in sides]
    facts = {
        "origin": "docstrings of the tests in the standard library of CPython",
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


def is_real(text: str) -> bool:
    """Return whether a text is a real one, which results are compared with."""
    return int.from_bytes(_digest(text)[:8], "big") % REAL_ONE_IN == 0


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
