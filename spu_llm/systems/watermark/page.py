"""A text as a page of HTML: each unit the darker the more it speaks for a mark, and the parts that
are marked underlined. It stands by itself and fetches nothing.
"""

from __future__ import annotations

import html
import math

from spu_llm.systems.watermark.detecting import Marked, OfKey, Verdict, as_p

_MOST = 5.0  # -log(1 - u) of the darkest
_STYLE = """
body { font: 16px/1.6 sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em; }
pre { white-space: pre-wrap; font: 15px/1.7 monospace; }
u { text-decoration: underline 2px #b00; text-underline-offset: 4px; }
small { color: #555; }
"""


def page(text: str, verdict: Verdict) -> str:
    """The whole file. All keys, one after the other."""
    said = "marked" if verdict.marked else "no mark found"
    parts = [
        f"<h1>{said}</h1><p>p = {as_p(verdict.log_p)}: so often an unmarked text looks as much "
        f"like a marked one. Marked is what has p &le; {verdict.alpha:g}.</p>"
    ]
    for number, one in enumerate(verdict.keys, 1):
        head = f"key {number}: " if len(verdict.keys) > 1 else ""
        parts.append(
            f"<h2>{head}p = {as_p(one.log_p)}, {one.scored} n-grams</h2>"
            f"<p><small>{_of_spans(one)}</small></p><pre>{_highlighted(text, one)}</pre>"
        )
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


def _highlighted(text: str, one: OfKey) -> str:
    found, at = [], 0
    opening = {span.first for span in one.spans}
    closing = {span.last - 1 for span in one.spans}
    for number, mark in enumerate(one.units):
        start, end = max(mark.start, at), max(mark.end, at)
        found.append(html.escape(text[at:start]))
        if number in opening:
            found.append("<u>")
        found.append(_unit(text[start:end], mark))
        if number in closing:
            found.append("</u>")
        at = end
    return "".join([*found, html.escape(text[at:])])


def _unit(text: str, mark: Marked) -> str:
    if not text or mark.uniform is None:
        return html.escape(text)
    strength = min(1.0, -math.log1p(-mark.uniform) / _MOST)
    colour = f"rgba(255,140,0,{strength:.2f})"
    return f'<span style="background:{colour}">{html.escape(text)}</span>'
