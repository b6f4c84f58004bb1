"""A draft model without what it has of its private model as it is, such as the table of tokens.

    python -m models.alignment.changed take DRAFT PRIVATE FOLDER
    python -m models.alignment.changed complete FOLDER PRIVATE DRAFT

DRAFT and PRIVATE are model directories, DRAFT one that `spu-llm align` wrote. FOLDER holds the
tensors that are not the private model's, in the file's metadata which others were left out, and the
curve of the alignment. It is of use only to who has that very private model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from models.alignment.run import CURVE
from models.files import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILE, replace_file
from spu_llm.core.errors import InputError

_LEFT_OUT = "left_out"  # in the metadata: JSON, digests of tensors by their names


def take(draft: Path, private: Path, folder: Path) -> list[str]:
    """Write what of a draft model is not its private model's to a folder; return the names of the
    tensors that are left out.
    """
    whole, known = _tensors(draft / WEIGHTS_FILE), _tensors(private / WEIGHTS_FILE)
    left_out = {
        name: _digest(values)
        for name, values in whole.items()
        if name in known and _digest(known[name]) == _digest(values)
    }
    changed = {name: values for name, values in whole.items() if name not in left_out}
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / WEIGHTS_FILE, save(changed, {_LEFT_OUT: json.dumps(left_out)}))
    for name in (CONFIG_FILE, CURVE):
        shutil.copyfile(draft / name, folder / name)
    return sorted(left_out)


def complete(folder: Path, private: Path, draft: Path) -> None:
    """Write the draft model in a folder as a model directory, with what it has of the private
    model. InputError when the private model has other tensors than those that were left out.
    """
    changed, known = _tensors(folder / WEIGHTS_FILE), _tensors(private / WEIGHTS_FILE)
    left_out = _left_out(folder / WEIGHTS_FILE)
    for name, digest in left_out.items():
        if name not in known or _digest(known[name]) != digest:
            raise InputError(
                f"{private} has another {name} than the model that {folder} was aligned with; give "
                "that model, or align a draft model with this one (spu-llm align)"
            )
    draft.mkdir(parents=True, exist_ok=True)
    whole = {**{name: known[name] for name in left_out}, **changed}
    replace_file(draft / WEIGHTS_FILE, save(whole, {"format": "pt"}))
    for name in TEXT_FILES:
        if (private / name).exists():
            shutil.copyfile(private / name, draft / name)
    shutil.copyfile(folder / CONFIG_FILE, draft / CONFIG_FILE)
    # Last, since it says that the directory is whole.
    shutil.copyfile(folder / CURVE, draft / CURVE)


def _digest(values: np.ndarray) -> str:
    head = f"{values.dtype} {values.shape}\n".encode()
    return hashlib.sha256(head + np.ascontiguousarray(values).data).hexdigest()


def _tensors(path: Path) -> Mapping[str, np.ndarray]:
    try:
        tensors: Mapping[str, np.ndarray] = load_file(path)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        raise InputError(f"{path} cannot be read; make it again") from None
    return tensors


def _left_out(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        given = (file.metadata() or {}).get(_LEFT_OUT)
    if given is None:
        raise InputError(f"{path} does not say what is left out; give a folder that `take` wrote")
    left_out: dict[str, str] = json.loads(given)
    return left_out


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m models.alignment.changed")
    parser.add_argument("action", choices=("take", "complete"))
    parser.add_argument("from_", metavar="FROM", type=Path)
    parser.add_argument("private", metavar="PRIVATE", type=Path)
    parser.add_argument("to", metavar="TO", type=Path)
    options = parser.parse_args(given)
    try:
        if options.action == "take":
            names = take(options.from_, options.private, options.to)
            print(f"{options.to} written, without {', '.join(names) or 'leaving anything out'}")
        else:
            complete(options.from_, options.private, options.to)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
