"""Model directories in the Hugging Face layout: `config.json` and `model.safetensors`; beside them
`ranges.json`, where the model's ranges were chosen (`models.calibration`).

Weights are stored as float16 or float32 and come into memory as float32 numpy arrays. Whatever is
wrong with a directory is one InputError that names the path and says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from models import ranges
from models.family import ModelConfig, Params, family_named, family_of
from spu_llm.core.errors import InputError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
RANGES_FILE = "ranges.json"
HEAD = "lm_head.weight"  # in a checkpoint; of a tied head a copy may be there


def load_config(directory: Path) -> ModelConfig:
    """The shape that `directory/config.json` declares, and the ranges in `directory/ranges.json` if
    there is one, without reading weights.
    """
    path = Path(directory) / CONFIG_FILE
    raw = _read_object(path)
    try:
        config = family_named(raw.get("model_type")).parse(raw)
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    except ValueError as error:
        raise InputError(f"{path} describes no model that works here: {error}") from None
    stored = Path(directory) / RANGES_FILE
    return _with_ranges(config, stored, _read_object(stored)) if stored.exists() else config


def save_ranges(directory: Path, config: ModelConfig) -> None:
    """Write the ranges of `config` into `directory/ranges.json`. InputError when that fails."""
    path = Path(directory) / RANGES_FILE
    try:
        path.write_text(json.dumps(ranges.as_dict(config), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def _with_ranges(config: ModelConfig, path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    kinds = {name: type(value) for name, value in ranges.as_dict(config).items()}
    if {name: type(value) for name, value in raw.items()} != kinds:
        raise InputError(f"{path} has other fields than {', '.join(kinds)}; calibrate again")
    try:
        return replace(config, **raw)
    except ValueError as error:
        raise InputError(f"{path} has ranges that cannot be: {error}; calibrate again") from None


def load_model(directory: Path) -> tuple[ModelConfig, Params]:
    """Config and parameters (float32 numpy arrays) of a model directory."""
    config = load_config(directory)
    path = Path(directory) / WEIGHTS_FILE
    if not path.is_file():
        raise InputError(
            f"{path} is missing; save the model in safetensors format into this directory"
        )
    try:
        with safe_open(path, framework="numpy") as stored:
            return config, _read_params(path, config, stored)
    except SafetensorError as error:
        raise InputError(
            f"{path} is truncated or not a safetensors file ({_one_line(error)}); copy it again"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None



def load_folded(directory: Path) -> tuple[ModelConfig, Any]:
    """The configuration and the folded weights; errors of `load_model`."""
    config, params = load_model(directory)
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


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    value = read_json(path, f"give a directory with {CONFIG_FILE} and {WEIGHTS_FILE}")
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object; copy it again")
    return value


def read_json(path: Path, if_missing: str) -> Any:
    """What `path` in a model directory holds. InputError when it cannot be read; `if_missing` says
    what to do then.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a directory; give the path of a model directory")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing; {if_missing}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); copy it again") from None


# ---- parameters by name


class Tensor(NamedTuple):
    """A parameter: its name in a checkpoint, its place in `Params`, its shape there, and whether
    the checkpoint holds it transposed.
    """

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    transposed: bool


def _tensors(config: ModelConfig, params: Params) -> Iterator[Tensor]:
    """Every parameter of a model; `params`: they, or their shapes."""
    family = family_of(config)
    for name, place in family.names.items():
        if place[0] not in params:
            continue
        for layer in range(config.layers) if "{}" in name else (0,):
            path = tuple(layer if part == "{}" else part for part in place)
            shape = tuple(_at(params, path).shape)
            yield Tensor(name.format(layer), path, shape, place[-1] in family.transposed)


def _at(node: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        node = node[part]
    return node


def _read_params(path: Path, config: ModelConfig, stored: Any) -> Params:
    """The parameters in an open safetensors file, checked for shape and finiteness."""
    family, names = family_of(config), set(stored.keys())
    bare = not any(name.startswith(family.prefix) for name in names)

    def found(name: str) -> str:
        """As it is called in this file."""
        return name.removeprefix(family.prefix) if bare else name

    # Shapes give way to values, one by one.
    params: Params = jax.eval_shape(lambda: family.init(config, jax.random.key(0)))
    expected = [t._replace(name=found(t.name)) for t in _tensors(config, params)]
    for tensor in expected:
        if tensor.name not in names:
            raise InputError(f"{path} has no tensor {tensor.name}; save the model again")
        values = _read_tensor(path, stored, tensor)
        _at(params, tensor.path[:-1])[tensor.path[-1]] = values
    if names & {found(name.format(config.layers)) for name in family.names if "{}" in name}:
        raise InputError(
            f"{path} has more layers than {config.layers_name} = {config.layers} in {CONFIG_FILE}; "
            "use the config.json that belongs to these weights"
        )
    embedding = expected[0]
    if HEAD in names - {tensor.name for tensor in expected}:
        copy = _read_tensor(path, stored, embedding._replace(name=HEAD))
        if not np.array_equal(copy, _at(params, embedding.path)):
            raise InputError(
                f"{path} has an {HEAD} that differs from {embedding.name}; "
                "only a tied head is supported"
            )
    return params


def _read_tensor(path: Path, stored: Any, tensor: Tensor) -> np.ndarray:
    """As float32, of exactly its shape and finite."""
    name, shape = tensor.name, tensor.shape[::-1] if tensor.transposed else tensor.shape
    view = stored.get_slice(name)
    if view.get_dtype() not in ("F16", "F32"):
        raise InputError(
            f"{path} stores {name} as {view.get_dtype()}; save the model as float16 or float32"
        )
    if tuple(view.get_shape()) != shape:
        raise InputError(
            f"{path} has {name} of shape {list(view.get_shape())}, expected {list(shape)} from "
            f"{CONFIG_FILE}; use the config.json that belongs to these weights"
        )
    values = np.asarray(stored.get_tensor(name), np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"{path} has NaN or infinite values in {name}; save the model again")
    return values.T if tensor.transposed else values


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
