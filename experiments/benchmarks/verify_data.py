"""Test data of `bench verify`, and the check of every outcome against plaintext.

Weights computed from shared logits are off by at most `WEIGHT_ERROR`; a decision that is closer
than that to its threshold may go either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocols.verification.distribution import Sampling, Streams
from protocols.verification.race import UNIT_BITS
from protocols.verification.sampling import Widths
from protocols.verification.variants import Verifier
from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import CLIENT, Arith, as_words, encode

SAMPLING = Sampling(1.0)
LOGITS_DEVIATION = 3.0
DRAFT_DEVIATION = 0.7  # of the public model's logits from the private one's
WEIGHT_ERROR = 2.0  # units of 2^-18 that a weight from shared logits may be off by
# By which a winner may be below the largest number, in nats: two units of those that run, and the
# encoded noise's.
NOISE_ERROR = 2.0 * 2.0**-UNIT_BITS + 2.0**-15

FRAC_BITS = SpuConfig().frac_bits
_UNIT = 2.0**FRAC_BITS


# ---- test data


def step_logits(vocab: int, drafts: int) -> np.ndarray:
    """Draw the logits of a step in units: int32 [drafts + 1, vocab], equal at both parties."""
    rng = np.random.default_rng((vocab, drafts))
    z = rng.standard_normal((drafts + 1, vocab), np.float32) * np.float32(LOGITS_DEVIATION)
    return encode(z, FRAC_BITS).view(np.int64).astype(np.int32)


def draft_logits(logits: np.ndarray, row: int) -> np.ndarray:
    """Draw the public model's logits float64 [vocab] for a row of the private model's logits."""
    noise = np.random.default_rng((*logits.shape, row)).standard_normal(logits.shape[1])
    return logits[row] / _UNIT + DRAFT_DEVIATION * noise


def weights_of(logits: np.ndarray) -> np.ndarray:
    """Return the weights exp(z - max z) of a row of logits in units: float64 [vocab], in units, not
    rounded.
    """
    return np.exp((logits - logits.max()) / _UNIT) * _UNIT


def exact_weights(logits: np.ndarray) -> np.ndarray:
    """Return the weights exp(z - max z) of a row of logits as integers: int32 [vocab], in units."""
    return np.round(weights_of(logits)).astype(np.int32)


def shared(rank: int, words: np.ndarray, seed: int) -> Arith:
    """Return this party's share of fixed-point `words` (integers), which both parties know, under a
    uniform mask.
    """
    mask = Prg.from_seed(seed, "shares").words(words.shape)
    own = mask if rank == CLIENT else as_words(words) - mask
    return Arith(own, np.dtype(np.float32), FRAC_BITS)


@dataclass(frozen=True)
class Step:
    """Plaintext of one run, at the client: everything that decides its outcome."""

    verifier: Verifier
    logits: np.ndarray  # int32 [drafts + 1, vocab], in units
    exact: bool  # verified from exact weights
    run: int
    drafts: list[int]
    q: np.ndarray  # float64 [drafts, vocab]
    client: Any
    provider: Any

    @staticmethod
    def drafted(variant: Verifier, logits: np.ndarray, exact: bool, run: int) -> Step:
        """Draw the drafts and both parties' inputs of run number `run`."""
        streams = Streams(Prg.from_seed(run, "drafting"), Prg.from_seed(run, "sampling"))
        count = len(logits) - 1
        drafts, q = [], np.zeros((count, logits.shape[1]))
        for i in range(count):
            draft, q[i] = variant.propose(draft_logits(logits, i), i, streams)
            drafts.append(draft)
        client = variant.client_input(drafts, q, 0, streams)
        provider = variant.provider_input(count, logits.shape[1], provider_stream(run))
        return Step(variant, logits, exact, run, drafts, q, client, provider)

    def weights(self, row: int) -> np.ndarray:
        """Return the weights float64 [vocab] of a row, in units; the verified weights differ by at
        most `error`.
        """
        logits = self.logits[row]
        return exact_weights(logits).astype(np.float64) if self.exact else weights_of(logits)

    @property
    def error(self) -> float:
        return 0.0 if self.exact else WEIGHT_ERROR


def provider_stream(run: int) -> Prg:
    return Prg.from_seed(run, "joint randomness")


# ---- what is right


def mistakes(step: Step, outcome: Any) -> list[str]:
    """Describe the contradictions between an outcome at the client and plaintext."""
    uniform = Prg.from_seed(step.run, "resolving")
    try:
        k, chosen = step.verifier.resolve(
            outcome, step.drafts, step.q, lambda: float(uniform.uniform(()))
        )
    except WireError as exc:
        return [str(exc)]
    count, vocab = len(step.drafts), step.logits.shape[1]
    if not (0 <= k <= count and 0 <= chosen < vocab):
        return [f"{k} of {count} drafts accepted, then token {chosen} of {vocab}"]
    check = {"token": _token_mistakes, "race": _race_mistakes, "marked": _race_mistakes}.get(
        step.verifier.name, _post_mistakes
    )
    return check(step, outcome, k, chosen)


def decisions(step: Step, q: np.ndarray, r: np.ndarray) -> list[tuple[bool, bool]]:
    """Return, for each draft, whether it may be accepted, and whether it may be rejected, by the
    rule (2 r' + 1) Q Z < W 2^scale (sampling.py).

    q, r: integers [drafts], at the drafts only.
    """
    widths = Widths.of_weights(step.logits.shape[1])
    decided = []
    for i, draft in enumerate(step.drafts):
        w = step.weights(i)
        total, off = float(w.sum()), step.error * w.size
        factor = (2 * int(r[i]) + 1) * int(q[i])
        least, most = _bounds(float(w[draft]), step.error)
        low, high = (factor * z for z in _bounds(total, off))
        decided.append((low < most << widths.scale, high >= least << widths.scale))
    return decided


def _bounds(x: float, off: float) -> tuple[int, int]:
    """Return integer bounds of a number that is off from x >= 0 by at most `off`; Python integers,
    whose products cannot overflow.
    """
    return max(0, math.floor(x - off)), math.ceil(x + off)


def _stop_mistakes(step: Step, k: int, may: Sequence[tuple[bool, bool]]) -> list[str]:
    """Check the first rejection, at k: all drafts before k may be accepted, and draft k, if there
    is one, rejected.
    """
    wrong = [i for i in range(k) if not may[i][0]]
    if k < len(may) and not may[k][1]:
        wrong.append(k)
    return [f"drafts stop at {k}, but draft {i} is decided otherwise" for i in wrong]


def _post_mistakes(step: Step, outcome: Any, k: int, chosen: int) -> list[str]:
    """Check the rejection bits by the integer rule, and the opened row of weights, which may be off
    by the step's `error`.
    """
    each = np.arange(len(step.drafts))
    q = step.client.q[each, step.drafts] if step.client.q.ndim == 2 else step.client.q
    may = decisions(step, q, step.client.r)
    rejected = np.asarray(outcome.rejected)
    mistakes = [
        f"rejection bit {i} is {bool(bit)}"
        for i, bit in enumerate(rejected)
        if not may[i][int(bit)]
    ]
    off = np.abs(np.asarray(outcome.row, np.float64) * _UNIT - step.weights(k)).max()
    if off > step.error:
        mistakes.append(f"a weight of row {k} is off by {off:.1f} units")
    return mistakes + _stop_mistakes(step, k, may)


def _token_mistakes(step: Step, outcome: Any, k: int, chosen: int) -> list[str]:
    """Check the first rejection by the integer rule, and the token's block, and its place in the
    block, by the draws.
    """
    of_client, of_provider = step.client.randomness, step.provider
    count, vocab = len(step.drafts), step.logits.shape[1]
    widths = Widths.of_weights(vocab)
    each = np.arange(count)
    r = (of_client.accept ^ of_provider.accept) & ((1 << widths.accept) - 1)
    mistakes = _stop_mistakes(step, k, decisions(step, step.client.q[each, step.drafts], r))
    # max(0, W - Q Z / 2^draft), and by how much it may be off: by W, by Z, and by the truncation.
    w = step.weights(k)
    distribution = step.client.q[k] / 2.0**widths.draft
    rest = np.maximum(w - distribution * w.sum(), 0.0)
    shift = widths.shift(widths.draft)
    cut = 2.0 ** (shift - widths.draft) if shift else 0.0
    off = step.error * (1 + distribution * vocab) + cut
    u = ((of_client.draw ^ of_provider.draw) & ((1 << widths.draw) - 1)) / 2.0**widths.draw
    size = math.isqrt(vocab - 1) + 1
    edges = np.arange(0, vocab, size)
    block, place = divmod(int(outcome.token), size)
    within = slice(block * size, block * size + size)
    blocks = places(np.add.reduceat(rest, edges), np.add.reduceat(off, edges), u[0])
    if block not in blocks or place not in places(rest[within], off[within], u[1]):
        mistakes.append(f"token {outcome.token} is not where the draws fall")
    return mistakes


def places(weights: np.ndarray, off: np.ndarray, fraction: float) -> range:
    """Return the places where `fraction` of the total of `weights` [n] may fall, if each weight may
    be off by `off` [n].
    """
    slack = 1e-9 * (weights.sum() + 1.0)  # of this arithmetic itself
    low = np.cumsum(np.maximum(weights - off, 0.0)) - slack
    high = np.cumsum(weights + off) + slack
    first = np.searchsorted(high, fraction * low[-1], side="right")
    last = np.searchsorted(low, fraction * high[-1], side="right")
    return range(int(first), int(last) + 1)


def _race_mistakes(step: Step, outcome: Any, k: int, chosen: int) -> list[str]:
    """Check that every emitted token is the Gumbel-max winner of its row, and that the rejected
    draft is not.
    """
    noise = step.provider if step.verifier.name == "marked" else step.client.noise
    mistakes = []
    for i, emitted in enumerate([*step.drafts[:k], chosen]):
        row = step.logits[i] / _UNIT + noise[i]
        if row.max() - row[emitted] > NOISE_ERROR:
            mistakes.append(f"token {emitted} does not win row {i}")
    if k < len(step.drafts) and chosen == step.drafts[k]:
        mistakes.append(f"draft {k} is rejected, but wins")
    return mistakes
