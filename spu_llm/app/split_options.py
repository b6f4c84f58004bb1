"""What the commands of split models have in common: modes, mechanisms, where a model is split."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from models.split import Split

PLAIN, NOIR, MPC = MODES = ("plain", "noir", "mpc")
MECHANISMS = ("none", "arr", "arr-renormalised", "grr", "exponential")
PRECISIONS = ("float32", "float16", "bfloat16")
EPSILON, FEATURES = 13.0, 4096  # the paper's, of its first model


def split_of(options: argparse.Namespace) -> Split:
    """Return `--split`; InputError when it is none."""
    from models.split import Split

    parts = options.split.split(",")
    if len(parts) != 2 or not all(p.isascii() and p.isdigit() and len(p) < 5 for p in parts):
        raise InputError(f"--split must be F,B, two numbers of blocks, found {options.split!r}")
    return Split(*map(int, parts))
