"""The command `prepare`: material for completions to come, made ahead of time by both parties."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from spu_llm.service.client import OnEvent, Server, run_as_client
from spu_llm.service.launching import client_directory, local_provider, provider_directory
from spu_llm.systems.decoding.records import PREPARATION, PrepareRequest


@dataclass(frozen=True)
class PrepareOptions:
    request: PrepareRequest
    tokenizer: Path  # the directory it lies in
    server: Server
    pool: Path


def prepare(options: PrepareOptions, on_event: OnEvent) -> dict[str, Any]:
    """Make material with a provider that keeps some, too; returns the `--json` object."""
    options.request.check_options()
    tokenizer = Tokenizer.load(options.tokenizer)
    outcome, agreed = run_as_client(
        options.server, PREPARATION, options.request, on_event=on_event,
        tokenizer=tokenizer, pool=options.pool,
    )  # fmt: skip
    result = outcome.result
    traffic = result["traffic"]["offline"]
    return {
        "steps": result["steps"],
        "material": result["material"],
        "seconds": {"offline": round(result["seconds"]["offline"], 3)},
        "bytes": {
            "offline": {
                "client_to_provider": traffic["sent_bytes"],
                "provider_to_client": traffic["received_bytes"],
            }
        },
        "messages": {"offline": traffic["sent_messages"] + traffic["received_messages"]},
        "learned": result["learned"],
        "config": {"pool": str(options.pool), **agreed},
    }


def prepare_both(model: Path, options: PrepareOptions, on_event: OnEvent) -> dict[str, Any]:
    """The same with a provider process for `model` on this machine."""
    both, network = options.pool, options.server.network
    with local_provider(model, network, pool=provider_directory(both)) as server:
        return prepare(replace(options, server=server, pool=client_directory(both)), on_event)


def table(result: dict[str, Any]) -> str:
    """What was made, per kind, and how far it goes."""
    rows = [("material", "units", "made", "seconds", "MB", "on disk")]
    for row in _grouped(result["material"]):
        rows.append((
            row["kind"],
            f"{row['available_units']:,}",
            f"{row['made_units']:,}",
            f"{row['seconds']:.1f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['stored_bytes'] / 1e6:.1f} MB",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    config, sent = result["config"], result["bytes"]["offline"]
    lines += [
        f"made in {result['seconds']['offline']:.1f} s with {sum(sent.values()) / 1e6:.1f} MB",
        f"enough for a prompt of {config['request.prompt_tokens']} tokens and "
        f"{result['steps']} secure steps",
    ]
    return "\n".join(lines)


def _grouped(material: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one kind for different matrices or gates, added up."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in material:
        groups.setdefault(" ".join(row["kind"].split()[:2]), []).append(row)
    numbers = ("available_units", "made_units", "seconds", "bytes", "stored_bytes")
    return [
        {"kind": rows[0]["kind"] if len(rows) == 1 else f"{name} ({len(rows)} kinds)"}
        | {key: sum(row[key] for row in rows) for key in numbers}
        for name, rows in groups.items()
    ]
