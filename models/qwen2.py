"""Qwen2 and Qwen2.5: LLaMA's blocks, with biases on queries, keys and values.

Source: Yang et al. 2024; numerics follow the `transformers` implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from models import llama
from models.ranges import Bounds, Linear


@dataclass(frozen=True)
class Qwen2Config(llama.LlamaConfig):
    """Shape of a Qwen2 model; see `LlamaConfig`."""

    family: ClassVar[str] = "qwen2"
    title: ClassVar[str] = "Qwen2"


def init_params(config: Qwen2Config, key: Array) -> llama.LlamaParams:
    """Draw random parameters (float32) with the initial scale of `transformers`."""
    queries, few = config.head_widths
    params = llama.init_params(config, key)
    for block in params["blocks"]:
        block |= {"q_bias": jnp.zeros(queries), "k_bias": jnp.zeros(few), "v_bias": jnp.zeros(few)}
    return params


def fold(params: llama.LlamaParams, config: Qwen2Config) -> llama.LlamaWeights:
    """Fold as `llama.fold` does, with biases: norm gains multiply weights only, attention's scale
    also the biases of queries.
    """
    folded = llama.fold(params, config)
    for block, p in zip(folded["blocks"], params["blocks"], strict=True):
        scaled = p["q_bias"] * config.head_dim**-0.5
        block["qkv"]["bias"] = jnp.concatenate([scaled, p["k_bias"], p["v_bias"]])
    return folded


def bounds(block: llama.FoldedBlock, config: Qwen2Config) -> Bounds:
    """Return the largest sizes that activations of a block can reach; see `Family`. The products of
    queries and keys, biases included, with cosines and sines count, too.
    """
    of_llama = llama.bounds(block, config)
    turned, _ = Linear.of(block["qkv"]).columns([sum(config.head_widths)])
    # x cos - y sin <= sqrt(x^2 + y^2)
    largest = math.sqrt(2) * turned.largest(config.hidden_size)
    return of_llama._replace(product=max(of_llama.product, largest))


# The `config.json` switches that change the arithmetic, with the only value computed here.
FIXED_SWITCHES: Mapping[str, Any] = {"use_sliding_window": False}

_BIASES = {
    f"model.layers.{{}}.self_attn.{name}_proj.bias": ("blocks", "{}", f"{name}_bias")
    for name in "qkv"
}


def parse(raw: Mapping[str, Any]) -> llama.LlamaConfig:
    """Return the shape in `config.json`, having checked that this module computes this model."""
    # What the transformers library takes where nothing is stated.
    raw = {"num_key_value_heads": 32, **raw}
    return llama.parsed(raw, Qwen2Config, FIXED_SWITCHES)


def describe(config: Qwen2Config) -> dict[str, Any]:
    """Return `config.json` as the transformers library writes it for this shape."""
    return {**llama.described(config, "Qwen2ForCausalLM"), **FIXED_SWITCHES}


FAMILY = replace(
    llama.FAMILY,
    config=Qwen2Config,
    parse=parse,
    describe=describe,
    init=init_params,
    fold=fold,
    bounds=bounds,
    names={**llama.NAMES, **_BIASES},
)
