"""Layers of a transformer: ordinary functions in plaintext, protocol ops on shares.

Online a linear layer is one message and a product in the clear (`protocols.product.linear`); a
layer of attention is what `attention_on_shares` says.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from protocols import product
from protocols.exponential import softmax_weights
from protocols.mux import mux
from protocols.product import matmul, scale_rows
from spu_llm.approx import approximation
from spu_llm.settings import SpuConfig

_UNIT = 2.0 ** -SpuConfig().frac_bits


def _dense(x: Any, weight: Any, *, label: str) -> Any:
    return x @ weight


dense = approximation("dense", reference=_dense, on_shares=product.linear)
"""x [rows, k] @ weight [k, m] of the provider; `label` names the matrix, one and the same all
session long."""


def _look_up_on_shares(one_hot: Any, table: Any, *, label: str) -> Any:
    # A one in the last place of a word instead of a one: the product needs no truncation.
    return product.linear(one_hot * _UNIT, table, label=label, shift=0)


look_up = approximation("look_up", reference=_dense, on_shares=_look_up_on_shares)
"""Rows of the provider's `table` [n, d], one for each of the client's one-hot rows [rows, n]."""


def _append(rows: Any, more: Any, at: Any) -> Any:
    return jax.lax.dynamic_update_slice(rows, more, (0, at, 0))


append_rows = approximation("append_rows", reference=_append, on_shares=_append)
"""Cached rows [head, positions, d] with `more` [head, n, d] written from the public `at` on."""


def attention_on_shares(query: Any, *blocks: Any) -> Any:
    """Attention of shared queries [head, n, d] over blocks of (keys, values [head, t, d], visible
    [n, t]), the cache that grows last: [n, head * d].

    `visible` is public (bool), or the client's (float: 0, or below where hidden). Everybody sees
    the first position of all: its score stands in for what is publicly hidden, so that no row has a
    score further from its maximum than real ones are.
    """
    heads, n, d = query.shape
    layers = [blocks[i : i + 3] for i in range(0, len(blocks), 3)]
    scores = jnp.concatenate(
        [matmul(query, keys.transpose(0, 2, 1)) for keys, _, _ in layers], axis=-1
    )
    visible = [v for _, _, v in layers]
    if all(v.dtype == jnp.bool_ for v in visible):
        scores = jnp.where(jnp.concatenate(visible, axis=-1), scores, scores[..., :1])
    rows = scores.reshape(heads * n, -1)
    weights = softmax_weights(rows).reshape(scores.shape)
    numerator, start = jnp.zeros_like(query), 0
    parts = []
    for keys, values, seen in layers:
        w = weights[..., start : start + keys.shape[1]]
        start += keys.shape[1]
        if seen.dtype == jnp.bool_:
            w = jnp.where(seen, w, 0.0)
        else:
            w = mux(jnp.broadcast_to(seen >= 0, w.shape), w)
        parts.append(w)
        numerator = numerator + matmul(w, values)
    total = sum(jnp.sum(w, axis=-1) for w in parts)
    out = scale_rows(numerator.reshape(heads * n, d), (1.0 / total).reshape(heads * n))
    return out.reshape(heads, n, d).transpose(1, 0, 2).reshape(n, heads * d)
