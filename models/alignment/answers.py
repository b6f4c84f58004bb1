"""What a private model answered: texts, and its most likely next tokens at the places that count.

Answers lie in a directory, a file for each part of the work, in the order of their names. They say
no more of the private model than its K most likely tokens and their probabilities at each place, so
they are all that an owner of the draft model needs who may not see the private one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from spu_llm.core.errors import InputError

_FIELDS = ("tokens", "counts", "ids", "log_p")
_SUFFIX = ".safetensors"
_BEGUN = "scripts"


@dataclass(frozen=True)
class Answer:
    """One text, and the private model's distributions at the places of it that count."""

    tokens: np.ndarray  # int32 [n]
    counts: np.ndarray  # bool [n]: a place where the private model was asked for this token
    ids: np.ndarray  # int32 [places that count, K]: its most likely tokens there
    log_p: np.ndarray  # float32 [places that count, K]: logarithms of their probabilities


@dataclass(frozen=True)
class Origin:
    """What all parts of a directory of answers have in common."""

    tokenizer: str  # digest
    temperature: float
    top_k: int

    def as_metadata(self) -> dict[str, str]:
        return {name: str(value) for name, value in vars(self).items()}


def part_name(number: int) -> str:
    """Return the name of part number `number` of a directory of answers."""
    return f"{number:05d}{_SUFFIX}"


def write_part(
    directory: Path, number: int, answers: Sequence[Answer], origin: Origin, scripts: int
) -> None:
    """Write a part whole, or not at all; `scripts`: how many were begun in all parts so far."""
    directory.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(one.tokens) for one in answers], np.int32)
    stored = {
        "lengths": lengths,
        "tokens": np.concatenate([one.tokens for one in answers]).astype(np.int32),
        "counts": np.concatenate([one.counts for one in answers]).astype(np.uint8),
        "ids": np.concatenate([one.ids for one in answers]).astype(np.int32),
        "log_p": np.concatenate([one.log_p for one in answers]).astype(np.float16),
    }
    path = directory / part_name(number)
    unfinished = path.with_suffix(".unfinished")
    metadata = {**origin.as_metadata(), _BEGUN: str(scripts)}
    unfinished.write_bytes(save(stored, metadata=metadata))
    os.replace(unfinished, path)


def parts_of(directory: Path) -> list[Path]:
    """Return the parts of a directory of answers, in their order."""
    return sorted(directory.glob(f"*{_SUFFIX}"))


def begun(directory: Path, origin: Origin) -> tuple[int, int, int]:
    """Return how many parts there are, how many scripts were begun in them, and how many places
    count. InputError for parts of another origin.
    """
    parts, places = parts_of(directory), 0
    for path in parts:
        answers, known, scripts = _read_part(path)
        if known != origin:
            raise InputError(
                f"{directory} has answers of another model, --temperature or --top-k; give the "
                "same to go on, or another --out"
            )
        places += sum(len(one.ids) for one in answers)
    return len(parts), scripts if parts else 0, places


def read_answers(directory: Path) -> tuple[list[Answer], Origin]:
    """Return all answers in a directory, and what they have in common. InputError when there are
    none, or a part cannot be used.
    """
    if not (parts := parts_of(directory)):
        raise InputError(f"{directory} has no answers; spu-llm align --private writes some")
    answers: list[Answer] = []
    origins = []
    for path in parts:
        read, origin, _ = _read_part(path)
        answers += read
        origins.append(origin)
    if len(set(origins)) > 1:
        raise InputError(f"{directory} has answers of several models or settings; keep one kind")
    return answers, origins[0]


def _read_part(path: Path) -> tuple[list[Answer], Origin, int]:
    try:
        with safe_open(path, "np") as part:
            given = part.metadata() or {}
            read: dict[str, Any] = {name: part.get_tensor(name) for name in ("lengths", *_FIELDS)}
        origin = Origin(given["tokenizer"], float(given["temperature"]), int(given["top_k"]))
        scripts = int(given[_BEGUN])
    except (OSError, SafetensorError, KeyError, ValueError):
        raise InputError(f"{path} holds no answers of a model; make them again") from None
    tokens, counts = read["tokens"], read["counts"].astype(bool)
    ends = np.cumsum(read["lengths"])
    places = np.count_nonzero(counts)
    shape = (places, origin.top_k)
    if (
        not len(ends)
        or (read["lengths"] < 1).any()
        or not ends[-1] == len(tokens) == len(counts)
        or read["ids"].shape != shape
        or read["log_p"].shape != shape
        or not np.isfinite(read["log_p"]).all()
    ):
        raise InputError(f"{path} has answers of other sizes than it says; make them again")
    answered = np.cumsum(counts)
    answers, start, before = [], 0, 0
    for end in ends:
        after = int(answered[end - 1])
        answers.append(
            Answer(
                tokens[start:end],
                counts[start:end],
                read["ids"][before:after],
                read["log_p"][before:after].astype(np.float32),
            )
        )
        start, before = int(end), after
    return answers, origin, scripts
