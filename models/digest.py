"""A digest of weights, part by part as they pass by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


def digest_of(parts: Iterable[Any]) -> str:
    """Return the SHA-256, in hex, of the arrays of some trees, in their order."""
    digest = hashlib.sha256()
    for part in parts:
        update(digest, part)
    return digest.hexdigest()


def update(digest: Any, part: Any) -> None:
    """Add a tree's arrays to a digest."""
    for leaf in jax.tree.leaves(part):
        digest.update(np.ascontiguousarray(leaf).data)
