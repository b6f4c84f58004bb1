"""Import of a published Hugging Face directory: the content for one JSON file each, and the weights
for one safetensors file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models.chat import Template
from models.files import (
    CONFIG_FILE,
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    read_json,
)
from models.hf import stored_tensors
from models.importing.safetensors_file import Stored
from models.shards import Weights
from spu_llm.core.errors import InputError

_PIECE = 1 << 24  # numbers at a time


def json_of(source: Path) -> dict[str, Any]:
    """Return the content of the JSON files of a model directory by file name, with the chat
    template inside the tokenizer's configuration. InputError when a file cannot be read.
    """
    content = {
        name: read_json(source / name, f"give a directory with {CONFIG_FILE} and {TOKENIZER_FILE}")
        for name in (CONFIG_FILE, TOKENIZER_FILE)
    }
    for name in (TOKENIZER_CONFIG_FILE, GENERATION_FILE):
        if (source / name).exists():
            content[name] = read_json(source / name, "")
    config = content.setdefault(TOKENIZER_CONFIG_FILE, {})
    if (source / TEMPLATE_FILE).exists() and isinstance(config, dict):
        config["chat_template"] = Template.load(source).source
    return content


def tensors_of(source: Path, weights: Weights) -> list[Stored]:
    """Return the tensors of a directory's model from its open weights, in their stored type.
    InputError when they do not fit its config.json.
    """
    stored = []
    for tensor in stored_tensors(source, weights):
        view = weights.view(tensor.name)
        shape = tuple(view.get_shape())
        pieces = _pieces(weights.path_of(tensor.name), tensor.name, view, shape)
        stored.append(Stored(tensor.name, view.get_dtype(), shape, pieces))
    return stored


def _pieces(path: Path, name: str, view: Any, shape: tuple[int, ...]) -> Iterator[bytes]:
    step = max(1, _PIECE // math.prod(shape[1:]))
    for first in range(0, shape[0], step):
        values = view[first : min(first + step, shape[0])]
        if not np.isfinite(values.astype(np.float32)).all():
            raise InputError(f"{path} has NaN or infinite values in {name}; save the model again")
        yield values.tobytes()
