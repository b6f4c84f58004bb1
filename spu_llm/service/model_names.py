"""Names of the models that one provider serves: labels, which any trusted client may hear."""

from __future__ import annotations

import re

from spu_llm.core.errors import InputError

MAX_MODELS = 16  # of one provider
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def is_name(text: str) -> bool:
    """Return whether `text` can name a model."""
    return _NAME.fullmatch(text) is not None


def check_name(text: str, what: str) -> None:
    """Raise InputError, which names `what` was given, unless `text` can name a model."""
    if not is_name(text):
        raise InputError(
            f"{what} must be up to 64 letters, digits, dots, hyphens and underscores, found "
            f"{text[:80]!a}"
        )
