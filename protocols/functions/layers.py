"""Layers of a transformer: ordinary functions in plaintext, protocol ops on shares.

Online a linear layer is one message and a product in the clear
(`protocols.arithmetic.product.linear`); attention is `protocols.functions.aggregation`.
"""

from __future__ import annotations

from typing import Any

from protocols.arithmetic import product
from protocols.arithmetic.cached import append, lengthen
from protocols.arithmetic.product import matmul
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
