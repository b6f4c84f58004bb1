"""LLaMA in JAX: config, checkpoint, block, stack, head; bottom-up.

As `models.gpt2` on weights that were folded first (`fold`), with root-mean-square norms, rotary
positions in every layer, queries in groups that share a head of keys and values, and a gated
feed-forward layer; no biases.

Source: Touvron et al. 2023; Shazeer 2020 (SwiGLU), Ainslie et al. 2023 (grouped queries); numerics
follow the `transformers` implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import Block, Rows, attend, join_heads, layer_blocks, split_heads
from models.family import (
    Family,
    ModelConfig,
    Params,
    Tensor,
    check_switches,
    fraction,
    positive_int,
)
from models.ranges import (
    MORE_ROWS,
    Bounds,
    Linear,
    largest,
    largest_product,
    largest_turned_score,
    linear,
    longest,
)
from protocols.functions.layers import append_rows, dense, look_up, times
from protocols.functions.nonlinear import activation_bits, check_norm, norm_high, rms_norm, silu
from protocols.functions.rotary import rotate
from spu_llm.core.errors import InputError

_SILU_ERROR = 0.0025  # on shares


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """Shape of a LLaMA model, in the words of its `config.json`, and the ranges of its activations
    on shares. `head_dim` 0: hidden_size / num_attention_heads.
    """

    family: ClassVar[str] = "llama"
    layers_name: ClassVar[str] = "num_hidden_layers"
    context_name: ClassVar[str] = "max_position_embeddings"
    width_names: ClassVar[tuple[str, ...]] = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    )  # fmt: skip

    max_position_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (
            self.vocab_size, self.max_position_embeddings, self.hidden_size,
            self.intermediate_size, self.num_hidden_layers, self.num_attention_heads,
            self.num_key_value_heads,
        )  # fmt: skip
        # Far above every LLaMA, and small enough not to exhaust memory while tracing.
        if not all(1 <= n <= 1_000_000 for n in sizes) or self.num_hidden_layers > 1000:
            raise ValueError("a LLaMA's sizes must be positive and reasonable")
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
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError("rms_norm_eps must be between 0 and 1")
        if not 1 < self.rope_theta < 1e12:
            raise ValueError("rope_theta must be above 1, and below 1e12")
        check_norm(self.hidden_size, self.norm_epsilon, self.norm_low, self.norm_high)

    @property
    def norm_epsilon(self) -> float:
        """What is added to mean squares of the scaled residual stream."""
        return self.rms_norm_eps * 4.0**-self.stream_shift

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def groups(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def head_widths(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values of all heads."""
        few = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, few, few


def init_params(config: LlamaConfig, key: Array) -> Params:
    """Random parameters (float32) with the initial scale of `transformers`."""
    d, inner, std = config.hidden_size, config.intermediate_size, 0.02
    queries, few, _ = config.head_widths
    keys = iter(jax.random.split(key, 2 + 7 * config.num_hidden_layers))

    def normal(*shape: int) -> Array:
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    def block() -> Params:
        return {
            "ln_1": jnp.ones(d),
            "q": normal(d, queries), "k": normal(d, few), "v": normal(d, few),
            "o": normal(queries, d),
            "ln_2": jnp.ones(d),
            "gate": normal(d, inner), "up": normal(d, inner), "down": normal(inner, d),
        }  # fmt: skip

    params = {
        "embed": normal(config.vocab_size, d),
        "blocks": [block() for _ in range(config.num_hidden_layers)],
        "norm": jnp.ones(d),
    }
    if not config.tie_word_embeddings:
        params["head"] = normal(d, config.vocab_size)
    return params


def fold(params: Params, config: LlamaConfig) -> Params:
    """The same model in fewer operations, the provider's own plaintext work.

    - Gains of the norms, and the attention's scale, go into the matrix that follows. Matrices of
      one input become one.
    - Logits are centred over the vocabulary: the same law, and a smaller spread.
    - The residual stream is scaled by 2^-stream_shift, which the norms take out again.
    """
    scale = 2.0**-config.stream_shift

    def after(gain: Any, *weights: Any) -> Params:
        return {"weight": gain[:, None] * jnp.concatenate(weights, axis=-1)}

    def block(p: Params) -> Params:
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
def turns(config: LlamaConfig) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (float32 [position, head_dim / 2]) that positions turn pairs by. Constants
    of a program, so that parties whose tables differ notice it.
    """
    pairs = np.arange(config.head_dim // 2)
    frequencies = config.rope_theta ** (-2.0 * pairs / config.head_dim)
    angles = np.outer(np.arange(config.max_position_embeddings), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _linear(x: Array, params: Params, label: str) -> Array:
    """x @ weight; `label` names the matrix."""
    return dense(x, params["weight"], label=label)


def attention(
    x: Array, layer: int, weights: Params, config: LlamaConfig, prefix: Block | None,
    keys: Array, values: Array, rows: Rows, turn: tuple[Array, Array],
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Attention output [L n, d] of the normalised rows `x` [L n, d], one layer's cache with their
    keys and values ([L kv_head, position, head_dim] each), and what left a range (int32). `turn`:
    cosines and sines of the rows, [L n, head_dim / 2].
    """
    lanes, n, _ = rows.visible.shape
    heads, few, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv = _linear(x, weights["qkv"], f"h.{layer}.qkv")
    # Queries and keys are turned in one go.
    turning, value = jnp.split(qkv, [(heads + few) * size], axis=-1)
    turned = rotate(
        turning.reshape(lanes * n, heads + few, size), *turn, hidden=rows.hidden
    ).reshape(turning.shape)
    query, key = jnp.split(turned, [heads * size], axis=-1)
    key, value = split_heads(key, lanes, few), split_heads(value, lanes, few)
    keys, values = append_rows(keys, key, rows.at), append_rows(values, value, rows.at)
    # The rows of all query heads of a group stand one after the other.
    grouped = split_heads(query, lanes, heads).reshape(lanes * few, config.groups * n, size)
    blocks = layer_blocks(prefix, layer, keys, values, rows.visible, config.groups)
    out, outside = attend(grouped, blocks, config.largest_score)
    joined = join_heads(out.reshape(lanes * heads, n, size), lanes)
    return _linear(joined, weights["out"], f"h.{layer}.out"), keys, values, outside


def mlp(x: Array, layer: int, weights: Params, config: LlamaConfig) -> Array:
    """Feed-forward layer of the normalised rows `x` [n, d]: down(silu(gate(x)) * up(x))."""
    bits = activation_bits(config.largest_activation)
    gate, up = jnp.split(_linear(x, weights["gate_up"], f"h.{layer}.gate_up"), 2, axis=-1)
    return _linear(times(silu(gate, bits=bits), up), weights["down"], f"h.{layer}.down")


def embed(
    weights: Params, config: LlamaConfig, tokens: Array, positions: Array, *, hidden: bool = False
) -> Array:
    """See `Family`. Positions enter in every block instead."""
    if tokens.ndim == 1:
        return weights["embed"][tokens]
    return look_up(tokens, weights["embed"], label="embed")


def forward(
    weights: Params,
    config: LlamaConfig,
    x: Array,
    rows: Rows,
    cache: Block,
    prefix: Block | None = None,
    scale: float = 1.0,
    normalise: Callable[..., tuple[Array, Array]] = rms_norm,
) -> tuple[Array, Block, Array]:
    """See `Family`. A caller takes rows back by writing over them and not showing them."""
    keys, values = list(cache.keys), list(cache.values)
    outside = jnp.int32(0)
    cos, sin = (jnp.asarray(table)[rows.positions.reshape(-1)] for table in turns(config))

    def norm(x: Array, gain: float = 1.0) -> Array:
        nonlocal outside
        normed, out = normalise(
            x, epsilon=config.norm_epsilon, gain=gain,
            low=config.norm_low, high=min(config.norm_high, norm_high(config.hidden_size)),
        )  # fmt: skip
        outside = outside + out
        return normed

    for i, block in enumerate(weights["blocks"]):
        with jax.named_scope("attention"):
            out, keys[i], values[i], left = attention(
                norm(x), i, block, config, prefix, keys[i], values[i], rows, (cos, sin)
            )
            x, outside = x + out, outside + left
        with jax.named_scope("mlp"):
            x = x + mlp(norm(x), i, block, config)
    return norm(x, scale), Block(tuple(keys), tuple(values)), outside


def head(weights: Params, rows: Array, scale: float = 1.0) -> Array:
    """Logits [n, vocab] of the rows that `forward` gave; without biases they have its `scale`."""
    with jax.named_scope("head"):
        return _linear(rows, weights["head"], "head")


# ---- what weights bound


def bounds(weights: Params, config: LlamaConfig) -> Bounds:
    """For every input whatever."""
    d, last = config.hidden_size, linear(weights["head"])
    blocks = [_bounds_of_block(b, config) for b in weights["blocks"]]
    return Bounds(
        activation=max(b.activation for b in blocks),
        score=max(b.score for b in blocks),
        spread=2 * largest(last, d),
        linear=max(*(b.linear for b in blocks), largest_product(last, d)),
        entry=float(np.max(np.abs(weights["embed"]))),
        product=max(b.product for b in blocks),
        value=max(b.value for b in blocks),
    )


def _bounds_of_block(block: Params, config: LlamaConfig) -> Bounds:
    """Of one block alone: no `spread` or `entry`."""
    d = config.hidden_size
    qkv, out, gate_up, down = (linear(block[name]) for name in ("qkv", "out", "gate_up", "down"))
    queries, few, _ = config.head_widths
    query, key, value = _split(qkv, [queries, queries + few])
    gate, up = _split(gate_up, 2)
    reach = largest(value, d)
    # |silu(x)| <= |x|
    gated = largest(gate, d) + _SILU_ERROR
    products = (
        largest_product(qkv, d),
        largest_product(out, queries * reach**2),
        largest_product(gate_up, d),
        largest_product(down, (gated * longest(up, d)) ** 2),
    )
    by_head = _split(query, config.num_attention_heads)
    shared = [h for h in _split(key, config.num_key_value_heads) for _ in range(config.groups)]
    return Bounds(
        activation=largest(gate, d),
        score=max(largest_turned_score(q, k, d) for q, k in zip(by_head, shared, strict=True)),
        spread=0.0,
        linear=max(products),
        entry=0.0,
        # Weights of attention are up to one each until they are normalised.
        product=max(
            reach * (config.max_position_embeddings + MORE_ROWS), gated * largest(up, d)
        ),
        value=reach,
    )


def _split(layer: Linear, parts: int | list[int]) -> list[Linear]:
    """Columns apart, as `np.split` does."""
    return list(zip(*(np.split(part, parts, axis=-1) for part in layer), strict=True))


def _embeddings(weights: Params) -> tuple[Any, Any]:
    return weights["embed"], np.zeros((1, weights["embed"].shape[1]), np.float32)


# ---- the checkpoint

# The `config.json` switches that change the arithmetic, with the only value computed here.
FIXED_SWITCHES: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "rope_parameters": None,  # what later releases have in place of rope_theta and rope_scaling
}

# Hugging Face parameter name -> path in `Params`; {} stands for the layer number.
HF_NAMES: Mapping[str, tuple[str, ...]] = {
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
    """The shape in `config.json`, after checking that this module computes this very model."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise InputError(f"has hidden_act {activation!r}; only silu is supported")
    check_switches(raw, FIXED_SWITCHES)
    sizes = {
        name: positive_int(raw, name)
        for name in (
            "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
            "num_hidden_layers", "num_attention_heads",
        )
    }  # fmt: skip
    # What an older file lacks, or has as null, follows from the rest.
    sizes |= {"num_key_value_heads": sizes["num_attention_heads"]}
    for name in ("num_key_value_heads", "head_dim"):
        if raw.get(name) is not None:
            sizes[name] = positive_int(raw, name)
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise InputError(f"has tie_word_embeddings {tied!r}; it must be true or false")
    theta = raw.get("rope_theta", 10000.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise InputError(f"has rope_theta {theta!r}; it must be a number")
    return LlamaConfig(
        **sizes,
        rms_norm_eps=fraction(raw, "rms_norm_eps", 1e-6),
        rope_theta=float(theta),
        tie_word_embeddings=tied,
    )


def describe(config: LlamaConfig) -> dict[str, Any]:
    """`config.json` as the transformers library writes it for this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def tensors(config: LlamaConfig) -> Iterator[Tensor]:
    """Every parameter of the model; matrices are stored as [out, in]."""
    d, inner = config.hidden_size, config.intermediate_size
    queries, few, _ = config.head_widths
    linears = {
        "q": (d, queries), "k": (d, few), "v": (d, few), "o": (queries, d),
        "gate": (d, inner), "up": (d, inner), "down": (inner, d), "head": (d, config.vocab_size),
    }  # fmt: skip
    for name, path in HF_NAMES.items():
        of = path[-1]
        if of == "head" and config.tie_word_embeddings:
            continue
        # The others: the embedding, and gains of norms.
        shape = linears.get(of, (config.vocab_size, d) if of == "embed" else (d,))
        for layer in range(config.num_hidden_layers) if "{}" in name else (0,):
            place = tuple(part.format(layer) for part in path)
            yield Tensor(name.format(layer), place, shape, of in linears)


FAMILY = Family(
    tag="llama",
    config=LlamaConfig,
    parse=parse,
    describe=describe,
    tensors=tensors,
    init=init_params,
    fold=fold,
    bounds=bounds,
    embeddings=_embeddings,
    embed=embed,
    forward=forward,
    head=head,
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)
