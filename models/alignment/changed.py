"""A draft model without what it has of its private model as it is, such as the table of tokens.

Its folder holds the tensors that are not the private model's, in the file's metadata which others
were left out, its configuration, and the curve of its alignment. It is of use only to who has that
very private model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from models.alignment.run import ANSWERS, CURVE
from models.files import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILE, read_file, replace_file
from spu_llm.core.errors import InputError

_UNALIGNED = "give a draft model that spu-llm align wrote"
_LEFT_OUT = "left_out"  # in the metadata: JSON, digests of tensors by their names


def take(draft: Path, private: Path, folder: Path) -> list[str]:
    """Write what of a draft model is not its private model's to a folder; return the names of the
    tensors that are left out. InputError where there are none, or a file cannot be used.
    """
    _check_apart(folder, draft, private)
    whole, known = _tensors(draft), _tensors(private)
    left_out = {
        name: _digest(values)
        for name, values in whole.items()
        if name in known and _same(known[name], values)
    }
    if not left_out:
        raise InputError(
            f"{draft} has no tensor of {private} as it is; keep it whole (a model that is not in "
            "float16 shares none with a draft model, which is)"
        )
    changed = {name: values for name, values in whole.items() if name not in left_out}
    texts = {name: read_file(draft / name, _UNALIGNED) for name in (CONFIG_FILE, CURVE)}
    _make(folder)
    replace_file(folder / WEIGHTS_FILE, save(changed, {_LEFT_OUT: json.dumps(left_out)}))
    for name, text in texts.items():
        replace_file(folder / name, text)
    return sorted(left_out)


def complete(folder: Path, private: Path, draft: Path) -> None:
    """Write the draft model in a folder as a model directory, with what it has of the private
    model. InputError when the private model has other tensors than the ones that were left out, the
    directory holds an alignment that goes on, or a file cannot be used.
    """
    _check_apart(draft, folder, private)
    if (draft / ANSWERS).exists():
        raise InputError(f"{draft} holds an alignment of its own; move it away, or give another")
    changed, left_out, known = _tensors(folder), _left_out(folder), _tensors(private)
    for name, digest in left_out.items():
        if name not in known or _digest(known[name]) != digest:
            raise InputError(
                f"{private} has another {name} than the model that {folder} was aligned with; give "
                "that model, or align a draft model with this one (spu-llm align)"
            )
    texts = {
        name: read_file(private / name, "") for name in TEXT_FILES if (private / name).exists()
    }
    # The curve comes last, since it says that the directory is whole.
    texts |= {name: read_file(folder / name, _UNALIGNED) for name in (CONFIG_FILE, CURVE)}
    whole = {**{name: known[name] for name in left_out}, **changed}
    _make(draft)
    replace_file(draft / WEIGHTS_FILE, save(whole, {"format": "pt"}))
    for name, text in texts.items():
        replace_file(draft / name, text)


def _check_apart(written: Path, *read: Path) -> None:
    if written.resolve() in [path.resolve() for path in read]:
        raise InputError(f"{written} would be written over; give another")


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{directory} cannot be made: {error.strerror}") from None


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b)


def _digest(values: np.ndarray) -> str:
    head = f"{values.dtype} {values.shape}\n".encode()
    return hashlib.sha256(head + values.tobytes()).hexdigest()


def _tensors(directory: Path) -> Mapping[str, np.ndarray]:
    path = directory / WEIGHTS_FILE
    try:
        tensors: Mapping[str, np.ndarray] = load_file(path)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        raise InputError(
            f"{path} cannot be read; give a directory with all weights in this one file"
        ) from None
    return tensors


def _left_out(folder: Path) -> dict[str, str]:
    path = folder / WEIGHTS_FILE
    with safe_open(path, "np") as file:
        given = (file.metadata() or {}).get(_LEFT_OUT, "")
    try:
        left_out: dict[str, str] = json.loads(given)
        told = all(isinstance(digest, str) for digest in left_out.values())
    except (ValueError, AttributeError):
        told = False
    if not told:
        raise InputError(f"{path} does not say what is left out; give a folder that `take` wrote")
    return left_out
