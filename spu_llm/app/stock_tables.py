"""What `prepare` and `pool` print: correlated randomness by kind, and how far it goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spu_llm.api.preparation import limiting
from spu_llm.core.units import mb
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from spu_llm.offline.stock import PeerStock

_PLACES = "on disk", "in object storage"
_SIZES = "disk_bytes", "store_bytes"


def prepared_table(result: dict[str, Any]) -> str:
    """Return a table of what `prepare` made, per kind, and how far it goes."""
    rows = [("correlations", "units", "made", "seconds", "MB", "on disk")]
    numbers = ("available_units", "made_units", "seconds", "bytes", "stored_bytes")
    for row in _grouped(result["correlations"], numbers):
        rows.append(
            (
                row["kind"],
                f"{row['available_units']:,}",
                f"{row['made_units']:,}",
                f"{row['seconds']:.1f}",
                f"{row['bytes'] / 1e6:.1f}",
                mb(row["stored_bytes"]),
            )
        )
    return "\n".join([*_table(rows), f"made in {_price(result)}", enough(result)])


def made_line(result: dict[str, Any]) -> str:
    """Return one line that says what `prepare` made, and how far it goes."""
    made = any(row["made_units"] for row in result["correlations"])
    done = f"made correlated randomness in {_price(result)}" if made else "made nothing"
    return f"{done}: {enough(result)}"


def enough(result: dict[str, Any]) -> str:
    """Return for what the correlated randomness of `prepare` lasts. How many drafts stay is not
    known before.
    """
    least, most = result["tokens"]["least"], result["tokens"]["most"]
    tokens = f"{least} tokens" + (f" if no draft stays, up to {most}" if most > least else "")
    text = (
        f"enough for a prompt of {result['config']['request.prompt_tokens']} tokens and "
        f"{result['steps']} secure steps: {tokens}"
    )
    if not result["lacking_bytes"]:
        return text
    if limiting(result["room_bytes"]) == ROLES[CLIENT]:
        return f"{text}; --disk leaves no room for more"
    room = mb(result["room_bytes"][ROLES[PROVIDER]])
    return f"{text}; the provider had room for {room}, not for more"


def stock_table(stocks: Sequence[PeerStock]) -> str:
    """Return what `pool` lists: of each peer the correlated randomness by kind, and all of it."""
    lines = []
    for stock in stocks:
        session = ", in use by a session: the figures change" if stock.in_use else ""
        rows: list[tuple[str, ...]] = [("correlations", "batches", "units left", *_PLACES)]
        for kind in _grouped(stock_json(stock)["correlations"], ("batches", "units", *_SIZES)):
            counts = f"{kind['batches']:,}", f"{kind['units']:,}"
            rows.append((kind["kind"], *counts, *(mb(kind[size]) for size in _SIZES)))
        rows.append(
            ("total", f"{stock.batches:,}", "", mb(stock.disk_bytes), mb(stock.store_bytes))
        )
        if not stock.store_bytes:
            rows = [row[:-1] for row in rows]
        lines += [f"{stock.folder}{session}", *_table(rows), ""]
    batches, disk = sum(s.batches for s in stocks), sum(s.disk_bytes for s in stocks)
    stored = sum(s.store_bytes for s in stocks)
    peers = "1 peer" if len(stocks) == 1 else f"{len(stocks)} peers"
    places = f"{mb(disk)} on disk" + (f", {mb(stored)} in object storage" if stored else "")
    return "\n".join([*lines, f"{peers}, {batches:,} batches, {places}"])


def stock_json(stock: PeerStock) -> dict[str, Any]:
    """Return a peer's correlated randomness as an entry of `--json`."""
    return {
        "folder": str(stock.folder),
        "in_use": stock.in_use,
        "batches": stock.batches,
        "disk_bytes": stock.disk_bytes,
        "store_bytes": stock.store_bytes,
        "correlations": [
            {
                "kind": kind.name,
                "batches": kind.batches,
                "units": kind.units,
                "disk_bytes": kind.disk_bytes,
                "store_bytes": kind.store_bytes,
            }
            for kind in stock.kinds
        ],
    }


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table: its first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _grouped(correlations: list[dict[str, Any]], numbers: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for each kind, whatever the matrix or gate, with its `numbers` added up."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in correlations:
        groups.setdefault(" ".join(row["kind"].split()[:2]), []).append(row)
    return [
        {"kind": rows[0]["kind"] if len(rows) == 1 else f"{name} ({len(rows)} kinds)"}
        | {key: sum(row[key] for row in rows) for key in numbers}
        for name, rows in groups.items()
    ]


def _price(result: dict[str, Any]) -> str:
    sent = sum(result["bytes"]["offline"].values())
    return f"{result['seconds']['offline']:.1f} s with {mb(sent)}"
