"""POST: secure verification of drafted tokens, as published.

Li et al., "An Efficient Private GPT Never Autoregressively Decodes", Algorithms 1 and 2, in the
division-free form: with e_x = exp(z_x - max z) and Z = sum e, a draft d is accepted when
e_d > (r q(d)) Z, which is r q(d) < p(d) without a reciprocal. The `post` functionality opens
to the client, each step, every rejection bit and one whole row of the private distribution; see
`FUNCTIONALITY`. The comparison is strict (the paper's tie rule accepts tokens whose encoded
probability is zero).

`verify` is the secure half, a JAX function of shared logits; the client's half (`threshold`,
`first_rejection`, `next_distribution`, `draw`) is plaintext.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from protocols.nonlinear import EXP_FLOOR, exp_nonpositive, unbiased_total
from spu_llm.op import Functionality
from spu_llm.reveal import reveal
from spu_llm.values import Owner

FUNCTIONALITY = Functionality(
    client="emitted tokens, all rejection bits, one whole row per step: of the distribution, "
    "or when greedy of the logits",
    provider="draft length, number of steps, accepted count per step",
)

# A greedy draft is accepted when its logit is within this of the maximum: below one unit of any
# logit the fixed-point forward can tell apart, above the ring's own resolution.
GREEDY_MARGIN = 2.0**-12


def scores(
    logits: Array, inverse_temperature: Array | float, *, greedy: bool, clamp: bool = False
) -> Array:
    """Rows [..., vocab] from which everything is decided: exp(z/T - max z/T), or z - max z.

    `clamp` spends a comparison per score to keep exponents above EXP_FLOOR, needed where logits
    over the temperature may spread further. The greedy form needs no exponential: the first token
    is where the row is zero.
    """
    if not greedy:
        logits = logits * inverse_temperature
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    if greedy:
        return shifted
    return exp_nonpositive(jnp.maximum(shifted, EXP_FLOOR) if clamp else shifted)


def verify(
    rows: Array, drafts: Array, thresholds: Array, *, greedy: bool
) -> tuple[Array, Array]:
    """Algorithm 2 with the row opening of Algorithm 1, on a batch.

    rows: shared `scores` [batch, drafts + 1, vocab]; drafts: client's token ids [batch, drafts];
    thresholds: client's r_i q_i(d_i) [batch, drafts] (unused when greedy).
    Returns, both to the client alone: rejected bool [batch, drafts] and the selected row
    [batch, vocab] (row k of `rows`, k the first rejection, or the last row when there is none).
    """
    count = drafts.shape[1]
    if count == 0:  # standard decoding: nothing to verify, one row to open
        return drafts.astype(bool), _open_row(rows[:, 0], greedy)
    # 1. Select: the score of each draft under the private model, shared (client's one-hot rows).
    chosen = jax.nn.one_hot(drafts, rows.shape[-1], dtype=jnp.bool_)
    selected = jnp.sum(jnp.where(chosen, rows[:, :count], 0.0), axis=-1)
    # 2. Compare: s = e_d - (r q) Z, rejected unless positive; open every bit to the client.
    if greedy:
        margin = selected + GREEDY_MARGIN
    else:
        normaliser = unbiased_total(rows[:, :count])
        margin = selected - thresholds * normaliser
    rejected = reveal(margin <= 0, to=Owner.CLIENT, label="rejection bits")
    # 3. Carry: the client picks row k obliviously (one-hot over positions) and learns all of it.
    first = first_rejection(rejected)
    picked = jax.nn.one_hot(first, count + 1, dtype=jnp.bool_)[..., None]
    row = jnp.sum(jnp.where(picked, rows, 0.0), axis=1)
    return rejected, _open_row(row, greedy)


def _open_row(row: Array, greedy: bool) -> Array:
    what = "row of logits" if greedy else "row of the distribution"
    return reveal(row, to=Owner.CLIENT, label=what)


def first_rejection(rejected: Array | np.ndarray) -> Array:
    """Index k of the first rejection, or the number of drafts: int32 [...] of bool [..., d]."""
    return jnp.sum(jnp.cumprod(1 - jnp.asarray(rejected, jnp.int32), axis=-1), axis=-1)


def threshold(uniform: np.ndarray, q_of_draft: np.ndarray) -> np.ndarray:
    """r_i q_i(d_i), float32 [drafts]; q is the distribution the draft was drawn from."""
    return (uniform * q_of_draft).astype(np.float32)


def distribution(row: np.ndarray, *, greedy: bool) -> np.ndarray:
    """Probabilities float64 [vocab] of an opened row: normalised, or one-hot when greedy."""
    if greedy:
        one_hot = np.zeros(row.shape, np.float64)
        one_hot[np.argmax(row)] = 1.0
        return one_hot
    positive = np.maximum(np.asarray(row, np.float64), 0.0)
    return positive / positive.sum()


def next_distribution(p: np.ndarray, q: np.ndarray | None) -> np.ndarray:
    """What the bonus token is drawn from: max(0, p - q) normalised, or p when nothing was rejected.

    p, q: float64 [vocab]; q is None after an all-accepted step. A residual that rounding made zero
    falls back to p.
    """
    if q is None:
        return p
    residual = np.maximum(p - q, 0.0)
    total = residual.sum()
    return residual / total if total > 0 else p


def draw(p: np.ndarray, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the cumulative distribution p [vocab]."""
    cumulative = np.cumsum(p)
    return int(min(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"), p.size - 1))
