"""A running server's options, read again from its command line and the files that it names."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spu_llm.app.printing import say

if TYPE_CHECKING:
    from spu_llm.net.identity import Certificate, Identity
    from spu_llm.service.renewing import Loaded, Renewal

T = TypeVar("T")

# What may change for new sessions. All else stays as it was at the start.
_LIMITS = (
    "sessions",
    "session_minutes",
    "client_sessions",
    "client_traffic",
    "client_memory",
    "client_disk",
    "quotas",
    "disk",
)
RENEWED = ("identity", "trust", "trust_user", *_LIMITS)
_SHOWN = 5  # certificates in a line


def loaded(
    options: argparse.Namespace,
    make: Callable[[argparse.Namespace], T],
    known: Callable[[T], Mapping[str, Identity | None]],
    say: Callable[[str], None] = say,
) -> tuple[T, Renewal[T]]:
    """Return what `make` makes of a server's options, and how to make it again. `known`: this
    party's identity, by each option that says whom it trusts. `say`: gets what was read again.
    """
    from spu_llm.service.renewing import Renewal, look_at

    def load(renewed: argparse.Namespace, seen: Any, fixed: list[str]) -> Loaded[T]:
        from spu_llm.service.renewing import Loaded

        seen = dict(look_at(_files(renewed))) | seen
        made = make(renewed)
        return Loaded(made, seen, _said(renewed, known(made)), fixed)

    def again() -> Loaded[T]:
        seen = look_at(_files(options))
        renewed = options.again()
        fixed = [
            name
            for name, value in vars(renewed).items()
            if name not in RENEWED
            and name in options
            and value != getattr(options, name)
            and not callable(value)
        ]
        for name in fixed:
            setattr(renewed, name, getattr(options, name))
        kept = {path: state for path, state in seen.items() if path in _files(renewed)}
        return load(renewed, kept, [f"--{name.replace('_', '-')}" for name in fixed])

    first = load(options, {}, [])
    return first.options, Renewal(first, again, say)


def _files(options: argparse.Namespace) -> list[Path]:
    """Return the files that are read again when they have changed."""
    from spu_llm.net.identity import CERTIFICATE, KEY

    given = vars(options)
    paths = [given.get(name) for name in ("trust", "trust_user", "config", "quotas")]
    if (directory := given.get("identity")) is not None:
        paths += [directory / CERTIFICATE, directory / KEY]
    return [path for path in paths if path is not None]


def _said(options: argparse.Namespace, known: Mapping[str, Identity | None]) -> dict[str, str]:
    """Return what is printed of options when they have changed, by name."""
    from spu_llm.service.renewing import CERTIFICATE

    said = {}
    for option, identity in known.items():
        if identity is not None:
            said[CERTIFICATE] = str(identity.own)
            said[option] = _shown([*identity.pinned, *identity.authorities])
    for name in _LIMITS:
        if name in options:
            value = getattr(options, name)
            said[name.replace("_", "-")] = "as by default" if value is None else _shown_value(value)
    return said


def _shown_value(value: int | Path) -> str:
    """Return what is printed of an option's value; of a file's, also which content it has."""
    if isinstance(value, int):
        return str(value)
    return f"{value} (SHA-256 {hashlib.sha256(value.read_bytes()).hexdigest()[:8]})"


def _shown(certificates: list[Certificate]) -> str:
    more = len(certificates) - _SHOWN
    shown = ", ".join(map(str, certificates[:_SHOWN]))
    return f"{shown} and {more} more" if more > 0 else shown
