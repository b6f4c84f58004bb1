"""Checkpoint directories, compared and changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.family import Params
from models.gpt2 import GPT2Config, init_params
from models.hf import load_model, save_model
from spu_llm.core.errors import InputError

CONFIG = GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=2, n_head=2)


def random_params(config: GPT2Config = CONFIG) -> Params:
    """Parameters in which every gain and bias differs from its initial value."""
    key = jax.random.key(0)
    return jax.tree.map(
        lambda w: np.asarray(w + 0.1 * jax.random.normal(key, w.shape)), init_params(config, key)
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", CONFIG, random_params(), dtype=np.float32)
    return tmp_path / "model"


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def fault(directory: Path) -> str:
    """Return the message of the one-line InputError that loading `directory` raises."""
    with pytest.raises(InputError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


def assert_same(actual: Params, wanted: Params, tolerance: float = 0.0) -> None:
    def compare(a: np.ndarray, b: np.ndarray) -> None:
        assert isinstance(a, np.ndarray) and a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(compare, actual, wanted)
