"""Sentences of Python's language reference, which the interpreter has for its `help()`.

The standard library has the pages in `pydoc_data/topics.py` (PSF-2.0). A paragraph that is not
indented is prose, not code or grammar; it is cut after each full stop before a capital letter, and
of its parts those that begin with a capital and end with a full stop are sentences.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from spu_llm.core.errors import InputError

_PAGES = Path("pydoc_data", "topics.py")
_PARAGRAPH = re.compile(r"\n\s*\n(?!\s)")
_SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z])")


def sentences(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (topic, sentence) in the order of topics and of their pages. InputError where the
    library has no such pages.
    """
    for topic, page in sorted(_pages(library / _PAGES).items()):
        for paragraph in _PARAGRAPH.split(page):
            if paragraph.startswith((" ", "\t")):
                continue
            prose = " ".join(re.split(r"\n\s*\n", paragraph)[0].split())
            for text in _SENTENCE.split(prose):
                if text[:1].isupper() and text.endswith("."):
                    yield topic, text


def _pages(path: Path) -> dict[str, str]:
    """Return the pages by topic, without running the file: it assigns a literal to `topics`."""
    try:
        tree = ast.parse(path.read_bytes().decode())
        (assigned,) = (node for node in tree.body if isinstance(node, ast.Assign))
        pages = ast.literal_eval(assigned.value)
    except (OSError, ValueError, SyntaxError):
        raise InputError(f"{path} has no pages of Python's language reference") from None
    return {str(topic): str(page) for topic, page in pages.items()}
