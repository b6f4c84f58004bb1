"""T5 and FLAN-T5 in JAX: config, folded weights, its layers, the bounds of its activations, the
checkpoint. The forward through encoder and decoder is in `models.encoder_decoder`.

Differs from `models.llama` by an encoder that reads a text both ways, cross-attention to what it
read, scores that are not scaled, relative positions that are added to scores, and a feed-forward
layer of ReLU (T5) or a gated GELU (T5 1.1, FLAN-T5).

Source: Raffel et al. 2020; Shazeer 2020 (gated GELU); numerics follow the `transformers`
implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import Block as CacheBlock
from models.cache import EncoderDecoderCache, split_heads
from models.config_fields import check_switches, fraction, positive_int, start_token
from models.encoder_decoder import EncoderDecoder, RelativePositions
from models.family import Layer, Matrix, ModelConfig, embed_tokens, token_table
from models.ranges import MORE_ROWS, Bounds, Linear, largest_score, of_site
from protocols.functions.activations import PIECES, activation_bits, gelu_gated, relu
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

_GELU_ERROR = PIECES["gelu"].error  # on shares
RELU, GATED_GELU = "relu", "gated-gelu"


@dataclass(frozen=True)
class T5Config(ModelConfig):
    """Shape of a T5 model, in the words of its `config.json`, and the ranges of its activations on
    shares. Blocks are numbered through encoder and decoder.
    """

    family: ClassVar[str] = "t5"
    title: ClassVar[str] = "T5"
    layers_name: ClassVar[str] = "num_layers"
    context_name: ClassVar[str] = "n_positions"
    width_names: ClassVar[tuple[str, ...]] = ("d_model", "d_ff", "num_heads")
    epsilon_name: ClassVar[str] = "layer_norm_epsilon"
    encodes: ClassVar[bool] = True

    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    n_positions: int = 512  # of a source, and of what is written, at most
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    feed_forward_proj: str = RELU
    layer_norm_epsilon: float = 1e-6
    decoder_start_token_id: int = 0
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = max(self.d_kv, self.relative_attention_num_buckets) * self.num_heads
        if heads > 1_000_000 or not 2 <= self.n_positions <= 1_000_000:
            raise ValueError(
                "n_positions must be 2 to 1,000,000, and all heads together, or their buckets, no "
                "more than that"
            )
        if self.public_rows:
            raise ValueError("public_rows must be 0: an encoder reads all of a prompt at once")
        if self.feed_forward_proj not in (RELU, GATED_GELU):
            raise ValueError(f"feed_forward_proj must be {RELU} or {GATED_GELU}")
        if not 0 <= self.decoder_start_token_id < self.vocab_size:
            raise ValueError("decoder_start_token_id is no token")
        for both_ways in (True, False):
            self.positions(both_ways).check()

    def positions(self, both_ways: bool) -> RelativePositions:
        """Return how distances fall into buckets, in the encoder (`both_ways`) or the decoder."""
        return RelativePositions(
            self.relative_attention_num_buckets, self.relative_attention_max_distance, both_ways
        )

    @property
    def layers(self) -> int:
        return self.num_layers + self.num_decoder_layers

    @property
    def norms(self) -> list[tuple[int | None, str]]:
        names = "norm of attention", "norm of cross-attention", "norm of feed-forward"
        encoder, decoder = range(self.num_layers), range(self.num_layers, self.layers)
        return [
            *((i, name) for i in encoder for name in names[::2]),
            (None, "last norm of the encoder"),
            *((i, name) for i in decoder for name in names),
            (None, "last norm"),
        ]

    @property
    def activation(self) -> str:
        return "relu" if self.feed_forward_proj == RELU else "gelu"

    @property
    def first_norms(self) -> tuple[int, ...]:
        return 0, 2 * self.num_layers + 1

    @property
    def kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.d_kv

    def repeats(self, name: str) -> int:
        return self.num_layers if name.startswith("encoder.") else self.num_decoder_layers

    def with_layers(self, count: int) -> Any:
        """Return this shape with `count` blocks in the encoder, and as many in the decoder."""
        return replace(self, num_layers=count, num_decoder_layers=count)

    def with_blocks(self, numbers: Any) -> Any:
        """Raise ValueError: blocks of encoder and decoder do not take each other's place."""
        raise ValueError(f"a {self.title} model is not cut into blocks")

    def empty_cache(self, positions: int, lanes: int = 1) -> Any:
        """Return a decoder's cache with room for `positions` rows of every sequence, before a
        source is encoded.
        """
        shape = lanes * self.kv_heads, positions, self.head_dim
        zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in range(self.num_decoder_layers))
        return EncoderDecoderCache(CacheBlock(zeros, zeros), CacheBlock((), ()))


class _Block(TypedDict):
    ln_1: Array  # [d]
    q: Array  # [d, heads d_kv]
    k: Array  # [d, heads d_kv]
    v: Array  # [d, heads d_kv]
    o: Array  # [heads d_kv, d]
    ln_2: Array  # [d]
    down: Array  # [inner, d]


class Block(_Block, total=False):
    """Parameters of a block: one of the decoder has cross-attention."""

    ln_cross: Array  # [d]
    cross_q: Array  # [d, heads d_kv]
    cross_k: Array  # [d, heads d_kv]
    cross_v: Array  # [d, heads d_kv]
    cross_o: Array  # [heads d_kv, d]
    wi: Array  # [d, inner]; with ReLU
    gate: Array  # [d, inner]; with a gated GELU
    up: Array  # [d, inner]; with a gated GELU


class _T5Params(TypedDict):
    embed: Array  # [vocab, d]
    encoder_bias: Array  # [bucket, head]
    encoder: list[Block]
    encoder_norm: Array  # [d]
    bias: Array  # [bucket, head]; the decoder's
    blocks: list[Block]
    norm: Array  # [d]


class T5Params(_T5Params, total=False):
    """Parameters of a model."""

    head: Array  # [d, vocab], unless it is tied to `embed`


class _FoldedBlock(TypedDict):
    qkv: Matrix  # [d, 3 heads d_kv]
    out: Matrix  # [heads d_kv, d]
    gate_up: Matrix  # [d, 2 inner], or [d, inner] without a gate
    down: Matrix  # [inner, d]


class FoldedBlock(_FoldedBlock, total=False):
    """Weights of a block as `fold` makes them: one of the decoder has cross-attention."""

    cross_q: Matrix  # [d, heads d_kv]
    cross_kv: Matrix  # [d, 2 heads d_kv]; of rows that the encoder normalised
    cross_out: Matrix  # [heads d_kv, d]


class T5Weights(TypedDict):
    """Weights of a model as `fold` makes them."""

    embed: Array  # [vocab, d]
    encoder_bias: Array  # [bucket, head]
    encoder: list[FoldedBlock]
    bias: Array  # [bucket, head]
    blocks: list[FoldedBlock]
    head: Matrix  # [d, vocab]


def init_params(config: T5Config, key: Array) -> T5Params:
    """Draw random parameters (float32) with the scales of `transformers`' initialisation."""
    d, inner, heads = config.d_model, config.d_ff, config.num_heads * config.d_kv
    keys = iter(jax.random.split(key, 4 + 12 * config.layers))

    def normal(rows: int, columns: int, scale: float) -> Array:
        return scale * jax.random.normal(next(keys), (rows, columns), jnp.float32)

    def projections(prefix: str = "") -> dict[str, Array]:
        return {
            f"{prefix}q": normal(d, heads, (d * config.d_kv) ** -0.5),
            f"{prefix}k": normal(d, heads, d**-0.5),
            f"{prefix}v": normal(d, heads, d**-0.5),
            f"{prefix}o": normal(heads, d, heads**-0.5),
        }

    def block(decodes: bool) -> Any:
        made = {"ln_1": jnp.ones(d), **projections()}
        if decodes:
            made |= {"ln_cross": jnp.ones(d), **projections("cross_")}
        for name in ("wi",) if config.feed_forward_proj == RELU else ("gate", "up"):
            made[name] = normal(d, inner, d**-0.5)
        return made | {"ln_2": jnp.ones(d), "down": normal(inner, d, inner**-0.5)}

    buckets = config.relative_attention_num_buckets
    params: T5Params = {
        "embed": normal(config.vocab_size, d, 1.0),
        "encoder_bias": normal(buckets, config.num_heads, d**-0.5),
        "encoder": [block(False) for _ in range(config.num_layers)],
        "encoder_norm": jnp.ones(d),
        "bias": normal(buckets, config.num_heads, d**-0.5),
        "blocks": [block(True) for _ in range(config.num_decoder_layers)],
        "norm": jnp.ones(d),
    }
    if not config.tie_word_embeddings:
        params["head"] = normal(d, config.vocab_size, d**-0.5)
    return params


def fold(params: T5Params, config: T5Config) -> T5Weights:
    """Fold parameters into weights that compute the same model in fewer operations; a plaintext
    computation of the provider's.

    - Gains of the norms go into the matrix that follows, the encoder's last one into the keys and
      values of cross-attention. Matrices with the same input become one.
    - A tied head has the factor d^-1/2. Logits are centred over the vocabulary.
    - The residual stream is scaled by 2^-stream_shift, which the norms undo.
    """
    scale = 2.0**-config.stream_shift

    def after(gain: Any, *weights: Any) -> Matrix:
        return {"weight": gain[:, None] * jnp.concatenate(weights, axis=-1)}

    def added(weight: Any) -> Matrix:
        return {"weight": jnp.multiply(weight, scale)}

    def block(p: Any) -> FoldedBlock:
        inner = [p[name] for name in ("wi", "gate", "up") if name in p]
        folded: FoldedBlock = {
            "qkv": after(p["ln_1"], p["q"], p["k"], p["v"]),
            "out": added(p["o"]),
            "gate_up": after(p["ln_2"], *inner),
            "down": added(p["down"]),
        }
        if "cross_q" in p:
            folded["cross_q"] = after(p["ln_cross"], p["cross_q"])
            folded["cross_kv"] = after(params["encoder_norm"], p["cross_k"], p["cross_v"])
            folded["cross_out"] = added(p["cross_o"])
        return folded

    tied = config.tie_word_embeddings
    head = params["embed"].T * config.d_model**-0.5 if tied else params["head"]
    logits = after(params["norm"], head)["weight"]
    return {
        "embed": jnp.multiply(params["embed"], scale),
        "encoder_bias": jnp.asarray(params["encoder_bias"]),
        "encoder": [block(p) for p in params["encoder"]],
        "bias": jnp.asarray(params["bias"]),
        "blocks": [block(p) for p in params["blocks"]],
        "head": {"weight": logits - jnp.mean(logits, axis=-1, keepdims=True)},
    }


def attention(x: Array, layer: Layer) -> Array:
    """Return what self-attention adds to the residual stream; see `Family`."""
    query, key, value = (
        split_heads(part, layer.lanes, layer.config.num_heads)
        for part in jnp.split(layer.linear("qkv", x), 3, axis=-1)
    )
    layer.write(key, value)
    return layer.linear("out", layer.attend(query))


def cross_keys(x: Array, layer: Layer) -> None:
    """Write the keys and values of cross-attention; see `EncoderDecoder`."""
    key, value = (
        split_heads(part, layer.lanes, layer.config.num_heads)
        for part in jnp.split(layer.linear("cross_kv", x), 2, axis=-1)
    )
    layer.write(key, value)


def cross_attention(x: Array, layer: Layer) -> Array:
    """Return what cross-attention adds to the residual stream; see `EncoderDecoder`."""
    query = split_heads(layer.linear("cross_q", x), layer.lanes, layer.config.num_heads)
    return layer.linear("cross_out", layer.attend(query))


def mlp(x: Array, layer: Layer) -> Array:
    """Return what the feed-forward layer adds to the residual stream: down(relu(up(x))), or
    down(gelu(gate(x)) * up(x)); see `Family`.
    """
    bits = activation_bits(of_site(layer.config.largest_activation, layer.number))
    inner = layer.linear("gate_up", x)
    if layer.config.feed_forward_proj == RELU:
        return layer.inner("down", relu(inner, bits=bits))
    gate, up = jnp.split(inner, 2, axis=-1)
    return layer.inner("down", gelu_gated(gate, up, bits=bits))


# ---- what weights bound


def bounds(block: Any, config: T5Config) -> Bounds:
    """Return the largest sizes that activations of a block can reach; `block` also has the table of
    its stack, "bias". See `Family`.
    """
    d = config.d_model
    gate_up, down = Linear.of(block["gate_up"]), Linear.of(block["down"])
    own = _of_attention(config, Linear.of(block["qkv"]).columns(3), Linear.of(block["out"]))
    each = [own._replace(score=own.score + float(np.max(np.abs(np.asarray(block["bias"])))))]
    if "cross_q" in block:
        parts = [Linear.of(block["cross_q"]), *Linear.of(block["cross_kv"]).columns(2)]
        each.append(_of_attention(config, parts, Linear.of(block["cross_out"])))
    score, linear, attended, reach = map(max, zip(*each, strict=True))
    if config.feed_forward_proj == RELU:  # |relu(x)| <= |x|
        activation, gated = gate_up.largest(d), 0.0
        inner = down.largest_product(gate_up.longest(d) ** 2)
    else:
        gate, up = gate_up.columns(2)
        gates = gate.largest_entries(d) + _GELU_ERROR  # |gelu(x)| <= |x|
        activation, gated = gate.largest(d), float(np.max(gates * up.largest_entries(d)))
        gated_down = down._replace(weight=gates[:, None] * down.weight)
        inner = gated_down.largest_product(up.longest(d) ** 2)
    return Bounds(
        activation=activation,
        score=score,
        linear=max(linear, gate_up.largest_product(d)),
        attended=attended,
        inner=inner,
        per_length=down.largest_product(1.0),
        # Weights of attention are up to one each until they are normalised.
        product=reach * (config.n_positions + MORE_ROWS),
        gated=gated,
        value=reach,
    )


class _Attention(NamedTuple):
    score: float
    linear: float
    attended: float
    value: float


def _of_attention(config: T5Config, parts: Sequence[Linear], out: Linear) -> _Attention:
    """Return what attention can reach whose queries, keys and values `parts` compute."""
    query, key, value = parts
    d, heads = config.d_model, config.num_heads
    by_head = zip(query.columns(heads), key.columns(heads), strict=True)
    # Of a head: a mean of its values.
    attended = math.hypot(*(v.longest(d) for v in value.columns(heads)))
    return _Attention(
        score=max(largest_score(q, k, d) for q, k in by_head),
        linear=max(part.largest_product(d) for part in (query, key, value)),
        attended=out.largest_product(attended**2),
        value=value.largest(d),
    )


# ---- the checkpoint

# The `config.json` switches that change the arithmetic, with the only value computed here.
FIXED_SWITCHES: Mapping[str, Any] = {"is_encoder_decoder": True, "scale_decoder_outputs": True}


def _names_of(stack: str, place: str, cross: bool) -> dict[str, tuple[str, ...]]:
    """Return the names of a stack's tensors in a checkpoint, with their paths in `T5Params`."""
    block, last = f"{stack}.block.{{}}.layer", 2 if cross else 1
    paths = {f"{block}.0.layer_norm.weight": "ln_1"}
    paths |= {f"{block}.0.SelfAttention.{x}.weight": x for x in "qkvo"}
    if cross:
        paths[f"{block}.1.layer_norm.weight"] = "ln_cross"
        paths |= {f"{block}.1.EncDecAttention.{x}.weight": f"cross_{x}" for x in "qkvo"}
    paths[f"{block}.{last}.layer_norm.weight"] = "ln_2"
    inner = {"wi": "wi", "wi_0": "gate", "wi_1": "up", "wo": "down"}
    paths |= {f"{block}.{last}.DenseReluDense.{x}.weight": path for x, path in inner.items()}
    return {name: (place, "{}", path) for name, path in paths.items()}


_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"

# Hugging Face parameter name -> path in `Params`; {} stands for the number in its stack.
NAMES: Mapping[str, tuple[str, ...]] = {
    "shared.weight": ("embed",),
    f"encoder.{_BIAS}": ("encoder_bias",),
    **_names_of("encoder", "encoder", cross=False),
    "encoder.final_layer_norm.weight": ("encoder_norm",),
    f"decoder.{_BIAS}": ("bias",),
    **_names_of("decoder", "blocks", cross=True),
    "decoder.final_layer_norm.weight": ("norm",),
    "lm_head.weight": ("head",),
}
_TRANSPOSED = "q k v o cross_q cross_k cross_v cross_o wi gate up down head".split()


def parse(raw: Mapping[str, Any]) -> T5Config:
    """Return the shape in `config.json`, having checked that this module computes this model."""
    check_switches(raw, FIXED_SWITCHES)
    # What an older file lacks, or has as null, follows from the rest.
    defaults = {
        "num_decoder_layers": raw.get("num_layers"),
        "n_positions": 512,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    }
    raw = {**raw, **{k: v for k, v in defaults.items() if raw.get(k) is None}}
    sizes: dict[str, Any] = {name: positive_int(raw, name) for name in T5Config.size_names()}
    others: dict[str, Any] = {name: positive_int(raw, name) for name in [*defaults][1:]}
    projection = raw.get("feed_forward_proj", RELU)
    if projection not in (RELU, GATED_GELU):
        raise InputError(
            f"has feed_forward_proj {shown(projection)}; only {RELU} and {GATED_GELU} are supported"
        )
    tied = raw.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise InputError(f"has tie_word_embeddings {shown(tied)}; it must be true or false")
    return T5Config(
        **sizes,
        **others,
        feed_forward_proj=projection,
        layer_norm_epsilon=fraction(raw, "layer_norm_epsilon", 1e-6),
        decoder_start_token_id=start_token(raw),
        tie_word_embeddings=tied,
    )


def describe(config: T5Config) -> dict[str, Any]:
    """Return `config.json` as the transformers library writes it for this shape."""
    gated = config.feed_forward_proj == GATED_GELU
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": config.family,
        **config.shape(),
        "is_encoder_decoder": True,
        "is_gated_act": gated,
        "dense_act_fn": "gelu_new" if gated else "relu",
        "pad_token_id": config.decoder_start_token_id,
        "eos_token_id": 1,
        "dropout_rate": 0.0,
        "initializer_factor": 1.0,
        "use_cache": True,
    }


FAMILY = EncoderDecoder(
    config=T5Config,
    parse=parse,
    describe=describe,
    names=NAMES,
    prefix="",
    transposed=_TRANSPOSED,
    init=init_params,
    fold=fold,
    bounds=bounds,
    embeddings=token_table,
    embed=embed_tokens,
    attention=attention,
    mlp=mlp,
    public={"bias": "the decoder's relative position bias"},
    cross_keys=cross_keys,
    cross_attention=cross_attention,
)
