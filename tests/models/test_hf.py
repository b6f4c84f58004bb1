"""Checkpoint directories: round trip, real-world variants, and one clear line for every fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.hf import load_config, load_model, save_model
from tests.models.checkpoints import (
    CONFIG,
    assert_same,
    change_config,
    change_tensors,
    fault,
    random_params,
)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 0.0), (np.float16, 2e-3)])
def test_round_trip(tmp_path: Path, dtype: Any, tolerance: float) -> None:
    params = random_params()
    save_model(tmp_path, CONFIG, params, dtype=dtype)
    config, loaded = load_model(tmp_path)
    assert config == CONFIG == load_config(tmp_path)
    assert_same(loaded, params, tolerance)


def test_names_without_prefix_and_with_buffers(directory: Path) -> None:
    def as_published(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 16, 16), np.float32))
        tensors["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)

    change_tensors(directory, as_published)
    assert_same(load_model(directory)[1], random_params())


def test_a_stored_tied_head_is_ignored(directory: Path) -> None:
    change_tensors(
        directory, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].copy()})
    )
    assert_same(load_model(directory)[1], random_params())


def test_a_sparse_config_as_published(directory: Path) -> None:
    """GPT-2's own config.json has no tie_word_embeddings and no scale_attn_* switches."""
    raw = json.loads((directory / "config.json").read_text())
    kept = ("model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    (directory / "config.json").write_text(json.dumps({k: raw[k] for k in kept}))
    assert load_config(directory) == CONFIG


def test_directory_missing(tmp_path: Path) -> None:
    assert "is not a directory" in fault(tmp_path / "absent")


def test_config_missing(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert "config.json is missing" in fault(directory)


@pytest.mark.parametrize("text", ["{", "[]", "null", "\ufeff", ""])
def test_config_is_no_object(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    assert "JSON" in fault(directory)


def test_config_is_not_text(directory: Path) -> None:
    (directory / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "not valid JSON" in fault(directory)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "bert"}, "is a bert model; only gpt2, llama, mistral, qwen2, t5 are"),
        ({"model_type": None}, "names no model_type"),
        ({"activation_function": "relu"}, 'activation_function "relu"; only gelu_new'),
        ({"activation_function": "gelu"}, 'activation_function "gelu"; only gelu_new'),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = false; only true"),
        ({"scale_attn_weights": False}, "scale_attn_weights = false; only true"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = true; only false",
        ),
        ({"add_cross_attention": True}, "add_cross_attention = true; only false"),
        ({"n_inner": 7}, "n_inner 7"),
        ({"num_attention_heads": 4}, "num_attention_heads = 4 beside n_head = 2; leave one"),
        ({"n_layer": 10**9}, "sizes must be positive and reasonable"),
        ({"vocab_size": 10**12}, "sizes must be positive and reasonable"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon NaN"),
        ({"n_layer": 0}, "n_layer = 0; it must be a positive integer"),
        ({"n_layer": "2"}, 'n_layer = "2"; it must be a positive integer'),
        ({"n_embd": None}, "n_embd = null; it must be a positive integer"),
        ({"n_head": 3}, "not divisible by n_head"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon"),
        ({"n_layer": 1}, "more layers than 1, the number"),
        ({"n_layer": 3}, "has no tensor transformer.h.2.ln_1.weight"),
        ({"vocab_size": 41}, "wte.weight of shape [40, 8], expected [41, 8]"),
        ({"n_positions": 8}, "wpe.weight of shape [16, 8], expected [8, 8]"),
    ],
)
def test_config_does_not_fit(directory: Path, changes: dict[str, Any], expected: str) -> None:
    change_config(directory, **changes)
    assert expected in fault(directory)


def test_weights_missing(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert "model.safetensors is missing" in fault(directory)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_weights_truncated(directory: Path, size: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "truncated or not a safetensors file" in fault(directory)


def test_weights_are_something_else(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "truncated or not a safetensors file" in fault(directory)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("transformer.ln_f.bias"), "has no tensor transformer.ln_f.bias"),
        (lambda t: t.clear(), "has no tensor"),
        (
            lambda t: t.update({"transformer.ln_f.bias": np.zeros(9, np.float32)}),
            "transformer.ln_f.bias of shape [9], expected [8]",
        ),
        (
            lambda t: t.update({"transformer.ln_f.bias": np.zeros(8, np.float64)}),
            "as F64; save the model as float16, bfloat16 or float32",
        ),
        (lambda t: t["transformer.wpe.weight"].fill(np.nan), "NaN or infinite values in"),
        (lambda t: t["transformer.wpe.weight"].fill(-np.inf), "NaN or infinite values in"),
        (
            lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}),
            "only a tied head is supported",
        ),
    ],
)
def test_weights_do_not_fit(
    directory: Path, change: Callable[[dict[str, np.ndarray]], Any], expected: str
) -> None:
    change_tensors(directory, change)
    assert expected in fault(directory)
