"""Distributions of a token in plaintext: of the client's drafts, and of an opened row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig

SPREAD = 128  # nats: by how much the logits of a row may differ at temperature 1
DRAFT_BITS = 16  # drafts are drawn from multiples of 2^-16, so that q is exact on shares


class Streams(NamedTuple):
    """The client's keyed random streams: for drafts, and for everything that decides on tokens."""

    drafting: Prg
    sampling: Prg


@dataclass(frozen=True)
class Sampling:
    """The rule by which a token follows from logits: the temperature (0 is greedy), then the
    `top_k` likeliest tokens (0: all), of them the fewest likeliest that hold `top_p` of the mass.

    Both restrictions keep ties: a token stays when fewer than `top_k` are likelier, and when the
    likelier ones hold less than `top_p`. No two logits differ by more than `logit_spread` nats.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    logit_spread: float = SPREAD

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    @property
    def difference_bits(self) -> int:
        """Return the signed bits of two logits' difference over the temperature, in fixed point."""
        colder = 0 if self.greedy else max(0, math.ceil(-math.log2(self.temperature)))
        return SpuConfig().frac_bits + 1 + math.ceil(math.log2(self.logit_spread)) + colder

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities float64 [vocab] of logits [vocab]."""
        if self.greedy:
            one_hot = np.zeros(logits.shape, np.float64)
            one_hot[np.argmax(logits)] = 1.0
            return one_hot
        scaled = np.asarray(logits, np.float64) / self.temperature
        return self.restricted(np.exp(scaled - scaled.max()))

    def restricted(self, weights: np.ndarray) -> np.ndarray:
        """Return the probabilities of non-negative weights [vocab] after top-k and top-p."""
        kept = weights * self.keeps(weights)
        return kept / kept.sum()

    def keeps(self, weights: np.ndarray) -> np.ndarray:
        """Return which tokens top-k and top-p leave, bool [vocab]."""
        keep = np.ones(weights.shape, bool)
        if self.truncated:
            order = np.argsort(-weights, kind="stable")
            ranked = weights[order]
            first = np.searchsorted(-ranked, -ranked)  # of its equals: so many are likelier
            if self.top_k:
                keep[order] &= first < self.top_k
            if self.top_p < 1:
                before = np.concatenate([[0.0], np.cumsum(ranked)])[first]
                keep[order] &= before < self.top_p * ranked.sum()
        return keep


def gumbel(uniform: np.ndarray) -> np.ndarray:
    """Return standard Gumbel numbers made from uniform ones in [0, 1): |g| < 37."""
    return -np.log(-np.log(np.clip(uniform, 2.0**-53, 1 - 2.0**-53)))


def quantised(p: np.ndarray, bits: int = DRAFT_BITS) -> np.ndarray:
    """Return integers [vocab] that sum to 2^bits, nearest to p 2^bits (largest remainders)."""
    scaled = p * (2.0**bits / p.sum())
    counts = np.floor(scaled).astype(np.int64)
    missing = (1 << bits) - int(counts.sum())
    if missing > 0:
        remainders = np.where(p > 0, scaled - counts, -1.0)
        counts[np.argpartition(remainders, -missing)[-missing:]] += 1
    return counts


def draft(
    sampling: Sampling, logits: np.ndarray, uniform: Callable[[], float]
) -> tuple[int, np.ndarray]:
    """Draw a token from logits [vocab]; return it and its distribution q, in multiples of
    2^-DRAFT_BITS.
    """
    q = quantised(sampling.distribution(logits))
    return draw(q, uniform()), q / q.sum()


def residual(p: np.ndarray, q: np.ndarray | None) -> np.ndarray:
    """Return max(0, p - q) normalised, or p when nothing was rejected (q is None).

    p, q: float64 [vocab]. A residual that rounding made zero falls back to p.
    """
    if q is None:
        return p
    rest = np.maximum(p - q, 0.0)
    total = rest.sum()
    return rest / total if total > 0 else p


def draw(p: np.ndarray, uniform: float) -> int:
    """Return the token at `uniform` in [0, 1) of the cumulative distribution p [vocab]."""
    cumulative = np.cumsum(p)
    return int(min(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"), p.size - 1))
