"""What in a text is a secret, without tags: found by patterns, or by a library's model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spu_llm.core.errors import InputError
from spu_llm.systems.confidential.spans import Span, Tagger

_PATTERNS = [
    re.compile(pattern)
    for pattern in (
        r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",  # addresses of mail
        r"https?://[^\s\"'<>)]+",
        r"\b(?:\d{1,3}\.){3}\d{1,3}\b",  # IPv4
        r"\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b",  # dates
        r"(?<!\w)\+?\d[\d ()/-]{6,}\d\b",  # telephones, cards, accounts
        r"\b(?:Mr|Mrs|Ms|Dr|Prof)\.? [A-Z][\w'-]+(?: [A-Z][\w'-]+)*",
        r"\b\d{2,}\b",  # ages, amounts
    )
]


def by_patterns(text: str) -> Sequence[Span]:
    """Find addresses, dates, numbers, and names after a title."""
    return [Span(*match.span()) for pattern in _PATTERNS for match in pattern.finditer(text)]


def by_presidio(text: str) -> Sequence[Span]:
    """Find what Microsoft's presidio-analyzer takes for personal data in English. InputError where
    it or its language model is not installed: an optional extra.
    """
    try:
        from presidio_analyzer import AnalyzerEngine
    except ImportError:
        raise InputError(
            "--redact presidio needs presidio-analyzer: pip install 'spu-llm[presidio]'"
        ) from None
    try:
        analyzer = AnalyzerEngine()
    except (Exception, SystemExit) as exc:  # spaCy fetches a model that is missing, or exits
        raise InputError(
            "--redact presidio: its language model is missing and could not be fetched; "
            "python -m spacy download en_core_web_lg"
        ) from exc
    results = analyzer.analyze(text=text, language="en")
    return [Span(result.start, result.end) for result in results]


TAGGERS: dict[str, Tagger] = {"patterns": by_patterns, "presidio": by_presidio}
