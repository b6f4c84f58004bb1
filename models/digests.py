"""Digests of parameters."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np


def params_digest(params: Any) -> str:
    """Return the SHA-256 (hex) of parameters, any tree of arrays, as float32. Take them unfolded:
    parties with equal ones then get equal digests, whatever their machines fold them to.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        values = np.ascontiguousarray(leaf, "<f4")
        digest.update(f"{jax.tree_util.keystr(path)} {values.shape}\n".encode())
        digest.update(values.data)
    return digest.hexdigest()
