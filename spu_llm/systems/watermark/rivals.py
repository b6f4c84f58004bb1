"""Texts marked as the paper's rivals mark them (`baselines`), and their detection with the key.

Nothing remembers which n-grams were used, as published: two texts of a key depend on each other.
Aaronson's numbers are those of a race (`race_marks`), and Fisher's score is his; Kirchenbauer's
green tokens are those with the largest numbers, 1 - R, and their count is binomial in text without
a mark; Kuditipudi's text is aligned with the key's list, and with the lists of keys that nobody
has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from protocols.verification.distribution import draw
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.baselines import Aaronson, Kirchenbauer, Kuditipudi
from spu_llm.systems.watermark.keys import Key, Scheme
from spu_llm.systems.watermark.race_marks import Next

DELTA = 2.0  # the paper's
LARGEST_DELTA = 50.0
MOST_REFERENCES = 100_000


def next_token(key: Key, scheme: Scheme, vocab: int, delta: float, prg: Prg) -> Next:
    """Return what chooses tokens under a key of RIVALS. delta: what Kirchenbauer's adds to the
    logarithms of green tokens' probabilities. prg: what a scheme draws besides.
    """
    if scheme.method == "aaronson":
        return Aaronson(key, vocab, scheme.ngram).next
    if scheme.method == "kirchenbauer":
        green = Kirchenbauer(key, vocab, delta, scheme.ngram)

        def drawn(p: np.ndarray, generated: tuple[int, ...]) -> int:
            logits = green.logits(np.log(np.maximum(p, 1e-300)), generated)
            return draw(np.exp(logits - logits.max()), float(prg.uniform(())))

        return drawn
    along = Kuditipudi(key, vocab)
    start = along.begin(prg)
    return lambda p, generated: along.next(p, start + len(generated))


def check_delta(delta: float | None, scheme: Scheme) -> float:
    """Return the delta that a text is written with; InputError for one that its key has no use for,
    or that marks nothing.
    """
    if delta is None:
        return DELTA
    if scheme.method != "kirchenbauer":
        raise InputError("--delta is Kirchenbauer's; leave it out")
    if not 0 < delta <= LARGEST_DELTA:
        raise InputError(f"--delta must be above 0 and at most {LARGEST_DELTA:g}, found {delta:g}")
    return delta


def aligned_log_p(
    key: Key,
    tokens: Sequence[int],
    references: int,
    prg: Prg,
    on_progress: Callable[[str], None] = lambda words: None,
) -> float:
    """Return log p of Kuditipudi's mark: the rank of the text's alignment with the key's list among
    those with the lists of so many keys that nobody has; 0.0 for a text without tokens.
    """
    if not 1 <= references <= MOST_REFERENCES:
        raise InputError(f"--references must be 1 to {MOST_REFERENCES}, found {references}")
    if not tokens:
        return 0.0
    # A row of a larger vocabulary begins with that of a smaller one.
    scheme = Kuditipudi(key, max(tokens) + 1)
    own, as_good = scheme.cost(tokens), 0
    for number in range(references):
        as_good += scheme.cost(tokens, Key(prg.words((4,)).tobytes())) <= own
        on_progress(f"{number + 1} of {references} other keys")
    return math.log((1 + as_good) / (1 + references))
