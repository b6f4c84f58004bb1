"""GPT-2 in JAX: config, folded weights, a block, the bounds of its activations, the checkpoint.

Written for unbatched rows [n, ...] so that prefill, drafting, verification and training (through
`jax.vmap`) run the same lines. The forward through all blocks is in `models.family`.

Source: Radford et al. 2019; numerics follow the `transformers` implementation (tied head,
tanh-approximated GELU).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import split_heads
from models.config_fields import check_switches, fraction, positive_int
from models.family import Family, Layer, Matrix, ModelConfig
from models.ranges import MORE_ROWS, Bounds, Linear, largest_score, of_site
from protocols.functions.activations import PIECES, activation_bits, gelu
from protocols.functions.layers import look_up
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

_GELU_ERROR = PIECES["gelu"].error  # on shares


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """Shape of a GPT-2 model, in the words of its `config.json`, and the ranges of its activations
    on shares.
    """

    family: ClassVar[str] = "gpt2"
    title: ClassVar[str] = "GPT-2"
    layers_name: ClassVar[str] = "n_layer"
    context_name: ClassVar[str] = "n_positions"
    width_names: ClassVar[tuple[str, ...]] = ("n_embd", "n_head")
    epsilon_name: ClassVar[str] = "layer_norm_epsilon"

    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_embd % self.n_head:
            raise ValueError("n_embd must be a multiple of n_head")

    @property
    def kv_heads(self) -> int:
        return self.n_head

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


class Norm(TypedDict):
    """A LayerNorm."""

    gain: Array  # [d]
    bias: Array  # [d]


class Block(TypedDict):
    """Parameters of a block."""

    ln_1: Norm
    qkv: Matrix  # [d, 3 d]
    out: Matrix  # [d, d]
    ln_2: Norm
    fc: Matrix  # [d, 4 d]
    proj: Matrix  # [4 d, d]


class GPT2Params(TypedDict):
    """Parameters of a model; the head is tied to `wte`."""

    wte: Array  # [vocab, d]
    wpe: Array  # [n_positions, d]
    blocks: list[Block]
    ln_f: Norm


class FoldedBlock(TypedDict):
    """Weights of a block as `fold` makes them."""

    qkv: Matrix  # [d, 3 d]
    out: Matrix  # [d, d]
    fc: Matrix  # [d, 4 d]
    proj: Matrix  # [4 d, d]


class GPT2Weights(TypedDict):
    """Weights of a model as `fold` makes them."""

    wte: Array  # [vocab, d]
    wpe: Array  # [n_positions, d]
    blocks: list[FoldedBlock]
    head: Matrix  # [d, vocab]


def init_params(config: GPT2Config, key: Array) -> GPT2Params:
    """Draw random parameters (float32) with GPT-2's initial scales."""
    d, std = config.n_embd, 0.02
    residual_std = std / np.sqrt(2 * config.n_layer)
    keys = iter(jax.random.split(key, 2 + 4 * config.n_layer))

    def normal(shape: tuple[int, ...], scale: float) -> Array:
        return scale * jax.random.normal(next(keys), shape, jnp.float32)

    def norm() -> Norm:
        return {"gain": jnp.ones(d), "bias": jnp.zeros(d)}

    def block() -> Block:
        return {
            "ln_1": norm(),
            "qkv": {"weight": normal((d, 3 * d), std), "bias": jnp.zeros(3 * d)},
            "out": {"weight": normal((d, d), residual_std), "bias": jnp.zeros(d)},
            "ln_2": norm(),
            "fc": {"weight": normal((d, 4 * d), std), "bias": jnp.zeros(4 * d)},
            "proj": {"weight": normal((4 * d, d), residual_std), "bias": jnp.zeros(d)},
        }

    return {
        "wte": normal((config.vocab_size, d), std),
        "wpe": normal((config.n_positions, d), std),
        "blocks": [block() for _ in range(config.n_layer)],
        "ln_f": norm(),
    }


def fold(params: GPT2Params, config: GPT2Config) -> GPT2Weights:
    """Fold parameters into weights that compute the same model in fewer operations; a plaintext
    computation of the provider's.

    - Gains and biases of the norms, and the attention's scale, go into the matrix that follows. The
      head is tied to the embedding.
    - All terms added to the residual stream are centred over its width, so that the stream has mean
      zero and LayerNorm is a division by the root mean square.
    - Logits are centred over the vocabulary: the distribution is the same and the spread smaller.
    - The residual stream is scaled by 2^-stream_shift, which the norms undo.
    """
    scale = 2.0**-config.stream_shift

    def after(norm: Norm, linear: Matrix) -> Matrix:
        return {
            "weight": norm["gain"][:, None] * linear["weight"],
            "bias": norm["bias"] @ linear["weight"] + linear["bias"],
        }

    def centred(x: Any, scale: float = 1.0) -> Any:
        return jax.tree.map(lambda w: (w - jnp.mean(w, axis=-1, keepdims=True)) * scale, x)

    def block(p: Block) -> FoldedBlock:
        each = np.repeat([config.head_dim**-0.5, 1.0, 1.0], config.n_embd).astype(np.float32)
        return {
            "qkv": jax.tree.map(lambda w: w * each, after(p["ln_1"], p["qkv"])),
            "out": centred(p["out"], scale),
            "fc": after(p["ln_2"], p["fc"]),
            "proj": centred(p["proj"], scale),
        }

    tied: Matrix = {"weight": params["wte"].T, "bias": jnp.zeros(config.vocab_size, jnp.float32)}
    return {
        "wte": centred(params["wte"], scale),
        "wpe": centred(params["wpe"], scale),
        "blocks": [block(p) for p in params["blocks"]],
        "head": centred(after(params["ln_f"], tied)),
    }


def embed(
    weights: GPT2Weights,
    config: GPT2Config,
    tokens: Array,
    positions: Array,
    *,
    start: Array | int = 0,
    hidden: bool = False,
) -> Array:
    """Embed tokens; see `Family`. Tokens and positions that are both secret take one product."""
    if tokens.ndim == 1:
        return weights["wte"][tokens] + weights["wpe"][positions + start]
    if not hidden:
        return look_up(tokens, weights["wte"], label="wte") + weights["wpe"][positions + start]
    one_hot = jax.nn.one_hot(positions, config.n_positions, dtype=jnp.float32)
    label, from_start = "wte, wpe", weights["wpe"]
    if not isinstance(start, int) or start:
        label, from_start = "wte, wpe from a start", jnp.roll(from_start, -start, axis=0)
    table = jnp.concatenate([weights["wte"], from_start])
    return look_up(jnp.concatenate([tokens, one_hot], axis=-1), table, label=label)


def _embeddings(weights: GPT2Weights) -> tuple[Any, Any]:
    return weights["wte"], weights["wpe"]


def attention(x: Array, layer: Layer) -> Array:
    """Return what attention adds to the residual stream; see `Family`."""
    query, key, value = (
        split_heads(part, layer.lanes, layer.config.n_head)
        for part in jnp.split(layer.linear("qkv", x), 3, axis=-1)
    )
    layer.write(key, value)
    return layer.linear("out", layer.attend(query))


def mlp(x: Array, layer: Layer) -> Array:
    """Return what the feed-forward layer adds to the residual stream; see `Family`."""
    bits = activation_bits(of_site(layer.config.largest_activation, layer.number))
    return layer.inner("proj", gelu(layer.linear("fc", x), bits=bits))


# ---- what weights bound


def bounds(block: FoldedBlock, config: GPT2Config) -> Bounds:
    """Return the largest sizes that activations of a block can reach; see `Family`."""
    d, heads = config.n_embd, config.n_head
    matrices = block["qkv"], block["out"], block["fc"], block["proj"]
    qkv, out, fc, proj = map(Linear.of, matrices)
    query, key, value = qkv.columns(3)
    by_head = zip(query.columns(heads), key.columns(heads), strict=True)
    reach = value.largest(d)
    # Of a head: a mean of its values.
    attended = math.hypot(*(v.longest(d) for v in value.columns(heads)))
    # |gelu(x)| <= |x|
    inner = fc.longest(d) + _GELU_ERROR * math.sqrt(4 * d)
    return Bounds(
        activation=fc.largest(d),
        score=max(largest_score(q, k, d) for q, k in by_head),
        linear=max(qkv.largest_product(d), fc.largest_product(d)),
        attended=out.largest_product(attended**2),
        inner=proj.largest_product(inner**2),
        per_length=proj.largest_product(1.0),
        # Weights of attention are up to one each until they are normalised.
        product=reach * (config.n_positions + MORE_ROWS),
        gated=0.0,
        value=reach,
    )


# ---- the checkpoint

# The `config.json` switches that change the arithmetic, with the only value computed here.
FIXED_SWITCHES: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# The transformers library takes a size by this name, too, and rather than by its own one.
_OTHER_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")

# Hugging Face parameter name -> path in `Params`; {} stands for the layer number.
NAMES: Mapping[str, tuple[str, ...]] = {
    "transformer.wte.weight": ("wte",),
    "transformer.wpe.weight": ("wpe",),
    "transformer.h.{}.ln_1.weight": ("blocks", "{}", "ln_1", "gain"),
    "transformer.h.{}.ln_1.bias": ("blocks", "{}", "ln_1", "bias"),
    "transformer.h.{}.attn.c_attn.weight": ("blocks", "{}", "qkv", "weight"),
    "transformer.h.{}.attn.c_attn.bias": ("blocks", "{}", "qkv", "bias"),
    "transformer.h.{}.attn.c_proj.weight": ("blocks", "{}", "out", "weight"),
    "transformer.h.{}.attn.c_proj.bias": ("blocks", "{}", "out", "bias"),
    "transformer.h.{}.ln_2.weight": ("blocks", "{}", "ln_2", "gain"),
    "transformer.h.{}.ln_2.bias": ("blocks", "{}", "ln_2", "bias"),
    "transformer.h.{}.mlp.c_fc.weight": ("blocks", "{}", "fc", "weight"),
    "transformer.h.{}.mlp.c_fc.bias": ("blocks", "{}", "fc", "bias"),
    "transformer.h.{}.mlp.c_proj.weight": ("blocks", "{}", "proj", "weight"),
    "transformer.h.{}.mlp.c_proj.bias": ("blocks", "{}", "proj", "bias"),
    "transformer.ln_f.weight": ("ln_f", "gain"),
    "transformer.ln_f.bias": ("ln_f", "bias"),
}


def parse(raw: Mapping[str, Any]) -> GPT2Config:
    """Return the shape in `config.json`, having checked that this module computes this model."""
    activation = raw.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise InputError(f"has activation_function {shown(activation)}; only gelu_new is supported")
    check_switches(raw, FIXED_SWITCHES)
    for other, name in _OTHER_NAMES.items():
        if other in raw and raw[other] != raw.get(name):
            raise InputError(
                f"has {other} = {shown(raw[other])} beside {name} = {shown(raw.get(name))}; "
                "leave one of them out"
            )
    sizes: dict[str, Any] = {name: positive_int(raw, name) for name in GPT2Config.size_names()}
    if sizes["n_embd"] % sizes["n_head"]:
        raise InputError(
            f"has n_embd {sizes['n_embd']} not divisible by n_head {sizes['n_head']}; copy it again"
        )
    inner = raw.get("n_inner")
    if inner is not None and inner != 4 * sizes["n_embd"]:
        raise InputError(f"has n_inner {shown(inner)}; only 4 * n_embd is supported")
    epsilon = fraction(raw, "layer_norm_epsilon", 1e-5)
    return GPT2Config(**sizes, layer_norm_epsilon=epsilon)


def describe(config: GPT2Config) -> dict[str, Any]:
    """Return `config.json` as the transformers library writes it for this shape."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **config.shape(),
        "n_ctx": config.n_positions,
        "n_inner": None,
        "activation_function": "gelu_new",
        "initializer_range": 0.02,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "use_cache": True,
    }


FAMILY = Family(
    config=GPT2Config,
    parse=parse,
    describe=describe,
    names=NAMES,
    prefix="transformer.",
    init=init_params,
    fold=fold,
    bounds=bounds,
    embeddings=_embeddings,
    embed=embed,
    attention=attention,
    mlp=mlp,
)
