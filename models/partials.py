"""Partial attention, over blocks of keys and values held in different places, in plaintext (NumPy).

Theorem 4.1 of "Confidential Prompting" (Gim, Li, Zhong): with shifts m_b, masses s_b = sum exp(z -
m_b) of a block's scores z, and means A_b of its values under these weights,

    A = sum_b u_b A_b,    u_b = exp(lse_b - lse),    lse_b = m_b + log s_b.

Two blocks merge as A = A_1 + w (A_2 - A_1), where w = sigmoid(lse_2 - lse_1) is the second block's
part of the mass; the paper's form has alpha = exp(m_1 - m_2) and its inverse, which overflow. Any
number of blocks merge in any order. For blocks on shares, where no party sees a partial:
`protocols.functions.aggregation`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Partial(NamedTuple):
    """Attention of queries [..., n] over one block; a block without a visible row has mass 0."""

    out: np.ndarray  # [..., n, d]: A_b, the mean of values under softmax weights
    shift: np.ndarray  # [..., n]: m_b, the largest visible score
    mass: np.ndarray  # [..., n]: s_b


def partial(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray | None = None
) -> Partial:
    """Compute attention of scaled queries [..., n, d] over keys and values [..., t, d]; t may be 0.
    visible: bool, of the shape of the scores [..., n, t] or one that broadcasts to it; by default
    all rows are visible.
    """
    scores = query @ keys.swapaxes(-1, -2)
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    shift = scores.max(axis=-1, initial=-np.inf)
    # Where no row is visible there is nothing to shift by.
    shift = np.where(np.isneginf(shift), 0, shift).astype(scores.dtype)
    weights = np.exp(scores - shift[..., None])
    mass = weights.sum(axis=-1)
    # Zero rows of weights stay zero.
    return Partial(weights @ values / np.where(mass > 0, mass, 1)[..., None], shift, mass)


def merged(one: Partial, other: Partial) -> Partial:
    """Merge the partials over two blocks into the partial over both."""
    present = [np.where(p.mass > 0, p.shift, -np.inf) for p in (one, other)]
    shift = np.maximum(*present)
    shift = np.where(np.isneginf(shift), 0, shift).astype(one.shift.dtype)
    # Each e^(m_b - m) is at most 1. Through lse_b, what is lost grows with the scores.
    masses = [p.mass * np.exp(at - shift) for p, at in zip((one, other), present, strict=True)]
    mass = (masses[0] + masses[1]).astype(one.mass.dtype)
    share = (masses[1] / np.where(mass > 0, mass, 1)).astype(one.out.dtype)[..., None]
    return Partial(one.out + share * (other.out - one.out), shift, mass)
