"""Model directories in the Hugging Face layout: `config.json`, `model.safetensors` or several such
files with an index (`models.shards`), `tokenizer.json`, and, for a calibrated model
(`models.calibration`), `ranges.json`.

Weights are stored as float16, bfloat16 or float32 and come into memory as float32 numpy arrays. A
model has the vocabulary of its directory's tokenizer: the rows of embedding and head without a
token, with which most published models are padded, are left out, so that none can be drawn. Any
fault of a directory is one InputError that names the path and says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import save

from models import ranges
from models.family import ModelConfig, Params, family_named, family_of
from models.files import CONFIG_FILE, RANGES_FILE, TOKENIZER_FILE, WEIGHTS_FILE, place_of, read_json
from models.shards import Weights, open_weights
from models.vocabulary import tokens_beside
from spu_llm.core.errors import InputError

HEAD = "lm_head.weight"  # in a checkpoint; of a tied head a copy may be there


def load_config(
    directory: Path, ranges_file: Path | None = None, *, encoders: bool = False
) -> ModelConfig:
    """Return the shape in `directory/config.json`, with the vocabulary of
    `directory/tokenizer.json`, if it exists, and the ranges in `ranges_file`, if given, or else in
    `directory/ranges.json`, if it exists. Weights are not read. InputError, unless `encoders` are
    wanted, too, for a model whose prompt an encoder reads.
    """
    config = _stored_config(directory, ranges_file, encoders)
    return replace(config, vocab_size=_vocabulary(directory, config))


def _stored_config(directory: Path, ranges_file: Path | None, encoders: bool) -> ModelConfig:
    """Return the configuration of `load_config`, but with the weights' vocabulary size, padding
    included.
    """
    config = _stored_shape(directory, encoders)
    stored = ranges_file or Path(directory) / RANGES_FILE
    if ranges_file is None and not stored.exists():
        return config
    return _with_ranges(config, stored, _read_object(stored, "spu-llm calibrate writes one"))


def _stored_shape(directory: Path, encoders: bool) -> ModelConfig:
    path = Path(directory) / CONFIG_FILE
    raw = _read_object(path)
    try:
        config = family_named(raw.get("model_type")).parse(raw)
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    except ValueError as error:
        raise InputError(f"{path} describes no model that works here: {error}") from None
    if config.encodes and not encoders:
        raise InputError(
            f"{path} is of a {config.title} model, whose prompt an encoder reads; this command "
            "takes no such model (serve, generate and demo do)"
        )
    return config


def _vocabulary(directory: Path, config: ModelConfig) -> int:
    """Return the number of tokens of a model. InputError when its weights have fewer rows."""
    tokens = tokens_beside(directory)
    if tokens is not None and tokens > config.vocab_size:
        raise InputError(
            f"{Path(directory) / CONFIG_FILE} has vocab_size {config.vocab_size}, but the "
            f"{TOKENIZER_FILE} beside it {tokens} tokens; use the tokenizer that belongs to the "
            "model"
        )
    return config.vocab_size if tokens is None else tokens


def save_ranges(path: Path, config: ModelConfig) -> None:
    """Write the ranges of `config` to a file. InputError when that fails."""
    text = json.dumps(ranges.as_dict(config), indent=2) + "\n"
    try:
        place_of(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def _with_ranges(config: ModelConfig, path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    kinds = {name: type(value) for name, value in ranges.as_dict(config).items()}
    if {name: type(value) for name, value in raw.items()} != kinds:
        raise InputError(f"{path} has other fields than {', '.join(kinds)}; calibrate again")
    lists = {name: value for name, value in raw.items() if isinstance(value, list)}
    if not all(type(value) is float for values in lists.values() for value in values):
        raise InputError(f"{path} has ranges that are no numbers; calibrate again")
    fields = {**raw, **{name: tuple(values) for name, values in lists.items()}}
    try:
        return replace(config, **fields)
    except ValueError as error:
        raise InputError(f"{path} has ranges that cannot be: {error}; calibrate again") from None


def load_model(
    directory: Path, ranges_file: Path | None = None, *, encoders: bool = False
) -> tuple[ModelConfig, Params]:
    """Return configuration (`load_config`) and parameters (float32 numpy arrays) of a model."""
    return _loaded(directory, _stored_config(directory, ranges_file, encoders))


def load_uncalibrated(directory: Path, *, encoders: bool = False) -> tuple[ModelConfig, Params]:
    """Return configuration and parameters of a model with default ranges, ignoring stored ones;
    errors of `load_config`.
    """
    return _loaded(directory, _stored_shape(directory, encoders))


def _loaded(directory: Path, stored: ModelConfig) -> tuple[ModelConfig, Params]:
    config = replace(stored, vocab_size=_vocabulary(directory, stored))
    with open_weights(directory) as weights:
        return config, _read_params(weights, stored, config.vocab_size)


def load_folded(
    directory: Path, ranges_file: Path | None = None, *, encoders: bool = False
) -> tuple[ModelConfig, Any]:
    """Return configuration and folded weights of a model; errors of `load_model`."""
    config, params = load_model(directory, ranges_file, encoders=encoders)
    return config, family_of(config).fold(params, config)


def save_model(
    directory: Path, config: ModelConfig, params: Params, dtype: type[np.floating[Any]] = np.float16
) -> None:
    """Write `config.json` and `model.safetensors` (values as `dtype`) into `directory`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = {}
    for tensor in _tensors(config, params):
        values = np.asarray(_at(params, tensor.path))
        values = values.T if tensor.transposed else values
        stored[tensor.name] = np.ascontiguousarray(values, dtype)
    (directory / WEIGHTS_FILE).write_bytes(save(stored, metadata={"format": "pt"}))
    described = family_of(config).describe(config) | {"torch_dtype": np.dtype(dtype).name}
    text = json.dumps(described, indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def _read_object(
    path: Path, if_missing: str = f"give a directory with {CONFIG_FILE} and {WEIGHTS_FILE}"
) -> dict[str, Any]:
    """Return the JSON object in `path`."""
    value = read_json(path, if_missing)
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object; copy it again")
    return value


# ---- parameters by name


class Tensor(NamedTuple):
    """A parameter of a model and its place in a checkpoint."""

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    transposed: bool


def _tensors(config: ModelConfig, params: Params) -> Iterator[Tensor]:
    """Yield every parameter of a model; `params`: the parameters, or their shapes."""
    family = family_of(config)
    for name, place in family.names.items():
        if not _has(params, place):
            continue
        for layer in range(config.repeats(name)) if "{}" in name else (0,):
            path = tuple(layer if part == "{}" else part for part in place)
            shape = tuple(_at(params, path).shape)
            yield Tensor(name.format(layer), path, shape, place[-1] in family.transposed)


def _has(params: Params, place: tuple[str, ...]) -> bool:
    """Tell whether the model has the parameter at a path, in its first block where it has several;
    a head that is tied, or a matrix of another variant, it has not.
    """
    node: Any = params
    for part in place:
        if part == "{}":
            node = node[0]
        elif part not in node:
            return False
        else:
            node = node[part]
    return True


def _at(node: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        node = node[part]
    return node


def stored_tensors(directory: Path, weights: Weights) -> list[Tensor]:
    """Return the tensors of a directory's model, under the names in its files, and the copy of a
    tied head where there is one; all are checked for type and shape. InputError when one is
    missing.
    """
    config = _stored_config(directory, None, True)
    expected = _expected(weights, config, _shapes(config))
    copies = {HEAD} & weights.places.keys() - {tensor.name for tensor in expected}
    stored = expected + [expected[0]._replace(name=name) for name in copies]
    for tensor in stored:
        _checked_view(weights, tensor)
    return stored


def _shapes(config: ModelConfig) -> Params:
    return jax.eval_shape(lambda: family_of(config).init(config, jax.random.key(0)))


def _expected(weights: Weights, config: ModelConfig, params: Params) -> list[Tensor]:
    """Return the tensors that a model needs, the embedding first, under their names in its weights.
    InputError when the weights lack one, or have more layers. `params`: the parameters' shapes.
    """
    family, names = family_of(config), weights.places.keys()
    bare = not any(name.startswith(family.prefix) for name in names)

    def file_name(name: str) -> str:
        """Return the name of a tensor as these files have it."""
        return name.removeprefix(family.prefix) if bare else name

    expected = [t._replace(name=file_name(t.name)) for t in _tensors(config, params)]
    for tensor in expected:
        if tensor.name not in names:
            raise InputError(f"{weights.path} has no tensor {tensor.name}; save the model again")
    counts = {n: config.repeats(n) for n in family.names if "{}" in n}
    more = {count for n, count in counts.items() if file_name(n.format(count)) in names}
    if more:
        raise InputError(
            f"{weights.path} has more layers than {max(more)}, the number of its stack in "
            f"{CONFIG_FILE}; use the config.json that belongs to these weights"
        )
    return expected


def _read_params(weights: Weights, config: ModelConfig, tokens: int) -> Params:
    """Read the parameters from open weights, checked for shape and finiteness; of embedding and
    head, only the rows of the first `tokens` tokens.
    """
    params = _shapes(config)
    expected = _expected(weights, config, params)
    embedding = expected[0]
    # Shapes give way to values, one by one.
    for tensor in expected:
        rows = tokens if tensor.name in (embedding.name, HEAD) else None
        values = _read_tensor(weights, tensor, rows)
        _at(params, tensor.path[:-1])[tensor.path[-1]] = values
    if HEAD in weights.places.keys() - {tensor.name for tensor in expected}:
        copy = _read_tensor(weights, embedding._replace(name=HEAD), tokens)
        if not np.array_equal(copy, _at(params, embedding.path)):
            raise InputError(
                f"{weights.path_of(HEAD)} has an {HEAD} that differs from {embedding.name}; "
                "only a tied head is supported"
            )
    return params


def _read_tensor(weights: Weights, tensor: Tensor, rows: int | None = None) -> np.ndarray:
    """Read a parameter as float32, checked for its shape and for finiteness; if `rows` is given,
    only so many first rows, as stored.
    """
    values = np.asarray(_checked_view(weights, tensor)[:rows], np.float32)
    if not np.isfinite(values).all():
        raise InputError(
            f"{weights.path_of(tensor.name)} has NaN or infinite values in {tensor.name}; save the "
            "model again"
        )
    return values.T if tensor.transposed else values


def _checked_view(weights: Weights, tensor: Tensor) -> Any:
    """Return the stored tensor of a parameter, for reading by slices. InputError when it has
    another type or shape.
    """
    name, shape = tensor.name, tensor.shape[::-1] if tensor.transposed else tensor.shape
    path, view = weights.path_of(name), weights.view(name)
    if view.get_dtype() not in ("F16", "BF16", "F32"):  # numpy knows bfloat16 through JAX
        raise InputError(
            f"{path} stores {name} as {view.get_dtype()}; save the model as float16, bfloat16 or "
            "float32"
        )
    if tuple(view.get_shape()) != shape:
        raise InputError(
            f"{path} has {name} of shape {list(view.get_shape())}, expected {list(shape)} from "
            f"{CONFIG_FILE}; use the config.json that belongs to these weights"
        )
    return view
