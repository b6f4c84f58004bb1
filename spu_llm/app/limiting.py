"""What one client gets of a provider: options of the commands that serve, and a file of quotas."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.app.config import read_toml
from spu_llm.app.options import megabytes
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from spu_llm.service.limits import Quota, Quotas

_MB = 10**6
# What a table of the file may hold: the field, and what a unit of it is.
_FIELDS = {
    "sessions": ("sessions", 1),
    "minutes": ("minutes", 1),
    "traffic": ("traffic_bytes", _MB),
    "memory": ("memory_bytes", _MB),
    "disk": ("disk_bytes", _MB),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what one client gets of a provider."""
    parser.add_argument(
        "--client-sessions",
        type=int,
        metavar="N",
        help="at a time, of one certificate (default: half of --sessions, rounded "
        "up; with --insecure: all)",
    )
    parser.add_argument(
        "--client-traffic",
        type=int,
        metavar="MB",
        help="let one certificate move no more than that within an hour, both "
        "ways, in all its sessions and calls (with --insecure: one session)",
    )
    parser.add_argument(
        "--client-memory",
        type=int,
        metavar="MB",
        help="let one certificate's workers take no more than that, beside the "
        "weights (with --insecure: one session)",
    )
    parser.add_argument(
        "--client-disk", type=int, metavar="MB", help="keep no more than that for one certificate"
    )
    parser.add_argument(
        "--quotas",
        type=Path,
        metavar="FILE",
        help="TOML with what some certificates get in place of that: a table for each name or "
        "fingerprint, with any of sessions, minutes, traffic, memory and disk (MB)",
    )


def of(options: argparse.Namespace) -> Quotas:
    """Return what each client gets. InputError for what none can get."""
    from spu_llm.service.limits import Quota, Quotas

    for name in ("client_disk", "client_sessions", "quotas"):
        if getattr(options, name) is not None and options.insecure:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} is of one certificate: there is none with --insecure")
    # Without certificates clients cannot be told apart.
    share = options.sessions if options.insecure else -(-options.sessions // 2)
    of_one = share if options.client_sessions is None else options.client_sessions
    if not 1 <= of_one <= options.sessions:
        raise InputError(f"--client-sessions must be 1 to --sessions, found {of_one}")
    traffic, memory, disk = (
        megabytes(options, f"client_{name}") for name in ("traffic", "memory", "disk")
    )
    others = Quota(of_one, options.session_minutes, traffic, memory, disk)
    if options.quotas is None:
        return Quotas(others)
    tables = read_toml(options.quotas, "--quotas")
    return Quotas(others, {name: _quota(options, name, tables[name], others) for name in tables})


def _quota(options: argparse.Namespace, name: str, table: Any, others: Quota) -> Quota:
    """Return the quota in a table of the file, as of all others where it says nothing."""
    if not isinstance(table, Mapping):
        raise InputError(f'{options.quotas}: {name!a} stands in no table; put it below ["CLIENT"]')
    for key, value in table.items():
        if key not in _FIELDS:
            raise InputError(
                f"{options.quotas}: {name!a} has {key!a}; a quota has {', '.join(_FIELDS)}"
            )
        most = options.sessions if key == "sessions" else None
        if type(value) is not int or value < 1 or (most is not None and value > most):
            bound = "1 or more" if most is None else f"1 to --sessions, {most}"
            raise InputError(f"{options.quotas}: {name!a}: {key} must be {bound}, found {value!r}")
    given = {_FIELDS[key][0]: value * _FIELDS[key][1] for key, value in table.items()}
    return replace(others, **given)
