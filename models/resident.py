"""One copy in memory of a model's folded weights, or of the middle layers' weights of a split
model, for all processes that a provider starts.

The weights lie one after the other in an anonymous file, which exists as long as a process has it
open and is sealed, so that no process can change it; a process that inherits its descriptor maps
it.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from typing import Any

import jax
import numpy as np

from models.family import ModelConfig, Params, check_ranges, family_of
from models.split import Split, check_middle

_ALIGNED = 64  # bytes
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def place(
    params: Params, config: ModelConfig, split: Split | None = None, *, on_shares: bool = True
) -> int:
    """Fold the weights and write them, or only the middle's blocks of a `split`, into memory;
    return the descriptor, which the caller closes. InputError when activations `on_shares` may
    leave their ranges, OSError when there is not enough memory.
    """
    weights = family_of(config).fold(params, config)
    if split is not None:
        weights = split.parts(weights)[1]
    if on_shares and split is None:
        check_ranges(weights, config)
    elif on_shares and split is not None:
        check_middle(weights, config, split)
    descriptor = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            for leaf in jax.tree.leaves(weights):
                file.write(np.ascontiguousarray(leaf).data)
                file.write(bytes(-file.tell() % _ALIGNED))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def digest(descriptor: int) -> str:
    """Return the SHA-256, in hex, of the weights behind a descriptor."""
    with mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as memory:
        return hashlib.sha256(memory).hexdigest()


def mapped(descriptor: int, weights: Any) -> Any:
    """Map the folded weights behind a descriptor, read-only; `weights`: their shapes and dtypes."""
    shapes, tree = jax.tree.flatten(weights)
    # Private, since a shared mapping could be made writable: older kernels refuse it.
    memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    leaves, at = [], 0
    for shape in shapes:
        array = np.frombuffer(memory, shape.dtype, shape.size, at).reshape(shape.shape)
        leaves.append(array)
        at += -(-array.nbytes // _ALIGNED) * _ALIGNED
    assert at == len(memory), "the weights of another model"
    return jax.tree.unflatten(tree, leaves)
