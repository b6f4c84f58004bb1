"""GPT-2 in JAX: config, checkpoint, block, stack, head; bottom-up.

Written for unbatched rows [n, ...] so that prefill, drafting, verification and training (through
`jax.vmap`) run the same lines, on weights that were folded first (`fold`).

Source: Radford et al. 2019; numerics follow the `transformers` implementation (tied head,
tanh-approximated GELU).
"""

from __future__ import annotations

import math
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
    largest_score,
    linear,
    longest,
)
from protocols.functions.layers import append_rows, dense, look_up
from protocols.functions.nonlinear import activation_bits, check_norm, gelu, norm_high, rms_norm
from spu_llm.core.errors import InputError

_GELU_ERROR = 0.002  # on shares


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """Shape of a GPT-2 model, in the words of its `config.json`, and the ranges of its activations
    on shares.
    """

    family: ClassVar[str] = "gpt2"
    layers_name: ClassVar[str] = "n_layer"
    context_name: ClassVar[str] = "n_positions"
    width_names: ClassVar[tuple[str, ...]] = ("n_embd", "n_head")

    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.vocab_size, self.n_positions, self.n_embd, self.n_layer, self.n_head)
        # Far above every GPT-2, and small enough not to exhaust memory while tracing.
        if not all(1 <= n <= 1_000_000 for n in sizes) or self.n_layer > 1000:
            raise ValueError("a GPT-2's sizes must be positive and reasonable")
        if self.n_embd % self.n_head:
            raise ValueError("n_embd must be a multiple of n_head")
        if not 0 < self.layer_norm_epsilon < 1:
            raise ValueError("layer_norm_epsilon must be between 0 and 1")
        check_norm(self.n_embd, self.norm_epsilon, self.norm_low, self.norm_high)

    @property
    def norm_epsilon(self) -> float:
        """What is added to mean squares of the scaled residual stream."""
        return self.layer_norm_epsilon * 4.0**-self.stream_shift

    @property
    def kv_heads(self) -> int:
        return self.n_head

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def init_params(config: GPT2Config, key: Array) -> Params:
    """Random parameters (float32) with GPT-2's initial scales."""
    d, std = config.n_embd, 0.02
    residual_std = std / np.sqrt(2 * config.n_layer)
    keys = iter(jax.random.split(key, 2 + 4 * config.n_layer))

    def normal(shape: tuple[int, ...], scale: float) -> Array:
        return scale * jax.random.normal(next(keys), shape, jnp.float32)

    def norm() -> Params:
        return {"gain": jnp.ones(d), "bias": jnp.zeros(d)}

    def block() -> Params:
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


def fold(params: Params, config: GPT2Config) -> Params:
    """The same model in fewer operations, the provider's own plaintext work.

    - Gains and biases of the norms, and the attention's scale, go into the matrix that follows. The
      head is tied to the embedding.
    - Whatever is added to the residual stream is centred over its width, so that the stream has
      mean zero and LayerNorm is a division by the root mean square.
    - Logits are centred over the vocabulary: the same distribution, and a smaller spread.
    - The residual stream is scaled by 2^-stream_shift, which the norms take out again.
    """
    scale = 2.0**-config.stream_shift

    def after(norm: Params, linear: Params) -> Params:
        return {
            "weight": norm["gain"][:, None] * linear["weight"],
            "bias": norm["bias"] @ linear["weight"] + linear["bias"],
        }

    def centred(x: Any, scale: float = 1.0) -> Any:
        return jax.tree.map(lambda w: (w - jnp.mean(w, axis=-1, keepdims=True)) * scale, x)

    def block(p: Params) -> Params:
        each = np.repeat([config.head_dim**-0.5, 1.0, 1.0], config.n_embd).astype(np.float32)
        return {
            "qkv": jax.tree.map(lambda w: w * each, after(p["ln_1"], p["qkv"])),
            "out": centred(p["out"], scale),
            "fc": after(p["ln_2"], p["fc"]),
            "proj": centred(p["proj"], scale),
        }

    tied = {"weight": params["wte"].T, "bias": jnp.zeros(config.vocab_size, jnp.float32)}
    return {
        "wte": centred(params["wte"], scale),
        "wpe": centred(params["wpe"], scale),
        "blocks": [block(p) for p in params["blocks"]],
        "head": centred(after(params["ln_f"], tied)),
    }


def _linear(x: Array, params: Params, label: str) -> Array:
    """x @ weight + bias; `label` names the matrix."""
    return dense(x, params["weight"], label=label) + params["bias"]


def attention(
    x: Array, layer: int, weights: Params, config: GPT2Config, prefix: Block | None,
    keys: Array, values: Array, rows: Rows,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Attention output [L n, d] of the normalised rows `x` [L n, d], one layer's cache with their
    keys and values ([L head, position, head_dim] each), and what left a range (int32).
    """
    lanes = rows.visible.shape[0]
    query, key, value = (
        split_heads(part, lanes, config.n_head)
        for part in jnp.split(_linear(x, weights["qkv"], f"h.{layer}.qkv"), 3, axis=-1)
    )
    keys, values = append_rows(keys, key, rows.at), append_rows(values, value, rows.at)
    blocks = layer_blocks(prefix, layer, keys, values, rows.visible)
    out, outside = attend(query, blocks, config.largest_score)
    return _linear(join_heads(out, lanes), weights["out"], f"h.{layer}.out"), keys, values, outside


def mlp(x: Array, layer: int, weights: Params, config: GPT2Config) -> Array:
    """Feed-forward layer of the normalised rows `x` [n, d]."""
    bits = activation_bits(config.largest_activation)
    h = gelu(_linear(x, weights["fc"], f"h.{layer}.fc"), bits=bits)
    return _linear(h, weights["proj"], f"h.{layer}.proj")


def embed(
    weights: Params, config: GPT2Config, tokens: Array, positions: Array, *, hidden: bool = False
) -> Array:
    """See `Family`. Tokens and positions that are both secret take one product."""
    if tokens.ndim == 1:
        return weights["wte"][tokens] + weights["wpe"][positions]
    if not hidden:
        return look_up(tokens, weights["wte"], label="wte") + weights["wpe"][positions]
    one_hot = jax.nn.one_hot(positions, config.n_positions, dtype=jnp.float32)
    table = jnp.concatenate([weights["wte"], weights["wpe"]])
    return look_up(jnp.concatenate([tokens, one_hot], axis=-1), table, label="wte, wpe")


def forward(
    weights: Params,
    config: GPT2Config,
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

    def norm(x: Array, gain: float = 1.0) -> Array:
        nonlocal outside
        normed, out = normalise(
            x, epsilon=config.norm_epsilon, gain=gain,
            low=config.norm_low, high=min(config.norm_high, norm_high(config.n_embd)),
        )  # fmt: skip
        outside = outside + out
        return normed

    for i, block in enumerate(weights["blocks"]):
        with jax.named_scope("attention"):
            out, keys[i], values[i], left = attention(
                norm(x), i, block, config, prefix, keys[i], values[i], rows
            )
            x, outside = x + out, outside + left
        with jax.named_scope("mlp"):
            x = x + mlp(norm(x), i, block, config)
    return norm(x, scale), Block(tuple(keys), tuple(values)), outside


def head(weights: Params, rows: Array, scale: float = 1.0) -> Array:
    """Logits [n, vocab], times `scale`, of the rows that `forward` gave with it."""
    with jax.named_scope("head"):
        weight, bias = weights["head"]["weight"], weights["head"]["bias"]
        return dense(rows, weight, label="head") + bias * scale


# ---- what weights bound


def bounds(weights: Params, config: GPT2Config) -> Bounds:
    """For every input whatever."""
    d, m = config.n_embd, config.n_head
    blocks = [{name: linear(layer) for name, layer in b.items()} for b in weights["blocks"]]
    last = linear(weights["head"])
    # |gelu(x)| <= |x|
    inner = [longest(b["fc"], d) + _GELU_ERROR * math.sqrt(4 * d) for b in blocks]
    values = [largest(b["qkv"], d) for b in blocks]
    squares: dict[str, list[float]] = {  # of the length of a row that goes in, by layer
        "qkv": [d] * len(blocks),
        "out": [d * v**2 for v in values],
        "fc": [d] * len(blocks),
        "proj": [h**2 for h in inner],
    }
    products = [
        largest_product(b[name], square)
        for name, by_layer in squares.items()
        for b, square in zip(blocks, by_layer, strict=True)
    ]
    scores = [
        largest_score(query, key, d)
        for b in blocks
        for query, key, _ in zip(*(_heads(part, m) for part in _thirds(b["qkv"])), strict=True)
    ]
    return Bounds(
        activation=max(largest(b["fc"], d) for b in blocks),
        score=max(scores),
        spread=2 * largest(last, d),
        linear=max(*products, largest_product(last, d)),
        entry=float(max(np.max(np.abs(weights[name])) for name in ("wte", "wpe"))),
        # Weights of attention are up to one each until they are normalised.
        product=max(values) * (config.n_positions + MORE_ROWS),
        value=max(values),
    )


def _thirds(qkv: Linear) -> list[Linear]:
    """Queries, keys and values apart."""
    return list(zip(*(np.split(part, 3, axis=-1) for part in qkv), strict=True))


def _heads(layer: Linear, count: int) -> list[Linear]:
    """Heads apart."""
    return list(zip(*(np.split(part, count, axis=-1) for part in layer), strict=True))


def _embeddings(weights: Params) -> tuple[Any, Any]:
    return weights["wte"], weights["wpe"]


# ---- the checkpoint

# The `config.json` switches that change the arithmetic, with the only value computed here.
FIXED_SWITCHES: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")

# Hugging Face parameter name -> path in `Params`; {} stands for the layer number.
HF_NAMES: Mapping[str, tuple[str, ...]] = {
    "wte.weight": ("wte",),
    "wpe.weight": ("wpe",),
    "h.{}.ln_1.weight": ("blocks", "{}", "ln_1", "gain"),
    "h.{}.ln_1.bias": ("blocks", "{}", "ln_1", "bias"),
    "h.{}.attn.c_attn.weight": ("blocks", "{}", "qkv", "weight"),
    "h.{}.attn.c_attn.bias": ("blocks", "{}", "qkv", "bias"),
    "h.{}.attn.c_proj.weight": ("blocks", "{}", "out", "weight"),
    "h.{}.attn.c_proj.bias": ("blocks", "{}", "out", "bias"),
    "h.{}.ln_2.weight": ("blocks", "{}", "ln_2", "gain"),
    "h.{}.ln_2.bias": ("blocks", "{}", "ln_2", "bias"),
    "h.{}.mlp.c_fc.weight": ("blocks", "{}", "fc", "weight"),
    "h.{}.mlp.c_fc.bias": ("blocks", "{}", "fc", "bias"),
    "h.{}.mlp.c_proj.weight": ("blocks", "{}", "proj", "weight"),
    "h.{}.mlp.c_proj.bias": ("blocks", "{}", "proj", "bias"),
    "ln_f.weight": ("ln_f", "gain"),
    "ln_f.bias": ("ln_f", "bias"),
}


def parse(raw: Mapping[str, Any]) -> GPT2Config:
    """The shape in `config.json`, after checking that this module computes this very model."""
    activation = raw.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise InputError(f"has activation_function {activation!r}; only gelu_new is supported")
    check_switches(raw, FIXED_SWITCHES)
    sizes = {
        name: positive_int(raw, name)
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    }
    if sizes["n_embd"] % sizes["n_head"]:
        raise InputError(
            f"has n_embd {sizes['n_embd']} not divisible by n_head {sizes['n_head']}; copy it again"
        )
    inner = raw.get("n_inner")
    if inner is not None and inner != 4 * sizes["n_embd"]:
        raise InputError(f"has n_inner {inner}; only 4 * n_embd is supported")
    epsilon = fraction(raw, "layer_norm_epsilon", 1e-5)
    return GPT2Config(**sizes, layer_norm_epsilon=epsilon)


def describe(config: GPT2Config) -> dict[str, Any]:
    """`config.json` as the transformers library writes it for this shape."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.n_positions,
        "n_ctx": config.n_positions,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "initializer_range": 0.02,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def tensors(config: GPT2Config) -> Iterator[Tensor]:
    """Every parameter of the model."""
    d = config.n_embd
    outside = {"wte": (config.vocab_size, d), "wpe": (config.n_positions, d)}
    linears = {"qkv": (d, 3 * d), "out": (d, d), "fc": (d, 4 * d), "proj": (4 * d, d)}
    for name, path in HF_NAMES.items():
        for layer in range(config.n_layer) if "{}" in name else (0,):
            of = path[0] if len(path) == 1 else path[-2]
            shape = outside.get(of, linears.get(of, (d,)))  # of a norm: (d,)
            if path[-1] == "bias":
                shape = shape[-1:]
            of_layer = tuple(part.format(layer) for part in path)
            yield Tensor(name.format(layer), of_layer, shape)


FAMILY = Family(
    tag="gpt2",
    config=GPT2Config,
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
    prefix="transformer.",
    copies={"lm_head.weight": "wte.weight"},
)
