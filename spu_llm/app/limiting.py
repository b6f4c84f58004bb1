"""What one client gets of a provider: options of the commands that serve."""

from __future__ import annotations

import argparse
from typing import Any

from spu_llm.app.options import megabytes
from spu_llm.core.errors import InputError


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


def of(options: argparse.Namespace) -> dict[str, Any]:
    """Return fields of `ServeOptions`: what one client gets. InputError for impossible limits."""
    from spu_llm.service.limits import Limits

    for name in ("client_disk", "client_sessions"):
        if getattr(options, name) is not None and options.insecure:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} is of one certificate: there is none with --insecure")
    # Without certificates clients cannot be told apart.
    share = options.sessions if options.insecure else -(-options.sessions // 2)
    of_one = share if options.client_sessions is None else options.client_sessions
    if not 1 <= of_one <= options.sessions:
        raise InputError(f"--client-sessions must be 1 to --sessions, found {of_one}")
    traffic, memory = (megabytes(options, f"client_{name}") for name in ("traffic", "memory"))
    return {
        "sessions_of_one": of_one,
        "limits": Limits(options.session_minutes, traffic, memory),
        "disk_bytes_of_one": megabytes(options, "client_disk"),
    }
