"""GPT-2 directories in the Hugging Face layout: `config.json` and `model.safetensors`; beside them
`ranges.json`, where the model's ranges were chosen (`models.calibration`).

Weights are stored as float16 or float32 and come into memory as float32 numpy arrays. Whatever is
wrong with a directory is one InputError that names the path and says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from models import ranges
from models.gpt2 import HF_NAMES, GPT2Config, Params
from spu_llm.core.errors import InputError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
RANGES_FILE = "ranges.json"
PREFIX = "transformer."

# The `config.json` switches that change the arithmetic, with the only value `gpt2.py` computes.
FIXED_SWITCHES: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")


def load_config(directory: Path) -> GPT2Config:
    """The shape that `directory/config.json` declares, and the ranges in `directory/ranges.json` if
    there is one, without reading weights.
    """
    path = Path(directory) / CONFIG_FILE
    config = _parse_config(path, _read_json(path))
    stored = Path(directory) / RANGES_FILE
    return _with_ranges(config, stored, _read_json(stored)) if stored.exists() else config


def save_ranges(directory: Path, config: GPT2Config) -> None:
    """Write the ranges of `config` into `directory/ranges.json`. InputError when that fails."""
    path = Path(directory) / RANGES_FILE
    try:
        path.write_text(json.dumps(ranges.as_dict(config), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def _with_ranges(config: GPT2Config, path: Path, raw: Mapping[str, Any]) -> GPT2Config:
    kinds = {name: type(value) for name, value in ranges.as_dict(config).items()}
    if {name: type(value) for name, value in raw.items()} != kinds:
        raise InputError(f"{path} has other fields than {', '.join(kinds)}; calibrate again")
    try:
        return replace(config, **raw)
    except ValueError as error:
        raise InputError(f"{path} has ranges that cannot be: {error}; calibrate again") from None


def load_model(directory: Path) -> tuple[GPT2Config, Params]:
    """Config and parameters (float32 numpy arrays) of a GPT-2 directory."""
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
    directory: Path, config: GPT2Config, params: Params, dtype: type[np.floating[Any]] = np.float16
) -> None:
    """Write `config.json` and `model.safetensors` (values as `dtype`) into `directory`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        PREFIX + name: np.ascontiguousarray(_get(params, path), dtype)
        for name, path in _tensor_paths(config)
    }
    (directory / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    text = json.dumps(_hf_config(config, np.dtype(dtype).name), indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def _hf_config(config: GPT2Config, dtype: str) -> dict[str, Any]:
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
        "torch_dtype": dtype,
    }


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    directory = path.parent
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory; give the path of a GPT-2 directory")
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


def _parse_config(path: Path, raw: Mapping[str, Any]) -> GPT2Config:
    """The shape in `raw`, after checking that `gpt2.py` computes this very model."""
    kind = raw.get("model_type")
    if kind != "gpt2":
        found = f"is a {kind} model" if isinstance(kind, str) else "names no model_type"
        raise InputError(f"{path} {found}; only gpt2 is supported")
    activation = raw.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{path} has activation_function {activation!r}; only gelu_new is supported"
        )
    for name, supported in FIXED_SWITCHES.items():
        value = raw.get(name, supported)
        if value is not supported:
            raise InputError(
                f"{path} has {name} = {json.dumps(value)}; "
                f"only {json.dumps(supported)} is supported"
            )
    sizes = {
        name: _positive_int(path, raw, name)
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    }
    if sizes["n_embd"] % sizes["n_head"]:
        raise InputError(
            f"{path} has n_embd {sizes['n_embd']} not divisible by n_head "
            f"{sizes['n_head']}; copy it again"
        )
    inner = raw.get("n_inner")
    if inner is not None and inner != 4 * sizes["n_embd"]:
        raise InputError(f"{path} has n_inner {inner}; only 4 * n_embd is supported")
    epsilon = raw.get("layer_norm_epsilon", 1e-5)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise InputError(f"{path} has layer_norm_epsilon {epsilon!r}; it must be between 0 and 1")
    try:
        return GPT2Config(**sizes, layer_norm_epsilon=float(epsilon))
    except ValueError as error:
        raise InputError(f"{path} describes no model that works here: {error}") from None


def _positive_int(path: Path, raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{path} has {name} = {json.dumps(value)}; it must be a positive integer")
    return value


def _tensor_paths(config: GPT2Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(Hugging Face name, path in `Params`) of every tensor of the model."""
    for name, path in HF_NAMES.items():
        layers = range(config.n_layer) if "{}" in name else (0,)
        for layer in layers:
            yield name.format(layer), tuple(part.format(layer) for part in path)


def _shape(config: GPT2Config, path: tuple[str, ...]) -> tuple[int, ...]:
    """Shape of the parameter at `path`."""
    d = config.n_embd
    if path == ("wte",):
        return (config.vocab_size, d)
    if path == ("wpe",):
        return (config.n_positions, d)
    linears = {"qkv": (d, 3 * d), "out": (d, d), "fc": (d, 4 * d), "proj": (4 * d, d)}
    if path[-2] not in linears:  # a norm
        return (d,)
    return linears[path[-2]] if path[-1] == "weight" else linears[path[-2]][1:]


def _read_params(path: Path, config: GPT2Config, stored: Any) -> Params:
    """The parameters in an open safetensors file, checked for shape and finiteness."""
    names = set(stored.keys())
    prefix = PREFIX if any(name.startswith(PREFIX) for name in names) else ""
    params: Params = {"blocks": [{} for _ in range(config.n_layer)]}
    for name, place in _tensor_paths(config):
        full = prefix + name
        if full not in names:
            raise InputError(f"{path} has no tensor {full}; save the model again")
        _put(params, place, _read_tensor(path, stored, full, _shape(config, place)))
    extra = f"{prefix}h.{config.n_layer}.ln_1.weight"
    if extra in names:
        raise InputError(
            f"{path} has more layers than n_layer = {config.n_layer} in {CONFIG_FILE}; "
            "use the config.json that belongs to these weights"
        )
    if "lm_head.weight" in names:
        lm_head = _read_tensor(path, stored, "lm_head.weight", _shape(config, ("wte",)))
        if not np.array_equal(lm_head, params["wte"]):
            raise InputError(
                f"{path} has an lm_head.weight that differs from wte.weight; "
                "only a tied head is supported"
            )
    return params


def _read_tensor(path: Path, stored: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Tensor `name` as float32, of exactly `shape` and finite."""
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
    place: Any = params
    for part in path[:-1]:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    place[path[-1]] = values


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
