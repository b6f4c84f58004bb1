"""Where the drafts of a step stop: what is opened of it, and the row of the token after them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from protocols.bits.logic import prefix_or
from protocols.ot.select import select
from spu_llm.core.reveal import reveal
from spu_llm.core.values import Owner


def open_stop(rejected: Array, *, hide: bool) -> Array:
    """Open the first rejection k of shared bits [..., drafts], or the number of drafts: int32
    [...], public, or with `hide` the client's. Opened are the prefix-ors 0^k 1^(d-k), which say k
    and nothing else.
    """
    to = Owner.CLIENT if hide else Owner.PUBLIC
    stopped = reveal(prefix_or(rejected), to=to, label="where drafts stop")
    return rejected.shape[-1] - jnp.sum(stopped.astype(jnp.int32), axis=-1)


def row_at(rows: Array, k: Array, *, hide: bool) -> Array:
    """Take row k [lane] of shared rows [lane, d + 1, ...], as [lane, ...], obliviously where the
    client alone knows k.
    """
    if hide:
        return select(rows, k)
    chosen = [jax.lax.dynamic_slice_in_dim(rows[i], k[i], 1) for i in range(k.shape[0])]
    return jnp.concatenate(chosen)
