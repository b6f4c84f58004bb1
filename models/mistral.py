"""Mistral: LLaMA's blocks, in some models with an attention window.

Source: Jiang et al. 2023. A window as long as the context, or longer, hides nothing; a model with a
shorter one is not computed here and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models import llama
from models.config_fields import positive_int
from spu_llm.core.errors import InputError


@dataclass(frozen=True)
class MistralConfig(llama.LlamaConfig):
    """Shape of a Mistral model; see `LlamaConfig`."""

    family: ClassVar[str] = "mistral"
    title: ClassVar[str] = "Mistral"


# What the transformers library takes where nothing is stated.
_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


def parse(raw: Mapping[str, Any]) -> llama.LlamaConfig:
    """Return the shape in `config.json`, having checked that this module computes this model."""
    raw = {**_DEFAULTS, **raw}
    config = llama.parsed(raw, MistralConfig, {})
    if raw["sliding_window"] is not None:
        window = positive_int(raw, "sliding_window")
        if window < config.context:
            raise InputError(
                f"has sliding_window = {window}, below {config.context_name} = {config.context}; "
                f"such attention is not supported: set {config.context_name} to {window}, for "
                "texts of that length"
            )
    return config


def describe(config: MistralConfig) -> dict[str, Any]:
    """Return `config.json` as the transformers library writes it for this shape."""
    return llama.described(config, "MistralForCausalLM") | {"sliding_window": None}


FAMILY = replace(llama.FAMILY, config=MistralConfig, parse=parse, describe=describe)
