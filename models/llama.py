"""LLaMA in JAX: config, folded weights, a block, the bounds of its activations, the checkpoint.

Differs from `models.gpt2` by root-mean-square norms, rotary positions in every layer, groups of
query heads that share a head of keys and values, a gated feed-forward layer, and no biases.

Source: Touvron et al. 2023; Shazeer 2020 (SwiGLU), Ainslie et al. 2023 (grouped queries); numerics
follow the `transformers` implementation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models import rope
from models.cache import Rows, split_heads
from models.config_fields import check_switches, fraction, positive_int
from models.family import Family, Layer, Matrix, ModelConfig, embed_tokens, token_table
from models.ranges import MORE_ROWS, Bounds, Linear, largest_turned_score, of_site
from protocols.arithmetic.known_factors import known_factors
from protocols.functions.activations import PIECES, activation_bits, silu_gated
from protocols.functions.rotary import rotate
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

_SILU_ERROR = PIECES["silu"].error  # on shares


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """Shape of a LLaMA model, in the words of its `config.json`, and the ranges of its activations
    on shares.
    """

    family: ClassVar[str] = "llama"
    title: ClassVar[str] = "LLaMA"
    layers_name: ClassVar[str] = "num_hidden_layers"
    context_name: ClassVar[str] = "max_position_embeddings"
    width_names: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    )
    epsilon_name: ClassVar[str] = "rms_norm_eps"

    max_position_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_kind: str = "default"
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError("hidden_size must be a multiple of num_attention_heads")
            size = self.hidden_size // self.num_attention_heads
            object.__setattr__(self, "head_dim", size)
        if self.head_dim % 2 or not 2 <= self.head_dim <= 1024:
            raise ValueError("head_dim must be even, 2 to 1024: positions turn pairs")
        heads = self.num_attention_heads * self.head_dim
        if heads > 1_000_000 or self.max_position_embeddings * self.head_dim > 1 << 26:
            raise ValueError("all heads together, or the table of positions, are too large")
        self.rotary.check()

    @property
    def rotary(self) -> rope.Rope:
        """Return the rotary positions: how a position turns queries and keys."""
        return rope.Rope(
            self.rope_theta,
            self.rope_kind,
            self.rope_factor,
            self.rope_low,
            self.rope_high,
            self.rope_context,
        )

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def activation(self) -> str:
        return "silu"

    @property
    def query_groups(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def head_widths(self) -> tuple[int, int]:
        """Return the columns of queries, and of keys or values, over all heads together."""
        return self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim


class _Block(TypedDict):
    ln_1: Array  # [d]
    q: Array  # [d, heads head_dim]
    k: Array  # [d, kv_heads head_dim]
    v: Array  # [d, kv_heads head_dim]
    o: Array  # [heads head_dim, d]
    ln_2: Array  # [d]
    gate: Array  # [d, inner]
    up: Array  # [d, inner]
    down: Array  # [inner, d]


class Block(_Block, total=False):
    """Parameters of a block; Qwen2 alone has biases."""

    q_bias: Array  # [heads head_dim]
    k_bias: Array  # [kv_heads head_dim]
    v_bias: Array  # [kv_heads head_dim]


class _LlamaParams(TypedDict):
    embed: Array  # [vocab, d]
    blocks: list[Block]
    norm: Array  # [d]


class LlamaParams(_LlamaParams, total=False):
    """Parameters of a model."""

    head: Array  # [d, vocab], unless it is tied to `embed`


class FoldedBlock(TypedDict):
    """Weights of a block as `fold` makes them."""

    qkv: Matrix  # [d, (heads + 2 kv_heads) head_dim]
    out: Matrix  # [heads head_dim, d]
    gate_up: Matrix  # [d, 2 inner]
    down: Matrix  # [inner, d]


class LlamaWeights(TypedDict):
    """Weights of a model as `fold` makes them."""

    embed: Array  # [vocab, d]
    blocks: list[FoldedBlock]
    head: Matrix  # [d, vocab]


def init_params(config: LlamaConfig, key: Array) -> LlamaParams:
    """Draw random parameters (float32) with the initial scale of `transformers`."""
    d, inner, std = config.hidden_size, config.intermediate_size, 0.02
    queries, few = config.head_widths
    keys = iter(jax.random.split(key, 2 + 7 * config.num_hidden_layers))

    def normal(*shape: int) -> Array:
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    def block() -> Block:
        return {
            "ln_1": jnp.ones(d),
            "q": normal(d, queries),
            "k": normal(d, few),
            "v": normal(d, few),
            "o": normal(queries, d),
            "ln_2": jnp.ones(d),
            "gate": normal(d, inner),
            "up": normal(d, inner),
            "down": normal(inner, d),
        }

    params: LlamaParams = {
        "embed": normal(config.vocab_size, d),
        "blocks": [block() for _ in range(config.num_hidden_layers)],
        "norm": jnp.ones(d),
    }
    if not config.tie_word_embeddings:
        params["head"] = normal(d, config.vocab_size)
    return params


def fold(params: LlamaParams, config: LlamaConfig) -> LlamaWeights:
    """Fold parameters into weights that compute the same model in fewer operations; a plaintext
    computation of the provider's.

    - Gains of the norms, and the attention's scale, go into the matrix that follows. Matrices with
      the same input become one.
    - Logits are centred over the vocabulary: the distribution is the same and the spread smaller.
    - The residual stream is scaled by 2^-stream_shift, which the norms undo.
    """
    scale = 2.0**-config.stream_shift

    def after(gain: Any, *weights: Any) -> Matrix:
        return {"weight": gain[:, None] * jnp.concatenate(weights, axis=-1)}

    def block(p: Block) -> FoldedBlock:
        return {
            "qkv": after(p["ln_1"], p["q"] * config.head_dim**-0.5, p["k"], p["v"]),
            "out": {"weight": jnp.multiply(p["o"], scale)},
            "gate_up": after(p["ln_2"], p["gate"], p["up"]),
            "down": {"weight": jnp.multiply(p["down"], scale)},
        }

    head = params["embed"].T if config.tie_word_embeddings else params["head"]
    logits = after(params["norm"], head)["weight"]
    return {
        "embed": jnp.multiply(params["embed"], scale),
        "blocks": [block(p) for p in params["blocks"]],
        "head": {"weight": logits - jnp.mean(logits, axis=-1, keepdims=True)},
    }


@functools.cache
def turns(config: LlamaConfig) -> np.ndarray:
    """Return the cosines and sines (float32 [position, head_dim / 2, 2, 1]) by which a position
    turns pairs. They are constants of the program, so parties whose tables differ notice it.
    """
    frequencies = config.rotary.frequencies(config.head_dim)
    angles = np.outer(np.arange(config.max_position_embeddings), frequencies)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)[..., None].astype(np.float32)


def angles(config: LlamaConfig, rows: Rows) -> Array:
    """Return cosines and sines [L n, head_dim / 2, 2, 1] of the rows' positions; see `Family`."""
    by_row = jnp.asarray(turns(config))[rows.positions.reshape(-1)]
    return known_factors(by_row) if rows.hidden else by_row


def attention(x: Array, layer: Layer) -> Array:
    """Return what attention adds to the residual stream; see `Family`."""
    config, lanes = layer.config, layer.lanes
    heads, few, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    # Queries and keys are turned in one go.
    turning, value = jnp.split(layer.linear("qkv", x), [(heads + few) * size], axis=-1)
    turned = rotate(
        turning.reshape(x.shape[0], heads + few, size),
        layer.angles,
        hidden=layer.rows.hidden,
        uses=layer.depth,
    ).reshape(turning.shape)
    query, key = jnp.split(turned, [heads * size], axis=-1)
    layer.write(split_heads(key, lanes, few), split_heads(value, lanes, few))
    return layer.linear("out", layer.attend(split_heads(query, lanes, heads)))


def mlp(x: Array, layer: Layer) -> Array:
    """Return down(silu(gate(x)) * up(x)), which the feed-forward layer adds to the residual stream;
    see `Family`.
    """
    bits = activation_bits(of_site(layer.config.largest_activation, layer.number))
    gate, up = jnp.split(layer.linear("gate_up", x), 2, axis=-1)
    return layer.inner("down", silu_gated(gate, up, bits=bits))


# ---- what weights bound


def bounds(block: FoldedBlock, config: LlamaConfig) -> Bounds:
    """Return the largest sizes that activations of a block can reach; see `Family`."""
    d, heads, few = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    matrices = block["qkv"], block["out"], block["gate_up"], block["down"]
    qkv, out, gate_up, down = map(Linear.of, matrices)
    queries, keys = config.head_widths
    query, key, value = qkv.columns([queries, queries + keys])
    gate, up = gate_up.columns(2)
    shared = [k for k in key.columns(few) for _ in range(heads // few)]
    by_head = zip(query.columns(heads), shared, strict=True)
    reach = value.largest(d)
    # Of a head: a mean of its values.
    attended = math.sqrt(heads // few) * math.hypot(*(v.longest(d) for v in value.columns(few)))
    # |silu(x)| <= |x|
    gates = gate.largest_entries(d) + _SILU_ERROR
    gated_down = down._replace(weight=gates[:, None] * down.weight)
    return Bounds(
        activation=gate.largest(d),
        score=max(largest_turned_score(q, k, d) for q, k in by_head),
        linear=max(qkv.largest_product(d), gate_up.largest_product(d)),
        attended=out.largest_product(attended**2),
        inner=gated_down.largest_product(up.longest(d) ** 2),
        per_length=down.largest_product(1.0),
        # Weights of attention are up to one each until they are normalised.
        product=reach * (config.max_position_embeddings + MORE_ROWS),
        gated=float(np.max(gates * up.largest_entries(d))),
        value=reach,
    )


# ---- the checkpoint

# The `config.json` switches that change the arithmetic, with the only value computed here.
FIXED_SWITCHES: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False}

# Hugging Face parameter name -> path in `Params`; {} stands for the layer number.
NAMES: Mapping[str, tuple[str, ...]] = {
    "model.embed_tokens.weight": ("embed",),
    "model.layers.{}.input_layernorm.weight": ("blocks", "{}", "ln_1"),
    "model.layers.{}.self_attn.q_proj.weight": ("blocks", "{}", "q"),
    "model.layers.{}.self_attn.k_proj.weight": ("blocks", "{}", "k"),
    "model.layers.{}.self_attn.v_proj.weight": ("blocks", "{}", "v"),
    "model.layers.{}.self_attn.o_proj.weight": ("blocks", "{}", "o"),
    "model.layers.{}.post_attention_layernorm.weight": ("blocks", "{}", "ln_2"),
    "model.layers.{}.mlp.gate_proj.weight": ("blocks", "{}", "gate"),
    "model.layers.{}.mlp.up_proj.weight": ("blocks", "{}", "up"),
    "model.layers.{}.mlp.down_proj.weight": ("blocks", "{}", "down"),
    "model.norm.weight": ("norm",),
    "lm_head.weight": ("head",),
}


def parse(raw: Mapping[str, Any]) -> LlamaConfig:
    """Return the shape in `config.json`, having checked that this module computes this model."""
    return parsed(raw, LlamaConfig, FIXED_SWITCHES)


def parsed(
    raw: Mapping[str, Any], kind: type[LlamaConfig], fixed: Mapping[str, Any]
) -> LlamaConfig:
    """Return the shape in `config.json` as an instance of `kind`. InputError for an unsupported
    one; `fixed`: the switches with their only supported values.
    """
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise InputError(f"has hidden_act {shown(activation)}; only silu is supported")
    check_switches(raw, {"partial_rotary_factor": 1.0, **fixed})
    # What an older file lacks, or has as null, follows from the rest.
    if raw.get("num_key_value_heads") is None:
        raw = {**raw, "num_key_value_heads": raw.get("num_attention_heads")}
    names = kind.size_names()
    if raw.get("head_dim") is not None:
        names.append("head_dim")
    sizes: dict[str, Any] = {name: positive_int(raw, name) for name in names}
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise InputError(f"has tie_word_embeddings {shown(tied)}; it must be true or false")
    turned = rope.parse(raw)
    return kind(
        **sizes,
        rms_norm_eps=fraction(raw, "rms_norm_eps", 1e-6),
        rope_theta=turned.theta,
        rope_kind=turned.kind,
        rope_factor=turned.factor,
        rope_low=turned.low,
        rope_high=turned.high,
        rope_context=turned.context,
        tie_word_embeddings=tied,
    )


def describe(config: LlamaConfig) -> dict[str, Any]:
    """Return `config.json` as the transformers library writes it for this shape."""
    own = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
    return described(config, "LlamaForCausalLM") | own


def described(config: LlamaConfig, name: str) -> dict[str, Any]:
    """Return the part of `config.json` that the transformers library writes for every family with
    this module's blocks; `name`: its name of the model's class.
    """
    shape = {
        field: value
        for field, value in config.shape().items()
        if not field.startswith("rope_") or field == "rope_theta"
    }
    return {
        "architectures": [name],
        "model_type": config.family,
        **shape,
        "rope_scaling": config.rotary.describe(),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }


FAMILY = Family(
    config=LlamaConfig,
    parse=parse,
    describe=describe,
    names=NAMES,
    prefix="model.",
    transposed=("q", "k", "v", "o", "gate", "up", "down", "head"),
    init=init_params,
    fold=fold,
    bounds=bounds,
    embeddings=token_table,
    embed=embed_tokens,
    angles=angles,
    attention=attention,
    mlp=mlp,
)
