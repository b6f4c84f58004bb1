"""What somebody without the key does to a text, in tokens.

The paraphraser is no language model that understands: it walks through the text and rewrites blocks
of tokens, chosen at random, with what a second, smaller model (the shipped public one) samples at
temperature 1 in their place, given the prompt and the text so far. The words change, the length
stays, and what was not rewritten keeps its tokens; n-grams stay only inside of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from experiments.watermark.texts import Lanes, distribution_of, draws
from spu_llm.core.prg import Prg

BLOCK = 4  # tokens that are rewritten together

Edit = Callable[[list[int], int, Prg], list[int]]  # a text, the vocabulary's size, randomness


def _places(count: int, share: float, prg: Prg) -> list[int]:
    order = np.argsort(prg.words((count,)), kind="stable")
    return sorted(order[: round(share * count)].tolist())


def _tokens(count: int, vocab: int, prg: Prg) -> list[int]:
    """Draw any tokens but 0, which ends texts."""
    return (1 + (prg.words((count,)) % np.uint64(vocab - 1))).astype(int).tolist()  # type: ignore[no-any-return]


def replaced(share: float) -> Edit:
    """Return an edit that replaces this share of tokens by any others."""

    def edit(text: list[int], vocab: int, prg: Prg) -> list[int]:
        places = _places(len(text), share, prg)
        edited = list(text)
        for place, token in zip(places, _tokens(len(places), vocab, prg), strict=True):
            edited[place] = token
        return edited

    return edit


def deleted(share: float) -> Edit:
    """Return an edit that deletes this share of tokens."""

    def edit(text: list[int], vocab: int, prg: Prg) -> list[int]:
        gone = set(_places(len(text), share, prg))
        return [token for i, token in enumerate(text) if i not in gone]

    return edit


def inserted(share: float) -> Edit:
    """Return an edit that inserts any token before each of this share of the text's."""

    def edit(text: list[int], vocab: int, prg: Prg) -> list[int]:
        places = _places(len(text), share, prg)
        before = dict(zip(places, _tokens(len(places), vocab, prg), strict=True))
        edited: list[int] = []
        for i, token in enumerate(text):
            edited += [before[i]] if i in before else []
            edited.append(token)
        return edited

    return edit


def cropped(kept: int) -> Edit:
    """Return an edit that keeps so many tokens from the middle."""

    def edit(text: list[int], vocab: int, prg: Prg) -> list[int]:
        start = max(0, (len(text) - kept) // 2)
        return text[start : start + kept]

    return edit


EDITS: dict[str, Edit] = {
    "replaced 10 %": replaced(0.1),
    "replaced 20 %": replaced(0.2),
    "replaced 30 %": replaced(0.3),
    "replaced 50 %": replaced(0.5),
    "deleted 10 %": deleted(0.1),
    "deleted 30 %": deleted(0.3),
    "inserted 10 %": inserted(0.1),
    "inserted 30 %": inserted(0.3),
    "cropped to 50": cropped(50),
}
CORRUPTED = "replaced 10 %"
PARAPHRASES = {"paraphrased 50 %": 0.5, "paraphrased 80 %": 0.8}
PARAPHRASED = "paraphrased 50 %"


def paraphrased(
    texts: np.ndarray,
    prompts: np.ndarray,
    share: float,
    lanes: Lanes,
    never: Sequence[int],
    prg: Prg,
) -> np.ndarray:
    """Return the texts [text, token] with this share of blocks rewritten."""
    count, length = texts.shape
    blocks = prg.uniform((count, -(-length // BLOCK))) < share
    rewritten = np.repeat(blocks, BLOCK, axis=1)[:, :length]
    edited = texts.copy()
    state = lanes.begun(prompts)
    for i in range(length):
        p = distribution_of(state.logits, 1.0, never).p
        for j, point in enumerate(prg.uniform((count, 1))):
            if rewritten[j, i]:
                edited[j, i] = draws(p[j], point)[0]
        if i + 1 < length:
            state = lanes.after(state, edited[:, i])
    return edited
