"""Numbers with their units, as people read them."""

from __future__ import annotations


def mb(count: int) -> str:
    """Return a number of bytes in MB (10^6), with one digit after the point."""
    return f"{count / 1e6:.1f} MB"
