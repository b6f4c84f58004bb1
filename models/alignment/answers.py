"""What a private model answered: texts, and its most likely next tokens at the places that count.

Answers lie in a directory, a file for each round of the model's work, in the order of their names.
They say no more of the private model than its K most likely tokens and their probabilities at each
place, so they are all that an owner of the draft model needs who may not see the private one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from models.files import replace_file
from spu_llm.core.errors import InputError

_SUFFIX = ".safetensors"
_SCRIPTS, _PLACES = "scripts", "places"
_LEAST_LOG = -6e4  # float16 holds it


@dataclass(frozen=True)
class Answer:
    """One text, and the private model's distributions at the places of it that count."""

    tokens: np.ndarray  # int32 [n]
    counts: np.ndarray  # bool [n]: a place where the private model was asked for this token
    ids: np.ndarray  # int32 [places that count, K]: its most likely tokens there
    log_p: np.ndarray  # float32 [places that count, K]: logarithms of their probabilities
    source: int = 0  # tokens at the beginning that an encoder reads; none counts, nor the next one

    @property
    def written(self) -> np.ndarray:
        """Return the tokens after the source, int32 [n - source]."""
        return self.tokens[self.source :]


@dataclass(frozen=True)
class Origin:
    """Origin of all parts of a directory of answers: which model was asked what, and how."""

    model: str  # digest of the private model's parameters
    asked: str  # digest of what it was asked
    tokenizer: str  # digest
    temperature: float
    top_k: int

    def as_metadata(self) -> dict[str, str]:
        return {name: str(value) for name, value in vars(self).items()}

    @staticmethod
    def of_metadata(given: dict[str, str]) -> Origin:
        """Return the origin in a part's metadata; KeyError or ValueError where there is none."""
        model, asked, tokenizer = (given[name] for name in ("model", "asked", "tokenizer"))
        return Origin(model, asked, tokenizer, float(given["temperature"]), int(given["top_k"]))


@dataclass(frozen=True)
class Begun:
    """Counts of a model's answers of one kind so far."""

    parts: int = 0
    scripts: int = 0  # that were begun
    places: int = 0  # that count


def write_part(
    directory: Path, kind: str, begun: Begun, answers: Sequence[Answer], origin: Origin
) -> None:
    """Write the next part of a kind whole, or not at all; `begun`: with this part."""
    directory.mkdir(parents=True, exist_ok=True)
    log_p = np.concatenate([one.log_p for one in answers])
    stored = {
        "lengths": np.array([len(one.tokens) for one in answers], np.int32),
        "sources": np.array([one.source for one in answers], np.int32),
        "tokens": np.concatenate([one.tokens for one in answers]).astype(np.int32),
        "counts": np.concatenate([one.counts for one in answers]).astype(np.uint8),
        "ids": np.concatenate([one.ids for one in answers]).astype(np.int32),
        "log_p": np.maximum(log_p, _LEAST_LOG).astype(np.float16),
    }
    so_far = {_SCRIPTS: str(begun.scripts), _PLACES: str(begun.places)}
    data = save(stored, metadata=origin.as_metadata() | so_far)
    replace_file(directory / _part_name(kind, begun.parts), data)


def _part_name(kind: str, number: int) -> str:
    return f"{kind}-{number - 1:05d}{_SUFFIX}"


def parts_of(directory: Path, kind: str = "") -> list[Path]:
    """Return the parts of a directory of answers, or those of a kind, in their order."""
    return sorted(directory.glob(f"{kind}*{_SUFFIX}"))


def begun_of(directory: Path, kind: str, origin: Origin) -> Begun:
    """Return how far answers of a kind are. InputError for parts of another origin."""
    parts = parts_of(directory, kind)
    begun = Begun()
    for number, path in enumerate(parts, 1):
        if path.name != _part_name(kind, number):
            raise InputError(f"{directory} lacks {_part_name(kind, number)}; remove all after it")
        with _opened(path) as part:
            given = part.metadata()
            known = Origin.of_metadata(given)
            begun = Begun(number, int(given[_SCRIPTS]), int(given[_PLACES]))
        if known != origin:
            names = [name for name in vars(origin) if getattr(known, name) != getattr(origin, name)]
            raise InputError(
                f"{directory} has answers with another {', '.join(names)}; give the same options "
                "to go on, or another --out"
            )
    return begun


def read_answers(directory: Path) -> tuple[list[Answer], Origin]:
    """Return all answers in a directory, and what they have in common. InputError when there are
    none, or a part cannot be used.
    """
    if not (parts := parts_of(directory)):
        raise InputError(f"{directory} has no answers; spu-llm align --private writes some")
    answers: list[Answer] = []
    origins = []
    for path in parts:
        read, origin = _read_part(path)
        answers += read
        origins.append(origin)
    if len(set(origins)) > 1:
        raise InputError(f"{directory} has answers of several models or settings; keep one kind")
    return answers, origins[0]


def digest_of(answers: Sequence[Answer]) -> str:
    """Return a digest of answers."""
    digest = hashlib.sha256()
    for one in answers:
        for part in (one.tokens, one.counts, one.ids, one.log_p):
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "np") as part:
            yield part
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        raise InputError(f"{path} holds no answers of a model; make them again") from None


def _read_part(path: Path) -> tuple[list[Answer], Origin]:
    names = ("lengths", "sources", "tokens", "counts", "ids", "log_p")
    with _opened(path) as part:
        origin = Origin.of_metadata(part.metadata())
        lengths, sources, tokens, counts, ids, log_p = map(part.get_tensor, names)
    ends = np.cumsum(lengths)
    counts = counts.astype(bool)
    shape = (np.count_nonzero(counts), origin.top_k)
    if (
        any(part.dtype != np.int32 for part in (lengths, sources, tokens, ids))
        or not len(ends)
        or sources.shape != lengths.shape
        or (sources < 0).any()
        or (lengths < sources + 2).any()
        or not ends[-1] == len(tokens) == len(counts)
        or any(counts[at : at + n].any() for at, n in zip(ends - lengths, sources + 1, strict=True))
        or ids.shape != shape
        or log_p.shape != shape
        or min(tokens.min(), ids.min(initial=0)) < 0
        or not np.isfinite(log_p).all()
    ):
        raise InputError(f"{path} has other answers than it says; make them again")
    answered = np.cumsum(counts)
    answers, start, before = [], 0, 0
    for end, source in zip(ends, sources, strict=True):
        after = int(answered[end - 1])
        some, text = slice(before, after), slice(start, end)
        log_of = log_p[some].astype(np.float32)
        answers.append(Answer(tokens[text], counts[text], ids[some], log_of, int(source)))
        start, before = int(end), after
    return answers, origin
