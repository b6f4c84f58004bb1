"""GPT-2 in JAX: config, block, stack, head; bottom-up.

Written for unbatched positions [n, ...] so that prefill, drafting, verification and training
(through `jax.vmap`) run the same lines. LayerNorm gains and biases are folded into the matrix that
follows them: with private weights the fold is the provider's own plaintext work.

Source: Radford et al. 2019; numerics follow the `transformers` implementation (tied head,
tanh-approximated GELU).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import Block, LayerBlock, attend, causal, visible_below, write_rows
from protocols.nonlinear import gelu

Params = dict[str, Any]


@dataclass(frozen=True)
class GPT2Config:
    """Shape of a GPT-2 model, in the words of its `config.json`."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.n_positions, self.n_embd, self.n_layer, self.n_head)
        # Far above every GPT-2, and small enough not to exhaust memory while tracing.
        if not all(1 <= n <= 1_000_000 for n in sizes) or self.n_layer > 1000:
            raise ValueError("a GPT-2's sizes must be positive and reasonable")
        if self.n_embd % self.n_head:
            raise ValueError("n_embd must be a multiple of n_head")
        if not 0 < self.layer_norm_epsilon < 1:
            raise ValueError("layer_norm_epsilon must be between 0 and 1")

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


def normalize(x: Array, epsilon: float) -> Array:
    """Rows of `x` [n, d] with mean 0 and variance 1."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon)


def normed_linear(x: Array, norm: Params, linear: Params) -> Array:
    """`(x * gain + bias) @ weight + bias` for normalised `x`, with the gain inside the weight."""
    weight = norm["gain"][:, None] * linear["weight"]
    return x @ weight + (norm["bias"] @ linear["weight"] + linear["bias"])


def attention(
    x: Array, params: Params, config: GPT2Config, past: Sequence[LayerBlock], visible: Array
) -> tuple[Array, Array, Array]:
    """Attention output, keys and values of the normalised rows `x` [n, d].

    `past` holds the blocks before the current positions; `visible` [n, n] is the mask among them.
    Keys and values come back as [head, n, head_dim].
    """
    n = x.shape[0]
    scale = np.repeat([config.head_dim**-0.5, 1.0, 1.0], config.n_embd).astype(np.float32)
    qkv = {"weight": params["qkv"]["weight"] * scale, "bias": params["qkv"]["bias"] * scale}
    query, key, value = (
        part.reshape(n, config.n_head, config.head_dim)
        for part in jnp.split(normed_linear(x, params["ln_1"], qkv), 3, axis=-1)
    )
    key, value = key.transpose(1, 0, 2), value.transpose(1, 0, 2)
    out = attend(query, [*past, LayerBlock(key, value, visible)])
    return out @ params["out"]["weight"] + params["out"]["bias"], key, value


def mlp(x: Array, params: Params) -> Array:
    """Feed-forward layer of the normalised rows `x` [n, d]."""
    h = gelu(normed_linear(x, params["ln_2"], params["fc"]))
    return h @ params["proj"]["weight"] + params["proj"]["bias"]


def embed_tokens(params: Params, tokens: Array, positions: Array) -> Array:
    """Embedding [n, d] of token ids known in the clear."""
    return params["wte"][tokens] + params["wpe"][positions]


def embed_one_hot(params: Params, one_hot: Array, positions: Array) -> Array:
    """Embedding [n, d] of secret tokens given as one-hot rows [n, vocab]; positions are public."""
    return one_hot @ params["wte"] + params["wpe"][positions]


def embed_one_hots(params: Params, tokens: Array, positions: Array) -> Array:
    """The same with secret positions: one-hot rows [n, vocab] and [n, context]; one product."""
    table = jnp.concatenate([params["wte"], params["wpe"]])
    return jnp.concatenate([tokens, positions], axis=-1) @ table


def hidden_states(
    params: Params,
    config: GPT2Config,
    x: Array,
    past: Sequence[tuple[Block, Array]],
    visible: Array,
) -> tuple[Array, Block]:
    """The stack: final normalised rows [n, d] (gain not yet applied) and the draft block.

    `x` [n, d] is the embedding; `past` pairs each earlier block with its mask [n, positions];
    `visible` [n, n] is the mask among the current positions (causal for a chain, or a tree mask).
    """
    keys, values = [], []
    for layer, params_l in enumerate(params["blocks"]):
        layer_past = [LayerBlock(b.keys[layer], b.values[layer], mask) for b, mask in past]
        normed = normalize(x, config.layer_norm_epsilon)
        attended, key, value = attention(normed, params_l, config, layer_past, visible)
        x = x + attended
        x = x + mlp(normalize(x, config.layer_norm_epsilon), params_l)
        keys.append(key)
        values.append(value)
    draft = Block(jnp.stack(keys), jnp.stack(values))
    return normalize(x, config.layer_norm_epsilon), draft


def head(params: Params, rows: Array, scale: Array | float = 1.0) -> Array:
    """Logits [n, vocab] of the rows of `hidden_states`, times a public `scale`.

    The head is tied to the embedding; the scale goes into the last norm's weights.
    """
    norm = jax.tree.map(lambda w: w * scale, params["ln_f"])
    tied = {"weight": params["wte"].T, "bias": jnp.zeros(params["wte"].shape[0], jnp.float32)}
    return normed_linear(rows, norm, tied)


def past_blocks(
    prefix: Block | None, shared: Block | None, visible: Array | None, queries: int
) -> list[tuple[Block, Array]]:
    """The earlier blocks with their masks: the whole prefix, and `shared` where it is visible."""
    past = []
    if prefix is not None:
        past.append((prefix, jnp.ones((queries, prefix.positions), bool)))
    if shared is not None:
        assert visible is not None
        past.append((shared, visible))
    return past


def step(
    params: Params,
    config: GPT2Config,
    x: Array,
    prefix: Block | None,
    shared: Block,
    length: Array,
    *,
    visible: Array | None = None,
    scale: Array | float = 1.0,
) -> tuple[Array, Block]:
    """n further positions in one forward: logits [n, vocab], times a public `scale`, and the shared
    block with their rows.

    `x` [n, d] embeds the positions that follow the `length` rows of `shared` in use, all of them
    visible unless `visible` [n, positions] says otherwise (see `LayerBlock`). Rows are written at
    `length`; a caller accepts m of them by using `length + m` next time.
    """
    n = x.shape[0]
    if visible is None:
        visible = visible_below(length, n, shared.positions)
    past = past_blocks(prefix, shared, visible, n)
    rows, draft = hidden_states(params, config, x, past, causal(n))
    return head(params, rows, scale), write_rows(shared, draft, length)


def logits(params: Params, config: GPT2Config, tokens: Array) -> Array:
    """Logits [n, vocab] of a whole token sequence [n], without a cache."""
    n = tokens.shape[0]
    x = embed_tokens(params, tokens, jnp.arange(n))
    rows, _ = hidden_states(params, config, x, [], causal(n))
    return head(params, rows)


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
