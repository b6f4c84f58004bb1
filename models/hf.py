"""Model directories in the Hugging Face layout: `config.json` and `model.safetensors`; beside them
`ranges.json`, where the model's ranges were chosen (`models.calibration`).

Weights are stored as float16 or float32 and come into memory as float32 numpy arrays. Whatever is
wrong with a directory is one InputError that names the path and says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from models import ranges
from models.family import ModelConfig, Params, Tensor, family_named, family_of
from spu_llm.core.errors import InputError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
RANGES_FILE = "ranges.json"


def load_config(directory: Path) -> ModelConfig:
    """The shape that `directory/config.json` declares, and the ranges in `directory/ranges.json` if
    there is one, without reading weights.
    """
    path = Path(directory) / CONFIG_FILE
    raw = _read_json(path)
    try:
        config = family_named(raw.get("model_type")).parse(raw)
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    except ValueError as error:
        raise InputError(f"{path} describes no model that works here: {error}") from None
    stored = Path(directory) / RANGES_FILE
    return _with_ranges(config, stored, _read_json(stored)) if stored.exists() else config


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


def save_model(
    directory: Path, config: ModelConfig, params: Params, dtype: type[np.floating[Any]] = np.float16
) -> None:
    """Write `config.json` and `model.safetensors` (values as `dtype`) into `directory`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    family = family_of(config)
    stored = {
        family.prefix + t.name: np.ascontiguousarray(_stored(t, _get(params, t.path)), dtype)
        for t in family.tensors(config)
    }
    (directory / WEIGHTS_FILE).write_bytes(save(stored, metadata={"format": "pt"}))
    described = family.describe(config) | {"torch_dtype": np.dtype(dtype).name}
    text = json.dumps(described, indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def _stored(tensor: Tensor, values: np.ndarray) -> np.ndarray:
    return values.T if tensor.transposed else values


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    directory = path.parent
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory; give the path of a model directory")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing; give a directory with {CONFIG_FILE} and {WEIGHTS_FILE}"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); copy it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object; copy it again")
    return value


def _read_params(path: Path, config: ModelConfig, stored: Any) -> Params:
    """The parameters in an open safetensors file, checked for shape and finiteness."""
    family, names = family_of(config), set(stored.keys())
    prefix = family.prefix if any(name.startswith(family.prefix) for name in names) else ""
    params: Params = {"blocks": [{} for _ in range(config.layers)]}
    found: dict[str, np.ndarray] = {}
    for tensor in family.tensors(config):
        full = prefix + tensor.name
        if full not in names:
            raise InputError(f"{path} has no tensor {full}; save the model again")
        found[tensor.name] = _stored(tensor, _read_tensor(path, stored, full, tensor))
        _put(params, tensor.path, found[tensor.name])
    more = {prefix + t.name for t in family.tensors(config.with_layers(config.layers + 1))}
    if names & (more - {prefix + name for name in found}):
        raise InputError(
            f"{path} has more layers than {config.layers_name} = {config.layers} in {CONFIG_FILE}; "
            "use the config.json that belongs to these weights"
        )
    for name, original in family.copies.items():
        if name in names - found.keys():
            tensor = Tensor(name, (), found[original].shape)
            if not np.array_equal(_read_tensor(path, stored, name, tensor), found[original]):
                raise InputError(
                    f"{path} has an {name} that differs from {original}; "
                    "only a tied head is supported"
                )
    return params


def _read_tensor(path: Path, stored: Any, name: str, tensor: Tensor) -> np.ndarray:
    """Tensor `name` as it is stored, as float32, of exactly its shape and finite."""
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
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
    return values


def _get(params: Params, path: tuple[str, ...]) -> np.ndarray:
    value: Any = params
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value[part]
    return np.asarray(value)


def _put(params: Params, path: tuple[str, ...], values: np.ndarray) -> None:
    node: Any = params
    for part in path[:-1]:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    node[path[-1]] = values


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
