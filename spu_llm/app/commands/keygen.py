"""`spu-llm keygen`: a certificate and its key."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from spu_llm.app.printing import show


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "keygen",
        help="make a certificate and its key, for --identity",
        description="Makes DIR/cert.pem, which the other party gets and trusts (--trust), and "
        "DIR/key.pem, which stays. The certificate is signed by itself; one that an authority "
        "signed can lie in its place.",
    )
    parser.add_argument(
        "--name", required=True, metavar="HOST", help="host name or address of this machine"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--days", type=int, default=365, help="of validity (default: %(default)s)")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=_make)


def _make(options: argparse.Namespace) -> None:
    from spu_llm.net import identity

    made = identity.make(options.out, options.name, options.days)
    show(
        f"{options.out / identity.CERTIFICATE}: for {made.name}, valid until "
        f"{made.until:%Y-%m-%d}; give it to the other party, by a way that nobody can change",
        f"  SHA-256 {made.fingerprint}",
        f"{options.out / identity.KEY}: keep it",
    )
