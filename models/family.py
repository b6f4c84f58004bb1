"""Model families: one record, `Family`, with what differs between families, and the forward that
all families share.

A family is a module with its `FAMILY` record, listed in `_MODULES` under the `model_type` of
`config.json`. Its models are blocks on a residual stream, each an attention and a feed-forward
layer behind norms, and a head. They are computed on weights that were folded first: matrices
{"weight": [k, m]}, with "bias" [m] where there is one, under "blocks" (a list of dicts with "qkv",
"out" and the matrices of the feed-forward layer) and "head"; the weights that embed tokens are
particular to the family.

Shapes: a forward takes n rows of each of L *lanes*: sequences with separate cache rows that go
through the model together. Linear layers, norms and comparisons take all L n rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from importlib import import_module
from typing import Any, ClassVar, TypedDict, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models import ranges
from models.cache import Block, CacheT, Prefix, Rows, attend, join_heads, layer_blocks, rows_after
from models.ranges import Bounds, Linear, ModelBounds, Ranges
from protocols.functions.layers import append_rows, dense, look_up
from protocols.functions.norms import check_norm, longer, norm_high, rms_norm
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

Params = Mapping[str, Any]  # parameters or folded weights of any family, which nobody changes


class _Weight(TypedDict):
    weight: Array  # [k, m]


class Matrix(_Weight, total=False):
    """A linear layer: rows [n, k] times `weight`, plus `bias` where there is one."""

    bias: Array  # [m]


_MODULES = {
    "gpt2": "models.gpt2",
    "llama": "models.llama",
    "mistral": "models.mistral",
    "qwen2": "models.qwen2",
    "t5": "models.t5",
}


@dataclass(frozen=True)
class ModelConfig(Ranges):
    """A model's shape, in the words of its `config.json`, and the ranges of its activations on
    shares. Both parties know it.

    ValueError for a shape that no model has, or that words of the ring do not hold.
    """

    family: ClassVar[str]
    title: ClassVar[str]  # the family's, for people
    layers_name: ClassVar[str]  # the field with the number of blocks,
    context_name: ClassVar[str]  # with the positions of a text at most,
    width_names: ClassVar[tuple[str, ...]]  # with sizes that grow together, the stream's first,
    epsilon_name: ClassVar[str]  # and with what norms add to mean squares
    encodes: ClassVar[bool] = False  # whether an encoder reads the prompt before text is written

    vocab_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [getattr(self, name) for name in self.size_names()]
        # Far above every model, and small enough not to exhaust memory while tracing.
        if not all(1 <= n <= 1_000_000 for n in sizes) or self.layers > 1000:
            raise ValueError(f"a {self.title}'s sizes must be positive and reasonable")
        if not 0 < getattr(self, self.epsilon_name) < 1:
            raise ValueError(f"{self.epsilon_name} must be between 0 and 1")
        self._check_sites()

    def _check_sites(self) -> None:
        for names, sites in (
            (("norm_low", "norm_high"), len(self.norms)),
            (("largest_activation", "largest_score", "longest_inner"), self.layers),
        ):
            for name in names:
                if len(getattr(self, name)) not in (1, sites):
                    raise ValueError(f"{name} must be one number, or {sites}")
        for low, high in zip(self.norm_low, self.norm_high, strict=True):
            check_norm(self.width, self.norm_epsilon, low, high)

    @classmethod
    def size_names(cls) -> list[str]:
        """Return the names of the fields with a model's sizes: those without a default."""
        return [f.name for f in dataclass_fields(cls) if f.default is MISSING]

    @property
    def norm_epsilon(self) -> float:
        """Return the term that norms add to mean squares of the scaled residual stream."""
        return float(getattr(self, self.epsilon_name)) * 4.0**-self.stream_shift

    @property
    def layers(self) -> int:
        """Return the number of blocks, each of which has a cache."""
        return int(getattr(self, self.layers_name))

    @property
    def norms(self) -> list[tuple[int | None, str]]:
        """Return the norms in order, each of which has a range: its block, None for the last one,
        and its name.
        """
        names = "norm of attention", "norm of feed-forward"
        return [(i, name) for i in range(self.layers) for name in names] + [(None, "last norm")]

    @property
    def activation(self) -> str:
        """Return the name of the feed-forward layers' function, of `protocols.functions`."""
        return "gelu"

    @property
    def first_norms(self) -> tuple[int, ...]:
        """Return the numbers of the norms of embeddings."""
        return (0,)

    def repeats(self, name: str) -> int:
        """Return how many tensors of a checkpoint have this name, with {} for their number."""
        return self.layers

    @property
    def context(self) -> int:
        """Return the largest number of positions of a text."""
        return int(getattr(self, self.context_name))

    @property
    def width(self) -> int:
        """Return the width of the residual stream."""
        return int(getattr(self, self.width_names[0]))

    @property
    def kv_heads(self) -> int:
        """Return the number of heads of keys and values, which the cache has."""
        raise NotImplementedError

    @property
    def head_dim(self) -> int:
        raise NotImplementedError

    @property
    def query_groups(self) -> int:
        """Return how many query heads share one head of keys and values."""
        return 1

    def normalised(
        self,
        x: Array,
        site: int,
        gain: float = 1.0,
        normalise: Callable[..., Any] = rms_norm,
        unchecked: Unchecked | None = None,
    ) -> tuple[Array, Array]:
        """Return the rows x [n, d] of the residual stream, normalised by norm number `site` and
        times `gain`; and a count (int32) of rows outside their range, of x or of `unchecked`, which
        this norm's messages check, too.
        """
        low, high = self.norm_range(site)
        others = () if unchecked is None else (unchecked,)
        normed, outside = normalise(
            x,
            *(rows for rows, _ in others),
            epsilon=self.norm_epsilon,
            gain=gain,
            low=low,
            high=min(high, norm_high(self.width)),
            longest=tuple(most for _, most in others),
        )
        return normed, outside

    def with_layers(self, count: int) -> Any:
        """Return this shape with `count` blocks: the first ones, or all of them repeated."""
        return self.with_blocks([i % self.layers for i in range(count)])

    def with_blocks(self, numbers: Sequence[int]) -> Any:
        """Return this shape with the blocks number `numbers` and their ranges, in this order, and
        the last norm.
        """

        def of_blocks(name: str) -> ranges.Each:
            values: ranges.Each = getattr(self, name)
            return values if len(values) == 1 else tuple(values[i] for i in numbers)

        def of_norms(name: str) -> ranges.Each:
            values: ranges.Each = getattr(self, name)
            if len(values) == 1:
                return values
            return tuple(v for i in numbers for v in values[2 * i : 2 * i + 2]) + values[-1:]

        chosen = {name: of_norms(name) for name in ("norm_low", "norm_high")}
        chosen |= {
            name: of_blocks(name)
            for name in ("largest_activation", "largest_score", "longest_inner")
        }
        fields: dict[str, Any] = {self.layers_name: len(numbers), **chosen}
        return replace(self, **fields)

    def with_context(self, positions: int) -> Any:
        """Return this shape for texts of at most `positions` positions."""
        fields: dict[str, Any] = {self.context_name: positions}
        return replace(self, **fields)

    def after(self, rows: int, tokens: int) -> Any:
        """Return this shape for the text after `rows` rows, of which at least `tokens` hold text:
        the context is shorter by `rows`, and `public_rows` less by `tokens`.
        """
        left = replace(self, public_rows=max(0, self.public_rows - tokens))
        return left.with_context(self.context - rows)

    def check_public(self, tokens: int, words: str) -> None:
        """Raise InputError, which ends with the advice `words`, unless the ranges hold for all
        tokens of a text but the first `tokens`, which are public.
        """
        if tokens < self.public_rows:
            raise InputError(
                f"this model's ranges hold from token {self.public_rows + 1} of a text on, and "
                f"of those before it {tokens or 'none'} would be public; {words}"
            )

    def widened(self, factor: int) -> Any:
        """Return this shape `factor` times as wide, with more heads of the same size."""
        return replace(self, **{name: factor * getattr(self, name) for name in self.width_names})

    def shape(self) -> dict[str, Any]:
        """Return the fields of `config.json`: all but the ranges."""
        return {k: v for k, v in asdict(self).items() if k not in ranges.NAMES}

    def asdict(self) -> dict[str, int | float | str]:
        """Return all fields and the family's tag as scalars: a tuple becomes a comma list."""
        given = {
            k: ",".join(map(repr, v)) if isinstance(v, tuple) else v
            for k, v in asdict(self).items()
        }
        return {"family": self.family, **given}

    def empty_cache(self, positions: int, lanes: int = 1) -> Block:
        """Return a cache with room for `positions` rows of every sequence: zeros (float32)."""
        shape = lanes * self.kv_heads, positions, self.head_dim
        zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in range(self.layers))
        return Block(zeros, zeros)


Unchecked = tuple[Array, float]  # rows, and the length that those of a block pass for
Outside = dict[str, Array]  # int32 counts of what left a range, by site (`models.inspection`)
_INNER = "rows of gates in block {}"


@dataclass
class Layer:
    """One block of a model during a forward: its matrices, and its part of the cache, which `write`
    adds rows to.
    """

    number: int
    weights: Params
    config: Any
    rows: Rows
    angles: Any  # of the rows, as `Family.angles` gave them
    prefix: Prefix | None
    keys: Array  # [L head, row of the cache, head_dim]
    values: Array
    outside: Array | None = None  # how many sums left their range in `attend`
    unchecked: Unchecked | None = None  # what `inner` was given, where it is to be checked
    ends: tuple[int, ...] | None = None  # of each lane, the one row that goes on; None: all do
    depth: int = 1  # blocks that use these `angles`, for which masks are made together

    @property
    def lanes(self) -> int:
        return int(self.rows.visible.shape[0])

    def linear(self, name: str, x: Array) -> Array:
        """Return x [L n, k] times the block's matrix `name`, plus its bias."""
        matrix = self.weights[name]
        product = dense(x, matrix["weight"], label=f"h.{self.number}.{name}")
        return product + matrix["bias"] if "bias" in matrix else product

    def inner(self, name: str, x: Array) -> Array:
        """Return `linear` of x, whose rows the next norm checks for their length where the ranges
        limit it.
        """
        if longest := ranges.of_site(self.config.longest_inner, self.number):
            self.unchecked = x, longest
        return self.linear(name, x)

    def write(self, key: Array, value: Array) -> None:
        """Write the keys and values [L head, n, head_dim] of the rows into the cache."""
        at = self.rows.at
        if self.prefix is not None and self.prefix.inside:
            at = at + self.prefix.inside
        self.keys = append_rows(self.keys, key, at)
        self.values = append_rows(self.values, value, at)

    def attend(self, query: Array) -> Array:
        """Return the attention output [L n, heads * head_dim] of queries [L heads, n, head_dim]; n
        is 1 in the result where only one row goes on (`ends`). Where there are more query heads
        than heads of keys and values, neighbouring query heads share one.
        """
        visible = self.rows.visible
        reach = self.rows.reach(self.prefix.rows if self.prefix is not None else 0)
        if self.ends is not None:
            query, visible = one_row(query, self.ends), one_row(visible, self.ends)
            reach = None if reach is None else (reach[max(self.ends)],)
        heads, n, size = query.shape
        shared = self.keys.shape[0]
        # The rows of all query heads of a group stand one after the other.
        grouped = query.reshape(shared, heads // shared * n, size)
        blocks = layer_blocks(
            self.prefix, self.number, self.keys, self.values, visible, heads // shared
        )
        largest = ranges.of_site(self.config.largest_score, self.number)
        bias = self.rows.bias
        assert bias is None or (heads == shared and self.ends is None)
        out, self.outside = attend(grouped, blocks, largest, bias, reach)
        return join_heads(out.reshape(heads, n, size), self.lanes)


@dataclass(frozen=True)
class Family:
    """Functions and facts in which model families differ. Every `config` is an instance of the
    family's config class.

    parse(raw)              -> config, from the fields of `config.json`. InputError, without a path,
                            for a model that the family does not compute.
    describe(config)        -> the fields of `config.json` as the transformers library writes them.
    names                   tensors' names in a checkpoint, with their paths in `Params`; {} stands
                            for the layer number. The token embedding comes first. A tensor whose
                            path `Params` lacks (a tied head) is not in the model.
    prefix                  prefix of most names; checkpoints of a model without its head lack it.
    transposed              last parts of the paths of tensors that checkpoints hold transposed.
    init(config, key)       -> random parameters (float32).
    fold(params, config)    -> weights: the same model in fewer operations, a plaintext computation
                            of whoever has the parameters.
    bounds(block, config)   -> the largest sizes that activations of a block with these folded
                            weights can reach, for any input (`models.ranges`).
    embeddings(weights)     -> tables of tokens [vocab, d] and of positions [m, d], whose sums go
                            into the first block; one row of zeros where positions enter later.
    embed(weights, config, tokens, positions, *, start, hidden)
        -> rows [n, d]. tokens: ids [n] known in the clear, or one-hot rows [n, vocab]. positions:
        int32 [n], counted from `start`, which is public or the provider's secret; `hidden`: they
        are the client's secret. `forward` also takes positions, in `rows`: there only their
        differences must be those in the text.
    attention(x, layer), mlp(x, layer)
        -> what the layer adds to the residual stream, [L n, d], given normalised rows x [L n, d].
    angles(config, rows)    -> what attention needs of positions that enter in every block.
    public                  names of folded weights that both parties of a session may have to
                            know, with what they are, in words.
    """

    config: type[ModelConfig]
    parse: Callable[[Mapping[str, Any]], ModelConfig]
    describe: Callable[[Any], dict[str, Any]]
    names: Mapping[str, tuple[str, ...]]
    prefix: str
    init: Callable[[Any, Array], Params]
    fold: Callable[[Any, Any], Any]
    bounds: Callable[[Any, Any], Bounds]
    embeddings: Callable[[Any], tuple[Any, Any]]
    embed: Callable[..., Array]
    attention: Callable[[Array, Layer], Array]
    mlp: Callable[[Array, Layer], Array]
    angles: Callable[[Any, Rows], Any] = lambda config, rows: None
    transposed: Collection[str] = ()
    public: Mapping[str, str] = field(default_factory=dict)

    def blocks_of(self, weights: Any) -> list[Params]:
        """Return all folded blocks, in the order of their ranges."""
        return list(weights["blocks"])

    def forward(
        self,
        weights: Params,
        config: Any,
        x: Array,
        rows: Rows,
        cache: CacheT,
        prefix: Prefix | None = None,
        scale: float = 1.0,
        normalise: Callable[..., tuple[Array, Array]] = rms_norm,
        ends: tuple[int, ...] | None = None,
    ) -> tuple[Array, CacheT, Outside]:
        """Run all blocks and the last norm. Return normalised rows [L n, d], times the public
        `scale`, for `head`; the cache with the rows' keys and values written; and counts of values
        outside the range of a function on shares, for `protocols.functions.in_range`.

        x [L n, d] is the embedding of the rows, whose positions and visibility `rows` gives; all
        text of `prefix` is visible. `normalise` replaces the norm on shares, in plaintext. A caller
        rolls rows back by writing over them and leaving them invisible. `ends`: the one row of each
        sequence whose result is wanted; the last block then computes keys and values of all rows
        but the rest for that row only, and the rows returned are [L, d].
        """
        assert isinstance(cache, Block)
        x, written, outside, unchecked = self._through(
            weights["blocks"], config, x, rows, cache, prefix, normalise, ends
        )
        normed, count = config.normalised(x, -1, scale, normalise, unchecked)
        outside[norm_name(len(weights["blocks"]), "last norm", unchecked)] = count
        return normed, written, outside

    def through(
        self,
        blocks: Sequence[Params],
        config: Any,
        x: Array,
        rows: Rows,
        cache: Block,
        prefix: Prefix | None = None,
        normalise: Callable[..., tuple[Array, Array]] = rms_norm,
        first: int = 0,
    ) -> tuple[Array, Block, Outside]:
        """Run only the folded `blocks`, with a cache of as many layers. Return rows [L n, d] of the
        residual stream after the last block, and the cache and counts as `forward` does. `config`
        has ranges for exactly these blocks; `first`: the number in the model of the first one.
        """
        x, written, outside, unchecked = self._through(
            blocks, config, x, rows, cache, prefix, normalise, first=first
        )
        if unchecked is not None:
            name = _INNER.format(first + len(blocks) - 1)
            outside[name] = longer(unchecked[0], longest=unchecked[1])
        return x, written, outside

    def _through(
        self,
        blocks: Sequence[Params],
        config: Any,
        x: Array,
        rows: Rows,
        cache: Block,
        prefix: Prefix | None,
        normalise: Callable[..., tuple[Array, Array]],
        ends: tuple[int, ...] | None = None,
        first: int = 0,
    ) -> tuple[Array, Block, Outside, Unchecked | None]:
        """Run blocks as `through` does; return also the rows that no norm has checked yet."""
        outside: Outside = {}
        angles = self.angles(config, rows)
        unchecked: Unchecked | None = None

        def norm(x: Array, site: int) -> Array:
            nonlocal unchecked
            normed, count = config.normalised(x, site, 1.0, normalise, unchecked)
            block, second = divmod(2 * first + site, 2)
            name = f"norm of {'feed-forward' if second else 'attention'} in block {block}"
            outside[norm_name(block, name, unchecked)], unchecked = count, None
            return normed

        cached = zip(blocks, cache.keys, cache.values, strict=True)
        layers = [
            Layer(i, block, config, rows, angles, prefix, keys, values, depth=len(blocks))
            for i, (block, keys, values) in enumerate(cached)
        ]
        for layer in layers[-1:]:
            layer.ends = ends
        for layer in layers:
            with jax.named_scope("attention"):
                added = self.attention(norm(x, 2 * layer.number), layer)
                if layer.ends is not None:
                    x = one_row(x.reshape(layer.lanes, -1, x.shape[-1]), layer.ends)[:, 0]
                x = x + added
                if layer.outside is not None:
                    outside[f"sums of attention in block {first + layer.number}"] = layer.outside
            with jax.named_scope("mlp"):
                x = x + self.mlp(norm(x, 2 * layer.number + 1), layer)
                unchecked = layer.unchecked
        written = Block(tuple(a.keys for a in layers), tuple(a.values for a in layers))
        return x, written, outside, unchecked

    def head(self, weights: Params, rows: Array, scale: float = 1.0) -> Array:
        """Return logits [n, vocab] times `scale`; `rows` are as `forward` returns them, times
        `scale`.
        """
        with jax.named_scope("head"):
            matrix = weights["head"]
            product = dense(rows, matrix["weight"], label="head")
            return product + matrix["bias"] * scale if "bias" in matrix else product


def embed_tokens(
    weights: Params,
    config: ModelConfig,
    tokens: Array,
    positions: Array,
    *,
    start: Array | int = 0,
    hidden: bool = False,
) -> Array:
    """Embed tokens by the table "embed", without positions, which enter later; see `Family`."""
    if tokens.ndim == 1:
        return weights["embed"][tokens]  # type: ignore[no-any-return]
    return look_up(tokens, weights["embed"], label="embed")


def token_table(weights: Params) -> tuple[Any, Any]:
    """Return the tables of tokens and positions for `embed_tokens`; see `Family.embeddings`."""
    return weights["embed"], np.zeros((1, weights["embed"].shape[1]), np.float32)


def norm_name(block: int, name: str, unchecked: Unchecked | None) -> str:
    """Return the name of a norm of a block, together with the site in the block before it that the
    norm's messages also check, if any.
    """
    return name if unchecked is None else f"{name} or {_INNER.format(block - 1)}"


def one_row(x: Array, ends: Sequence[int]) -> Array:
    """Take row `ends`[i] of sequence i: [L head, n, d] -> [L head, 1, d]."""
    heads = x.shape[0] // len(ends)
    parts = [x[i * heads : (i + 1) * heads, end : end + 1] for i, end in enumerate(ends)]
    return jnp.concatenate(parts)


def family_of(config: ModelConfig) -> Family:
    """Return the family of a model."""
    return family_named(config.family)


def family_named(tag: object) -> Family:
    """Return the family with this tag; InputError when there is none."""
    if not isinstance(tag, str) or tag not in _MODULES:
        what = f"is a {shown(tag)[1:-1]} model" if isinstance(tag, str) else "names no model_type"
        raise InputError(f"{what}; only {', '.join(_MODULES)} are supported")
    family: Family = import_module(_MODULES[tag]).FAMILY
    return family


def config_from(fields: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration with the fields of `ModelConfig.asdict`. ValueError for any other
    fields.
    """
    rest = dict(fields)
    try:
        kind = family_named(rest.pop("family", None)).config
    except InputError as exc:
        raise ValueError(f"it {exc}") from None
    hints = get_type_hints(kind)
    types = {f.name: hints[f.name] for f in dataclass_fields(kind)}
    several = {name for name, hint in types.items() if hint == ranges.Each}
    if {k: type(v) for k, v in rest.items()} != types | dict.fromkeys(several, str):
        raise ValueError("it has other fields than such a model's")
    return kind(**rest | {name: tuple(map(float, rest[name].split(","))) for name in several})


def weight_shapes(config: ModelConfig) -> Any:
    """Return the shapes and dtypes of folded weights."""
    family = family_of(config)
    return jax.eval_shape(lambda: family.fold(family.init(config, jax.random.key(0)), config))


def bounds_of(weights: Any, config: ModelConfig) -> ModelBounds:
    """Return the largest sizes that activations on shares can reach with these folded weights.
    InputError for NaN or infinite weights.
    """
    _check_finite(weights)
    tokens, positions = tables_of(weights, config)
    last = Linear.of(weights["head"])
    return ModelBounds(
        bounds_of_blocks(family_of(config).blocks_of(weights), config),
        linear=ranges.SLACK * last.largest_product(config.width),
        spread=ranges.SLACK * 2 * last.largest(config.width),
        entry=ranges.SLACK * max(float(np.max(np.abs(table))) for table in (tokens, positions)),
    )


def tables_of(weights: Any, config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables of `Family.embeddings` that embed tokens [vocab, d] and those positions [m,
    d] that may be secret.
    """
    tokens, positions = map(np.asarray, family_of(config).embeddings(weights))
    return tokens, positions[config.public_rows :] if len(positions) > 1 else positions


def bounds_of_blocks(blocks: Sequence[Params], config: ModelConfig) -> list[Bounds]:
    """Return the largest sizes that activations on shares can reach in each folded block.
    InputError for NaN or infinite weights.
    """
    _check_finite(blocks)
    bounds = [family_of(config).bounds(block, config) for block in blocks]
    return [Bounds(*(ranges.SLACK * bound for bound in of_block)) for of_block in bounds]


def _check_finite(weights: Any) -> None:
    if not all(np.all(np.isfinite(w)) for w in jax.tree.leaves(weights)):
        raise InputError("the model has NaN or infinite weights; save it again")


def check_ranges(weights: Any, config: ModelConfig) -> None:
    """Raise InputError when activations of a model with these folded weights may leave the ranges
    of its configuration without being noticed.
    """
    ranges.check_bounds(bounds_of(weights, config), config)


def logits(params: Params, config: ModelConfig, tokens: Array) -> Array:
    """Return logits [n, vocab], less their mean over the vocabulary, of a whole token sequence [n],
    without a cache and from parameters that are not folded.
    """
    n, family = tokens.shape[0], family_of(config)
    weights = family.fold(params, config)
    x = family.embed(weights, config, tokens, jnp.arange(n))
    rows, _, _ = family.forward(weights, config, x, rows_after(0, n, n), config.empty_cache(n))
    return family.head(weights, rows)
