"""A draft model without the tables that it shares with its private one, and joined to them again.

A draft model that keeps its private model's table of tokens (`align --keep`) is mostly that table.
So what is shipped of it is the rest, and whoever has the private model's files joins both:

    python -m models.alignment.parts split MODEL --private DIR --out PART
    python -m models.alignment.parts join PART --private DIR --out DIR
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from models.files import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILE
from models.hf import load_model
from models.shards import Weights, open_weights
from spu_llm.core.errors import InputError

_OF_BLOCK = re.compile(r"\.\d+\.")  # names of tensors of a block: blocks have nothing in common


def split(model: Path, private: Path, out: Path) -> None:
    """Write the model in a directory without the tensors beside its blocks that are equal in
    `private`.
    """
    stored = load_file(model / WEIGHTS_FILE)
    with open_weights(private) as weights:
        kept = {
            name: value
            for name, value in stored.items()
            if _OF_BLOCK.search(name) or not _is_equal(weights, name, value)
        }

    def write(directory: Path) -> None:
        save_file(kept, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        shutil.copyfile(model / CONFIG_FILE, directory / CONFIG_FILE)

    _written_whole(out, write)


def _is_equal(weights: Weights, name: str, value: np.ndarray) -> bool:
    if name not in weights.places:
        return False
    view = weights.view(name)
    return tuple(view.get_shape()) == value.shape and np.array_equal(view[:], value)


def join(part: Path, private: Path, out: Path) -> None:
    """Write the model of which `part` is a part, with the tensors that it lacks, and the text
    files, of the model in `private`. InputError when they do not fit together.
    """
    stored: dict[str, Any] = load_file(part / WEIGHTS_FILE)
    with open_weights(private) as weights:
        for name in weights.places:
            if name not in stored and not _OF_BLOCK.search(name):
                stored[name] = np.asarray(weights.view(name)[:])

    def write(directory: Path) -> None:
        save_file(stored, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        shutil.copyfile(part / CONFIG_FILE, directory / CONFIG_FILE)
        for name in TEXT_FILES:
            if (private / name).exists():
                shutil.copyfile(private / name, directory / name)
        load_model(directory)  # that all fits together

    _written_whole(out, write)


def _written_whole(out: Path, write: Callable[[Path], None]) -> None:
    """Make a directory whole, or not at all. InputError when there is one."""
    if out.exists():
        raise InputError(f"{out} is there; remove it, or give another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as made:
        directory = Path(made) / out.name
        directory.mkdir()
        write(directory)
        os.replace(directory, out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("split", "join"))
    parser.add_argument("source", type=Path, metavar="MODEL|PART")
    parser.add_argument("--private", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    work = split if options.what == "split" else join
    try:
        work(options.source, options.private, options.out)
    except (InputError, OSError, SafetensorError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
