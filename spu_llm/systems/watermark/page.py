"""A text as a page of HTML: each unit the darker the more it speaks for a mark, and the parts that
are marked underlined. It stands by itself and fetches nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spu_llm.core.printable import printable
from spu_llm.systems.watermark.detecting import Marked, OfKey, Verdict, as_p

_MOST = 5.0  # -log(1 - u) of the darkest
_STYLE = """
body { font: 16px/1.6 sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em; }
pre { white-space: pre-wrap; font: 15px/1.7 monospace; }
u { text-decoration: underline 2px #b00; text-underline-offset: 4px; }
small { color: #555; }
"""


class Shaded(NamedTuple):
    """Characters of the text, and from 0 to 1 how dark they are."""

    start: int
    end: int
    strength: float


def page(text: str, verdict: Verdict) -> str:
    """Return the whole HTML file that shows a verdict: all keys, one after the other."""
    said = "marked" if verdict.marked else "no mark found"
    parts = [
        f"<h1>{said}</h1><p>p = {as_p(verdict.log_p)}: so often an unmarked text looks as much "
        f"like a marked one. Marked is what has p &le; {verdict.alpha:g}.</p>"
    ]
    for number, one in enumerate(verdict.keys, 1):
        head = f"key {number}: " if len(verdict.keys) > 1 else ""
        parts.append(
            f"<h2>{head}p = {as_p(one.log_p)}, {one.scored} n-grams</h2>"
            f"<p><small>{_of_spans(one)}</small></p><pre>{_of_key(text, one)}</pre>"
        )
    return _document(parts)


def page_of(
    text: str, said: str, explained: str, units: Iterable[Shaded], parts: Sequence[tuple[int, int]]
) -> str:
    """Return the whole HTML file of lines that say what was found, the first a heading, and of
    shaded units; parts: the first unit and the one after the last.
    """
    head, *more = map(_escaped, said.splitlines())
    lines = "".join(f"<p>{line}</p>" for line in more)
    shown = _highlighted(text, units, parts)
    return _document(
        [f"<h1>{head}</h1>{lines}<p><small>{html.escape(explained)}</small></p><pre>{shown}</pre>"]
    )


def _document(parts: Sequence[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Watermark</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _of_spans(one: OfKey) -> str:
    if not one.spans:
        return f"No part stands out (the best has p = {as_p(one.log_p_anywhere)}, corrected)."
    told = ", ".join(
        f"characters {span.start} to {span.end} (p = {as_p(span.log_p_corrected)})"
        for span in one.spans
    )
    return f"Underlined, corrected for how many parts were looked at: {told}."


def _of_key(text: str, one: OfKey) -> str:
    units = [Shaded(mark.start, mark.end, _strength(mark)) for mark in one.units]
    return _highlighted(text, units, [(span.first, span.last) for span in one.spans])


def _strength(mark: Marked) -> float:
    return 0.0 if mark.uniform is None else min(1.0, -math.log1p(-mark.uniform) / _MOST)


def _highlighted(text: str, units: Iterable[Shaded], parts: Sequence[tuple[int, int]]) -> str:
    pieces, at = [], 0
    opening = {first for first, _ in parts}
    closing = {last - 1 for _, last in parts}
    for number, unit in enumerate(units):
        start, end = max(unit.start, at), max(unit.end, at)
        pieces.append(_escaped(text[at:start]))
        if number in opening:
            pieces.append("<u>")
        pieces.append(_unit(text[start:end], unit.strength))
        if number in closing:
            pieces.append("</u>")
        at = end
    return "".join([*pieces, _escaped(text[at:])])


def _unit(text: str, strength: float) -> str:
    if not text or not strength:
        return _escaped(text)
    colour = f"rgba(255,140,0,{strength:.2f})"
    return f'<span style="background:{colour}">{_escaped(text)}</span>'


def _escaped(text: str) -> str:
    """Return a text as HTML, with what would disguise the text around it shown as what it is."""
    return html.escape(printable(text))
