"""Logits of tiny models of every family that has rotary positions, as `transformers` computes them.

    python -m tests.models.references          record them again; needs PyTorch

The tests read them without it. Weights follow from a model's name alone.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.family import ModelConfig, Params, family_of
from models.hf import save_model
from models.llama import LlamaConfig
from models.mistral import MistralConfig
from models.qwen2 import Qwen2Config

FILE = Path(__file__).with_name("references.json")
LAST = 6  # rows that are kept

_SHAPE: dict[str, Any] = {
    "vocab_size": 24,
    "max_position_embeddings": 64,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**_SHAPE, rope_theta=500.0),
    "llama with heads of its own size": LlamaConfig(
        **_SHAPE, head_dim=10, tie_word_embeddings=True
    ),
    "llama, linear": LlamaConfig(**_SHAPE, rope_kind="linear", rope_factor=2.5),
    # Frequencies of all three kinds: kept, in between, divided.
    "llama, llama3": LlamaConfig(
        **_SHAPE,
        head_dim=16,
        rope_theta=100.0,
        rope_kind="llama3",
        rope_factor=8.0,
        rope_low=1.0,
        rope_high=4.0,
        rope_context=24,
    ),
    "mistral": MistralConfig(**_SHAPE, rms_norm_eps=1e-2),
    "qwen2": Qwen2Config(**_SHAPE, rope_theta=1000.0),
    "qwen2, tied": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
}


def tokens_of(name: str) -> np.ndarray:
    """Return a text [40] of a model's."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(24, size=40)


def params_of(name: str) -> Params:
    """Parameters in which every gain differs from 1 and every bias from 0."""
    config, rng = MODELS[name], np.random.default_rng(zlib.crc32(name.encode()) + 1)
    shapes = jax.eval_shape(lambda: family_of(config).init(config, jax.random.key(0)))

    def values(shape: Any) -> np.ndarray:
        noise = rng.normal(size=shape.shape) * 0.4
        return np.asarray(noise + (1.0 if shape.ndim == 1 else 0.0), np.float32)

    return jax.tree.map(values, shapes)


def recorded(name: str) -> np.ndarray:
    """Return the last rows of logits that the file has of a model."""
    return np.array(json.loads(FILE.read_text())[name], np.float32)


def main() -> None:
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM

    collected = {}
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            save_model(Path(directory), config, params_of(name), dtype=np.float32)
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            with torch.no_grad():
                rows = model(torch.tensor(tokens_of(name)[None])).logits[0, -LAST:]
        collected[name] = [[round(float(value), 6) for value in row] for row in rows]
    lines = [f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in collected.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
