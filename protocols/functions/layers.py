"""Layers of a transformer: ordinary functions in plaintext, protocol ops on shares.

Online a linear layer is one message and a product in the clear
(`protocols.arithmetic.product.linear`); attention is `protocols.functions.aggregation`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from protocols.arithmetic import product
from protocols.arithmetic.cached import append, lengthen
from protocols.arithmetic.known_factors import times_factors
from spu_llm.core.approx import approximation

LOOK_UP_LIFT = 14  # entries stay below 2^11


def _dense(x: Any, weight: Any, *, label: str) -> Any:
    return x @ weight


dense = approximation("dense", reference=_dense, on_shares=product.linear)
"""x [rows, k] @ weight [k, m] of the provider; `label` names the matrix, one and the same all
session long."""


# Entries of a table are small, and its columns long.
look_up = approximation(
    "look_up", reference=_dense, on_shares=functools.partial(product.linear, lift=LOOK_UP_LIFT)
)
"""Rows of the provider's `table` [n, d], one for each of the client's one-hot rows [rows, n]."""


def _pick_on_shares(one_hot: Any, rows: Any) -> Any:
    return times_factors(rows, one_hot, uses=1)


pick_rows = approximation("pick_rows", reference=operator.matmul, on_shares=_pick_on_shares)
"""Rows of shared `rows` [..., n, d], one for each of the client's one-hot rows [..., m, n]; zeros
where a row has no one in it. On shares up to 2^26, and off by 1 + 2^-6 units."""


append_rows = approximation("append_rows", reference=append.reference, on_shares=append)
"""Cached rows [head, positions, d] with `more` [head, n, d] written from the public `at` on."""


lengthen_rows = approximation("lengthen_rows", reference=lengthen.reference, on_shares=lengthen)
"""Cached rows [head, n, d] with room for more: `positions` rows in all."""
