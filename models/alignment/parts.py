"""A draft model without the parameters that it shares with its private one, and joined to them.

A draft model that keeps its private model's table of tokens (`align --keep`) is mostly that table.
So what is shipped of it is the rest, and whoever has the private model's files joins both:

    python -m models.alignment.parts PART --private DIR --out DIR
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from models.files import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILE
from models.hf import load_model
from models.shards import open_weights
from spu_llm.core.errors import InputError


def save_part(model: Path, part: Path, without: Collection[str]) -> None:
    """Write the model in directory `model` into `part`, without the tensors called `without`."""
    stored = load_file(model / WEIGHTS_FILE)
    if missing := sorted(set(without) - set(stored)):
        raise InputError(f"{model} has no tensor {missing[0]}")
    part.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in stored.items() if name not in without}
    save_file(kept, part / WEIGHTS_FILE, metadata={"format": "pt", "without": " ".join(without)})
    shutil.copyfile(model / CONFIG_FILE, part / CONFIG_FILE)


def join(part: Path, private: Path, out: Path) -> None:
    """Write the model of which `part` is a part into `out`, with the tensors that it lacks, and the
    text files, of the model in `private`. InputError when they do not fit together.
    """
    stored = load_file(part / WEIGHTS_FILE)
    lacking = _lacking(part)
    out.mkdir(parents=True, exist_ok=True)
    with open_weights(private) as weights:
        for name in lacking:
            if name not in weights.places:
                raise InputError(f"{private} has no tensor {name}, which {part} lacks")
            stored[name] = np.asarray(weights.view(name)[:])
    save_file(stored, out / WEIGHTS_FILE, metadata={"format": "pt"})
    shutil.copyfile(part / CONFIG_FILE, out / CONFIG_FILE)
    for name in TEXT_FILES:
        if (private / name).exists():
            shutil.copyfile(private / name, out / name)
    load_model(out)  # that all fits together


def _lacking(part: Path) -> list[str]:
    with safe_open(part / WEIGHTS_FILE, "np") as file:
        return ((file.metadata() or {}).get("without") or "").split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", type=Path)
    parser.add_argument("--private", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        join(options.part, options.private, options.out)
    except (InputError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
