"""GPT-2 in JAX: config, block, stack, head; bottom-up.

Written for unbatched positions [n, ...] so that prefill, drafting, verification and training
(through `jax.vmap`) run the same lines, on weights that were folded first (`fold`).

Source: Radford et al. 2019; numerics follow the `transformers` implementation (tied head,
tanh-approximated GELU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import Block, LayerBlock, attend, empty_block, prefix_layer, see
from models.ranges import Ranges
from protocols.functions.layers import append_rows, dense, look_up
from protocols.functions.nonlinear import activation_bits, check_norm, gelu, norm_high, rms_norm

Params = dict[str, Any]


@dataclass(frozen=True)
class GPT2Config(Ranges):
    """Shape of a GPT-2 model, in the words of its `config.json`, and the ranges of its activations
    on shares.
    """

    vocab_size: int
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
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def asdict(self) -> dict[str, int | float]:
        return asdict(self)


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
    - Logits are centred over the vocabulary: the same law, and a smaller spread.
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


def linear(x: Array, params: Params, label: str) -> Array:
    """x @ weight + bias; `label` names the matrix."""
    return dense(x, params["weight"], label=label) + params["bias"]


def attention(
    x: Array, layer: int, weights: Params, config: GPT2Config, past: LayerBlock | None,
    keys: Array, values: Array, at: Array | int, visible: Array,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Attention output [n, d] of the normalised rows `x` [n, d], the cache with their keys and
    values: [head, positions, head_dim] each, rows from `at` on written; and what left a range
    (int32).

    `visible` [n, positions] is the mask; `past` is the block of a prefix.
    """
    n = x.shape[0]
    query, key, value = (
        part.reshape(n, config.n_head, config.head_dim).transpose(1, 0, 2)
        for part in jnp.split(linear(x, weights["qkv"], f"h.{layer}.qkv"), 3, axis=-1)
    )
    keys, values = append_rows(keys, key, at), append_rows(values, value, at)
    blocks = [LayerBlock(keys, values, visible)]
    rows, outside = attend(
        query, [past, *blocks] if past is not None else blocks, config.largest_score
    )
    return linear(rows, weights["out"], f"h.{layer}.out"), keys, values, outside


def mlp(x: Array, layer: int, weights: Params, config: GPT2Config) -> Array:
    """Feed-forward layer of the normalised rows `x` [n, d]."""
    bits = activation_bits(config.largest_activation)
    h = gelu(linear(x, weights["fc"], f"h.{layer}.fc"), bits=bits)
    return linear(h, weights["proj"], f"h.{layer}.proj")


def embed_tokens(weights: Params, tokens: Array, positions: Array) -> Array:
    """Embedding [n, d] of token ids known in the clear."""
    return weights["wte"][tokens] + weights["wpe"][positions]


def embed_one_hot(weights: Params, one_hot: Array, positions: Array) -> Array:
    """Embedding [n, d] of secret tokens given as one-hot rows [n, vocab]; positions are public."""
    return look_up(one_hot, weights["wte"], label="wte") + weights["wpe"][positions]


def embed_one_hots(weights: Params, tokens: Array, positions: Array) -> Array:
    """The same with secret positions: one-hot rows [n, vocab] and [n, context]; one product."""
    table = jnp.concatenate([weights["wte"], weights["wpe"]])
    return look_up(jnp.concatenate([tokens, positions], axis=-1), table, label="wte, wpe")


def step(
    weights: Params,
    config: GPT2Config,
    x: Array,
    cache: Block,
    at: Array | int,
    visible: Array,
    prefix: Block | None = None,
    scale: float = 1.0,
    normalise: Callable[..., tuple[Array, Array]] = rms_norm,
) -> tuple[Array, Block, Array]:
    """The stack on n further positions, of folded weights: normalised rows [n, d], times `scale`,
    for `head`, the cache with their keys and values, and a count of what left the range of a
    function on shares (int32; see `protocols.functions.in_range`).

    `x` [n, d] is the embedding of the positions; their rows are written at `at`. `visible`
    [n, cache.positions] says what each sees, itself included (`see`); all of `prefix` is visible.
    A caller takes positions back by writing over their rows and not showing them.
    """
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

    for i, weights_i in enumerate(weights["blocks"]):
        past = prefix_layer(prefix, i, x.shape[0]) if prefix is not None else None
        with jax.named_scope("attention"):
            rows, keys[i], values[i], out = attention(
                norm(x), i, weights_i, config, past, keys[i], values[i], at, visible
            )
            x, outside = x + rows, outside + out
        with jax.named_scope("mlp"):
            x = x + mlp(norm(x), i, weights_i, config)
    return norm(x, scale), Block(tuple(keys), tuple(values)), outside


def head(weights: Params, rows: Array, scale: float = 1.0) -> Array:
    """Logits [n, vocab], times `scale`, of the rows that `step` gave with it."""
    with jax.named_scope("head"):
        weight, bias = weights["head"]["weight"], weights["head"]["bias"]
        return dense(rows, weight, label="head") + bias * scale


def logits(params: Params, config: GPT2Config, tokens: Array) -> Array:
    """Logits [n, vocab], less their mean over the vocabulary, of a whole token sequence [n] without
    a cache; weights not folded.
    """
    n = tokens.shape[0]
    weights = fold(params, config)
    x = embed_tokens(weights, tokens, jnp.arange(n))
    room = empty_block(config.n_layer, config.n_head, n, config.head_dim)
    rows, _, _ = step(weights, config, x, room, 0, see(0, n, n))
    return head(weights, rows)


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
