"""The draft model that alignment begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.family import ModelConfig, Params, family_of
from models.hf import load_uncalibrated
from models.text_format import TextFormat
from spu_llm.core.errors import InputError


@dataclass(frozen=True)
class Student:
    """A draft model, and the names of its parameters that stay as they are."""

    config: ModelConfig
    params: Params
    fixed: frozenset[str] = frozenset()


def of_public(directory: Path, tokenizer: str, encodes: bool) -> Student:
    """Return the model in a directory. InputError when it has another tokenizer than `tokenizer`,
    the private model's, or an encoder where the private model has none (`encodes`), or none.
    """
    if TextFormat.of_model(directory).tokenizer.digest != tokenizer:
        raise InputError(
            f"{directory} has another tokenizer than the private model; a draft model needs the "
            "same one (leave out --public to begin with no model)"
        )
    config, params = load_uncalibrated(directory, encoders=True)
    if config.encodes != encodes:
        wanted = "a draft model with an encoder" if encodes else "one without an encoder"
        raise InputError(f"{directory} is {config.title}; the private model needs {wanted}")
    return Student(config, params)


def sharing(student: Student, private: Params) -> Student:
    """Return a student whose tables stay where they are the private model's, in float16: it may
    have begun as blocks of that model.
    """
    same = {
        name
        for name, value in student.params.items()
        if np.ndim(value) == 2
        and np.array_equal(np.float16(value), np.float16(private.get(name, ())))
    }
    return replace(student, fixed=student.fixed | same)


def from_nothing(private: ModelConfig, blocks: int, width: int | None, seed: int) -> Student:
    """Return a random model of so many blocks, as wide as the private one or narrower, with as many
    heads in proportion. InputError for another width.
    """
    config = private.with_layers(blocks)
    if width is not None:
        config = _narrowed(config, width)
    return Student(config, family_of(config).init(config, jax.random.key(seed)))


def _narrowed(config: ModelConfig, width: int) -> ModelConfig:
    sizes = {name: getattr(config, name) for name in config.width_names}
    scaled = {name: size * width / config.width for name, size in sizes.items()}
    if width < 1 or not all(size.is_integer() and size >= 1 for size in scaled.values()):
        least = min(
            of
            for of in range(1, config.width + 1)
            if all(size * of % config.width == 0 for size in sizes.values())
        )
        raise InputError(
            f"--width must be a multiple of {least}, so that heads and inner columns shrink alike; "
            f"found {width}"
        )
    fields: dict[str, Any] = {name: int(size) for name, size in scaled.items()}
    return replace(config, **fields)


def of_blocks(config: ModelConfig, params: Params, numbers: Sequence[int]) -> Student:
    """Return the private model with some of its blocks alone; what embeds tokens, and reads them
    off, stays as it is. InputError for blocks that it lacks.
    """
    if not numbers or not all(0 <= i < config.layers for i in numbers):
        raise InputError(
            f"--keep must name blocks of the private model, 0 to {config.layers - 1}, "
            f"found {','.join(map(str, numbers))}"
        )
    if config.encodes:
        raise InputError("--keep is for models without an encoder; give --public or --blocks")
    kept = {**params, "blocks": [params["blocks"][i] for i in numbers]}
    tables = frozenset(name for name, value in params.items() if np.ndim(value) == 2)
    return Student(config.with_blocks(list(numbers)), kept, tables)
