"""Docstrings say what they do: a verb first, in the field's words (CONTRIBUTING.md,
"Sentences").
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

ROOMS = ("spu_llm", "protocols", "models", "experiments", "tests")
# No function begins with an article, a pronoun, a preposition, a question word or a number.
NO_VERB = set(
    "the a an what of one also all as in by both two three four five every whether nothing it each "
    "its at how and whatever before from for whoever where over within between which but who "
    "neither up on per whole else however same under with their so than these this that those they "
    "any some none no not other another when while if even without then only either nor since "
    "unless after to our likewise".split()
)
# Words of a private dialect, each with the field's own: docs/explanation/glossary.md.
DIALECT = re.compile(r"\blikewise\b|(?<!`)\bmaterial\b|\blaws?\b|\bmade beside\b", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield every definition of a file that has a docstring, with its name and the docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            if text := ast.get_docstring(node):
                yield node, getattr(node, "name", "module"), text


@pytest.mark.parametrize("room", ROOMS)
def test_a_function_says_first_what_it_does(room: str) -> None:
    wrong = []
    for path in (ROOT / room).rglob("*.py"):
        for node, name, text in docstrings(path):
            first = re.split(r"\W", text, maxsplit=1)[0]
            verb = first.istitle() and first.lower() not in NO_VERB
            if not isinstance(node, ast.ClassDef | ast.Module) and not name.startswith("test_"):
                wrong += [] if verb else [f"{path.relative_to(ROOT)}: {name}: {text[:60]}"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_speak_the_fields_words(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}: {word[0]}"
        for path in (ROOT / room).rglob("*.py")
        for _, name, text in docstrings(path)
        if (word := DIALECT.search(text)) and path != Path(__file__)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_local_is_called_found() -> None:
    """A name says what the thing is."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                named = isinstance(node, ast.Name | ast.arg)
                assert not named or getattr(node, "id", getattr(node, "arg", "")) != "found", path
