"""Layers of a transformer: ordinary functions in plaintext, protocol ops on shares.

Online a linear layer is one message and a product in the clear
(`protocols.arithmetic.product.linear`); a layer of attention is what `attention_on_shares` says.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.arithmetic import product
from protocols.arithmetic.cached import append, lengthen, times_columns, times_rows
from protocols.arithmetic.product import matmul
from protocols.functions.nonlinear import normalised, score_bits, softmax_parts
from spu_llm.core.approx import approximation
from spu_llm.core.settings import SpuConfig

_UNIT = 2.0 ** -SpuConfig().frac_bits
LOOK_UP_LIFT = 14  # entries stay below 2^11


def _dense(x: Any, weight: Any, *, label: str) -> Any:
    return x @ weight


dense = approximation("dense", reference=_dense, on_shares=product.linear)
"""x [rows, k] @ weight [k, m] of the provider; `label` names the matrix, one and the same all
session long."""


def _times(x: Any, y: Any) -> Any:
    return x * y


times = approximation("times", reference=_times, on_shares=product.multiply)
"""x * y of one shape, both shared: 4 messages, an error of one unit. |x y| < 2^26."""


def _pick(one_hot: Any, rows: Any) -> Any:
    return one_hot @ rows


def _look_up_on_shares(one_hot: Any, table: Any, *, label: str) -> Any:
    # Entries of a table are small, and its columns long.
    return product.linear(one_hot, table, label=label, lift=LOOK_UP_LIFT)


look_up = approximation("look_up", reference=_dense, on_shares=_look_up_on_shares)
"""Rows of the provider's `table` [n, d], one for each of the client's one-hot rows [rows, n]."""


def _pick_on_shares(one_hot: Any, rows: Any) -> Any:
    return matmul(one_hot * _UNIT, rows, shift=0)


pick_rows = approximation("pick_rows", reference=_pick, on_shares=_pick_on_shares)
"""Rows of shared `rows` [batch, n, d], one for each of the one-hot rows [batch, m, n]; zeros where
a row has no one in it."""


append_rows = approximation("append_rows", reference=append.reference, on_shares=append)
"""Cached rows [head, positions, d] with `more` [head, n, d] written from the public `at` on."""


lengthen_rows = approximation("lengthen_rows", reference=lengthen.reference, on_shares=lengthen)
"""Cached rows [head, n, d] with room for more: `positions` rows in all."""


def tile_for(positions: int) -> int:
    """Slots of a tile (`protocols.arithmetic.cached`) for a cache of so many rows: a small one
    wastes less of what it opens, a large one is cheaper to make per position.
    """
    return 64 if positions <= 64 else 128


def attention_on_shares(query: Any, *blocks: Any, largest_score: float) -> tuple[Any, Any]:
    """Attention of shared queries [head, n, d] over blocks of (keys, values [head, t, d], visible
    [head, n, t]), the cache that grows last: [head, n, d], and what `softmax_parts` says of its
    sums. No visible score is larger than the public `largest_score`.

    1. Scores of all blocks, not truncated. 2. Weights, and the inverse of their sum.
    3. Weighted values, while the inverse is under way. 4. Normalised.
    """
    heads, n, d = query.shape
    layers = [blocks[i : i + 3] for i in range(0, len(blocks), 3)]
    earlier, (keys, values, _) = layers[:-1], layers[-1]
    # 1.
    scores = [matmul(query, k.transpose(0, 2, 1), shift=0) for k, _, _ in earlier]
    scores.append(times_rows(query, keys, tile=tile_for(keys.shape[1]), shift=0))
    rows = jnp.concatenate(scores, axis=-1).reshape(heads * n, -1)
    # 2.
    seen = [v for _, _, v in layers]
    if any(v.dtype != jnp.bool_ for v in seen):
        seen = [v if v.dtype != jnp.bool_ else jnp.where(v, 0.0, -1.0) for v in seen]
    visible = jnp.concatenate(seen, axis=-1).reshape(heads * n, -1)
    weights, inverse, outside = softmax_parts(rows, visible, score_bits(largest_score))
    # 3.
    weights = weights.reshape(heads, n, -1)
    ends = np.cumsum([v.shape[1] for _, v, _ in layers])[:-1].tolist()
    *earlier_weights, last = jnp.split(weights, ends, axis=-1)
    total = times_columns(last, values, tile=tile_for(values.shape[1]))
    for w, (_, v, _) in zip(earlier_weights, earlier, strict=True):
        total = total + matmul(w, v)
    # 4.
    return normalised(total.reshape(heads * n, d), inverse).reshape(heads, n, d), outside
