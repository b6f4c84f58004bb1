"""What each party learned, for who asks a gateway: as JSON, or as a page."""

from __future__ import annotations

from html import escape

_NOTHING = "No session has ended yet."


def page(learned: dict[str, list[str]] | None) -> str:
    """Return a page without scripts."""
    parts = [f"<p>{_NOTHING}</p>"] if learned is None else []
    for party, facts in (learned or {}).items():
        rows = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
        parts.append(f"<h2>The {escape(party)}</h2><ul>{rows}</ul>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<link rel="stylesheet" href="/page/chat.css"><title>What was learned</title>'
        "<main><h1>What each party learned in the last session that has ended</h1>"
        f"{''.join(parts)}</main></html>"
    )
