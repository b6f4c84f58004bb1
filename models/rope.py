"""Rotary positions in `config.json`: their base, and how frequencies are scaled for longer texts.

Kinds: "default"; "linear": all frequencies are divided by a factor; "llama3": only slow frequencies
are divided, which turn less than once in the context that the model was first trained on, and in
part those between slow and fast.

Source: numerics of `transformers`, modeling_rope_utils.py; "llama3" is that of LLaMA 3.1's release.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from models.config_fields import check_switches
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

KINDS = ("default", "linear", "llama3")
_FIELDS = ("rope_parameters", "rope_scaling")  # of transformers 5, and before
_OF_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Rope(NamedTuple):
    """Rotary positions of a model."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192

    def check(self) -> None:
        """Raise ValueError for values that no rotary positions have."""
        if self.kind not in KINDS:
            raise ValueError(f"rope_type must be one of {', '.join(KINDS)}")
        if not 1 < self.theta < 1e12:
            raise ValueError("rope_theta must be above 1, and below 1e12")
        if not 1 <= self.factor <= 1e6:
            raise ValueError("the factor of rotary positions must be 1 to 1e6")
        if not 0 < self.low < self.high <= 1e6 or not 1 <= self.context <= 1_000_000:
            raise ValueError("low_freq_factor must be positive, and below high_freq_factor")

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the angles [head_dim / 2] (float64) by which one position turns each pair."""
        pairs = np.arange(head_dim // 2)
        plain = np.asarray(self.theta ** (-2.0 * pairs / head_dim))
        if self.kind != "llama3":
            return plain / self.factor
        turns = self.context * plain / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return plain * (kept + (1 - kept) / self.factor)

    def describe(self) -> dict[str, Any] | None:
        """Return `rope_scaling` in the form of transformers before version 5."""
        if self.kind == "default":
            return None
        fields: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            fields |= zip(_OF_LLAMA3, (self.low, self.high, self.context), strict=True)
        return fields


def parse(raw: Mapping[str, Any]) -> Rope:
    """Return the rotary positions in a `config.json`, from any of the fields that may define them.
    InputError for an unsupported kind and for fields that differ.
    """
    stated = [(raw["rope_theta"], "rope_theta")] if "rope_theta" in raw else []
    parsed = Rope()
    for name in _FIELDS:
        if (rope := raw.get(name)) is None:
            continue
        if not isinstance(rope, dict):
            raise InputError(f"has {name} = {shown(rope)}; it must be an object, or null")
        scaled = _scaling(name, rope)
        if parsed not in (Rope(), scaled):
            raise InputError(f"has {' and '.join(_FIELDS)} that differ; leave one of them out")
        parsed = scaled
        if "rope_theta" in rope:
            stated.append((rope["rope_theta"], f"{name}.rope_theta"))
    for theta, name in stated:
        if _is_number(theta) and 1 < theta < 1e12:
            if theta == stated[0][0]:
                continue
            raise InputError(
                f"has {name} {shown(theta)} beside {stated[0][1]} {shown(stated[0][0])}; leave one "
                "of them out"
            )
        raise InputError(f"has {name} {shown(theta)}; it must be above 1, and below 1e12")
    return parsed._replace(theta=float(stated[0][0])) if stated else parsed


def _scaling(name: str, rope: Mapping[str, Any]) -> Rope:
    """Return the scaling of frequencies that an object defines, ignoring its base."""
    types = {shown(rope[key]) for key in ("rope_type", "type") if key in rope}
    kind = next((kind for kind in KINDS if types == {shown(kind)}), None)
    if kind is None:
        raise InputError(
            f"has {name} with rope_type {' and '.join(sorted(types)) or 'none'}; only "
            f"{', '.join(map(shown, KINDS))} are supported"
        )
    check_switches(rope, {"partial_rotary_factor": 1.0})
    if kind == "default":
        return Rope()
    fields = ("factor", *_OF_LLAMA3) if kind == "llama3" else ("factor",)
    for field in fields:
        if not _is_number(rope.get(field)):
            raise InputError(f"has {name}.{field} = {shown(rope.get(field))}; it must be a number")
    scaled = Rope(kind=kind, factor=float(rope["factor"]))
    if kind == "llama3":
        context = rope[_OF_LLAMA3[2]]
        if type(context) is not int:
            raise InputError(f"has {name}.{_OF_LLAMA3[2]} = {shown(context)}; it must be whole")
        scaled = scaled._replace(
            low=float(rope[_OF_LLAMA3[0]]), high=float(rope[_OF_LLAMA3[1]]), context=context
        )
    try:
        scaled.check()
    except ValueError as error:
        raise InputError(f"has {name} that cannot be: {error}") from None
    return scaled


def _is_number(value: Any) -> bool:
    """Tell whether `value` is a number of at most 1e300 in size, which a float holds."""
    return type(value) in (int, float) and abs(value) <= 1e300
