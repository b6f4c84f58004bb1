"""Docstrings of Python's standard library: of its tests, or summaries of what is no test."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

_TESTS = frozenset({"test", "tests", "idle_test"})  # folders
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_AFTER_SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z])")


def of_tests(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, docstring) of tests, in the order of paths and in a file from top to bottom;
    each as often as it stands there.
    """
    return _docstrings(library, tests=True)


def summaries(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, sentence), the first sentence of each docstring outside of tests, in the order
    of `of_tests`: one that begins with a capital and ends with a full stop, on one line.
    """
    for path, text in _docstrings(library, tests=False):
        paragraph = " ".join(text.split("\n\n")[0].split())
        sentence = _AFTER_SENTENCE.split(paragraph)[0]
        if sentence[:1].isupper() and sentence.endswith("."):
            yield path, sentence


def _docstrings(library: Path, tests: bool) -> Iterator[tuple[str, str]]:
    """Yield (path, text). Files that are not Python (some tests are of that) are left out."""
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library)
        if "site-packages" in path.parts or bool(_TESTS.intersection(path.parts)) != tests:
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
