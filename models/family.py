"""What a model family is to everything outside `models/`: one record of its functions.

A family is a module that computes its models with the layers of `protocols.functions.layers`, on
weights that were folded first, and its `FAMILY` record. The tag is the `model_type` of
`config.json`. To add one: write the module, and name it in `_MODULES`.

Shapes: a forward takes n rows of each of L *lanes*, sequences with cache rows of their own that go
through the model together: linear layers, norms and comparisons are of all L n rows at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import Block, empty_block, rows_after
from models.ranges import Bounds, Ranges, check_bounds, with_slack
from spu_llm.core.errors import InputError

Params = dict[str, Any]

_MODULES = {"gpt2": "models.gpt2", "llama": "models.llama"}


@dataclass(frozen=True)
class ModelConfig(Ranges):
    """A model's shape, in the words of its `config.json`, and the ranges of its activations on
    shares. Both parties know it.

    ValueError for a shape that no model has, or that words of the ring do not hold.
    """

    family: ClassVar[str]
    layers_name: ClassVar[str]  # the field with the number of blocks,
    context_name: ClassVar[str]  # with the positions of a text at most,
    width_names: ClassVar[tuple[str, ...]]  # with sizes that grow together, the stream's first

    vocab_size: int

    @property
    def layers(self) -> int:
        """Blocks, each with a cache of its own."""
        return int(getattr(self, self.layers_name))

    @property
    def context(self) -> int:
        """Positions of a text at most."""
        return int(getattr(self, self.context_name))

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return int(getattr(self, self.width_names[0]))

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: the cache's."""
        raise NotImplementedError

    @property
    def head_dim(self) -> int:
        raise NotImplementedError

    def with_layers(self, count: int) -> Any:
        """The same shape with another number of blocks."""
        return replace(self, **{self.layers_name: count})

    def with_context(self, positions: int) -> Any:
        """The same shape for texts of so many positions."""
        return replace(self, **{self.context_name: positions})

    def widened(self, factor: int) -> Any:
        """The same shape, so many times as wide, with more heads of the same size."""
        return replace(self, **{name: factor * getattr(self, name) for name in self.width_names})

    def asdict(self) -> dict[str, int | float | str]:
        """All fields and the family's tag, as scalars."""
        return {"family": self.family, **asdict(self)}

    def empty_cache(self, positions: int, lanes: int = 1) -> Block:
        """Room for so many rows of every lane."""
        return empty_block(self.layers, lanes * self.kv_heads, positions, self.head_dim)


class Tensor(NamedTuple):
    """A parameter: its name in the checkpoint, its place in `Params`, its shape there, and whether
    the checkpoint stores it transposed.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """The functions of a family. `config` is of its own class everywhere.

    parse(raw)              -> config, from the fields of `config.json`. InputError, without a path,
                            for what is not this very model.
    describe(config)        -> those fields, as the transformers library writes them.
    tensors(config)         -> every parameter. `prefix` may stand before their names in a file;
                            a file may hold each of `copies` too: equal to another tensor, unless it
                            is a parameter of its own.
    init(config, key)       -> random parameters (float32).
    fold(params, config)    -> weights: the same model in fewer operations, plaintext work of
                            whoever has the parameters.
    bounds(weights, config) -> what activations can reach (`models.ranges`).
    embeddings(weights)     -> tables of tokens [vocab, d] and of positions [m, d], whose sums go
                            into the first block; one row of zeros where positions enter later.
    embed(weights, config, tokens, positions, *, hidden)
        -> rows [n, d]. tokens: ids [n] known in the clear, or one-hot rows [n, vocab]. positions:
        int32 [n]; `hidden` says that they are the client's secret. `forward` has them again, in
        `rows`.
    forward(weights, config, x, rows, cache, prefix, scale, normalise)
        -> normalised rows [L n, d], times the public `scale`, for `head`; the cache with keys and
        values of the rows written; and a count (int32) of what left the range of a function on
        shares (`protocols.functions.in_range`). x [L n, d] is the embedding of the rows, `rows`
        (`models.cache.Rows`) says where they stand; all of `prefix` (one lane's, for all) is
        visible. `normalise` stands in for the norm of the ranges, in plaintext.
    head(weights, rows, scale) -> logits [n, vocab], times `scale`.
    """

    tag: str
    config: type[ModelConfig]
    parse: Callable[[Mapping[str, Any]], ModelConfig]
    describe: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], Iterator[Tensor]]
    init: Callable[[Any, Array], Params]
    fold: Callable[[Params, Any], Any]
    bounds: Callable[[Any, Any], Bounds]
    embeddings: Callable[[Any], tuple[Any, Any]]
    embed: Callable[..., Array]
    forward: Callable[..., tuple[Array, Block, Array]]
    head: Callable[..., Array]
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)


def family_of(config: ModelConfig) -> Family:
    """The family of a model."""
    return family_named(config.family)


def family_named(tag: object) -> Family:
    """The family with this tag; InputError when there is none."""
    if not isinstance(tag, str) or tag not in _MODULES:
        found = f"is a {tag} model" if isinstance(tag, str) else "names no model_type"
        raise InputError(f"{found}; only {' and '.join(_MODULES)} are supported")
    family: Family = import_module(_MODULES[tag]).FAMILY
    return family


def config_from(fields: Mapping[str, Any]) -> ModelConfig:
    """The configuration that `ModelConfig.asdict` gave; ValueError for any other fields."""
    rest = dict(fields)
    try:
        kind = family_named(rest.pop("family", None)).config
    except InputError as exc:
        raise ValueError(f"it {exc}") from None
    hints = get_type_hints(kind)
    types = {f.name: hints[f.name] for f in dataclass_fields(kind)}
    if {k: type(v) for k, v in rest.items()} != types:
        raise ValueError("it has other fields than such a model's")
    return kind(**rest)


def weight_shapes(config: ModelConfig) -> Any:
    """Shapes and dtypes of folded weights."""
    family = family_of(config)
    return jax.eval_shape(lambda: family.fold(family.init(config, jax.random.key(0)), config))


def bounds_of(weights: Any, config: ModelConfig) -> Bounds:
    """What activations on shares can reach with these folded weights. InputError for weights that
    are no numbers.
    """
    if not all(np.all(np.isfinite(w)) for w in jax.tree.leaves(weights)):
        raise InputError("the model has NaN or infinite weights; save it again")
    return with_slack(family_of(config).bounds(weights, config))


def check_ranges(weights: Any, config: ModelConfig) -> None:
    """InputError when activations of a model with these folded weights may leave the ranges of its
    configuration without being noticed.
    """
    check_bounds(bounds_of(weights, config), config)


def logits(params: Params, config: ModelConfig, tokens: Array) -> Array:
    """Logits [n, vocab], less their mean over the vocabulary, of a whole token sequence [n] without
    a cache; weights not folded.
    """
    n, family = tokens.shape[0], family_of(config)
    weights = family.fold(params, config)
    x = family.embed(weights, config, tokens, jnp.arange(n))
    rows, _, _ = family.forward(weights, config, x, rows_after(0, n, n), config.empty_cache(n))
    return family.head(weights, rows)


# ---- fields of a `config.json`


def check_switches(raw: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """InputError when a switch has another value than the one that is computed."""
    for name, supported in fixed.items():
        value = raw.get(name, supported)
        if value is not supported:
            raise InputError(
                f"has {name} = {json.dumps(value)}; only {json.dumps(supported)} is supported"
            )


def positive_int(raw: Mapping[str, Any], name: str) -> int:
    """A size; InputError when it is none."""
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"has {name} = {json.dumps(value)}; it must be a positive integer")
    return value


def fraction(raw: Mapping[str, Any], name: str, default: float) -> float:
    """A number between 0 and 1; InputError for others."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InputError(f"has {name} {value!r}; it must be between 0 and 1")
    return float(value)
