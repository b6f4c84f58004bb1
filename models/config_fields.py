"""Fields of a `config.json`: reading them, and refusing unsupported values by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown


def check_switches(raw: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise InputError when a switch has another value than the supported one in `fixed`."""
    for name, supported in fixed.items():
        value = raw.get(name, supported)
        if type(value) is not type(supported) or value != supported:
            raise InputError(
                f"has {name} = {shown(value)}; only {json.dumps(supported)} is supported"
            )


def has_encoder(raw: Mapping[str, Any]) -> bool:
    """Return whether an encoder reads the prompt, as the `transformers` library takes it."""
    return raw.get("is_encoder_decoder", raw.get("model_type") == "t5") is True


def start_token(raw: Mapping[str, Any]) -> int:
    """Return the token that a decoder's text begins with. InputError when it is no number."""
    start = raw.get("decoder_start_token_id", raw.get("pad_token_id", 0))
    if type(start) is not int or start < 0:
        raise InputError(f"has decoder_start_token_id {shown(start)}; it must be a token's number")
    return start


def positive_int(raw: Mapping[str, Any], name: str) -> int:
    """Return a size; InputError when it is not a positive integer."""
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"has {name} = {shown(value)}; it must be a positive integer")
    return value


def fraction(raw: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number strictly between 0 and 1; InputError for any other value."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InputError(f"has {name} {shown(value)}; it must be between 0 and 1")
    return float(value)
