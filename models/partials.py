"""Attention over blocks of keys and values that lie in different places, in the clear (NumPy).

Theorem 4.1 of "Confidential Prompting" (Gim, Li, Zhong): with shifts m_b, masses
s_b = sum exp(z - m_b) of a block's scores z, and means A_b of its values under them,

    A = sum_b u_b A_b,    u_b = exp(lse_b - lse),    lse_b = m_b + log s_b.

Two blocks merge as A = A_1 + w (A_2 - A_1) with w = sigmoid(lse_2 - lse_1): the printed form has
alpha = exp(m_1 - m_2) and its inverse, which overflow. Any number merges in any order. Of shared
blocks, where nobody sees a partial: `protocols.functions.aggregation`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Partial(NamedTuple):
    """Attention of queries [..., n] over one block; a block without a visible row has mass 0."""

    out: np.ndarray  # [..., n, d]: A_b, the mean of values under softmax weights
    shift: np.ndarray  # [..., n]: m_b, the largest visible score
    mass: np.ndarray  # [..., n]: s_b

    @property
    def lse(self) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return self.shift + np.log(self.mass)


def partial(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray | None = None
) -> Partial:
    """Of scaled queries [..., n, d] over keys and values [..., t, d], t may be 0. visible: bool,
    of the shape of the scores [..., n, t] or one that broadcasts to it; all by default.
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
    """The partial of both blocks together."""
    shift = np.maximum(
        np.where(one.mass > 0, one.shift, -np.inf), np.where(other.mass > 0, other.shift, -np.inf)
    )
    shift = np.where(np.isneginf(shift), 0, shift).astype(one.shift.dtype)
    with np.errstate(over="ignore"):  # only where the mass is 0
        masses = [
            np.where(p.mass > 0, p.mass * np.exp(p.shift - shift), 0).astype(p.mass.dtype)
            for p in (one, other)
        ]
    with np.errstate(invalid="ignore"):  # both empty
        difference = other.lse - one.lse
    share = 0.5 + 0.5 * np.tanh(difference / 2)
    share = np.where(np.isnan(share), 0, share).astype(one.out.dtype)[..., None]
    return Partial(one.out + share * (other.out - one.out), shift, masses[0] + masses[1])
