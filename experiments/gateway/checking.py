"""Whether an answer is the model's own to the very chat that was asked, and other judgements of a
run's figures.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from models.chat import Message, cut, going_on
from models.draft import Drafter
from models.hf import load_model
from spu_llm.api.texts import chat_encoded, renderer
from spu_llm.service.first_contact import text_format_here

_RANKS = 64  # tokens of a position that may be the one that was written
_TRIED = 400  # beginnings of an answer that are looked at
_CUT = "\N{REPLACEMENT CHARACTER}"  # stands for a character that is not whole yet


def margin_of(
    logits: Callable[[list[int]], np.ndarray],
    decode: Callable[[list[int]], str],
    ends: Collection[int],
    prompt: Sequence[int],
    text: str,
    count: int,
) -> tuple[float, list[int]] | None:
    """Return the least margin under which greedy choice writes `text` in `count` tokens after
    `prompt`, and these tokens: at each position, the chosen token's logit is below the largest one
    by that at most. 0.0: the text is the likeliest one. None: no likely tokens write it.

    Tokens in `ends` end a text, and may be counted or not.
    """
    wanted, number = text.rstrip(_CUT), itertools.count()
    # The one with the least margin so far first, of equal ones the longest.
    tried: list[tuple[float, int, int, list[int]]] = [(0.0, 0, next(number), [])]
    for _ in range(_TRIED):
        if not tried:
            break
        worst, _, _, path = heapq.heappop(tried)
        is_whole = decode(path).rstrip(_CUT) == wanted
        ended = bool(path) and path[-1] in ends
        if is_whole and (len(path) == count or (ended and len(path) == count + 1)):
            return worst, path
        if ended or len(path) > count:
            continue
        row = logits([*prompt, *path]).astype(np.float64)
        for token in np.argsort(-row)[:_RANKS].tolist():
            longer = [*path, token]
            if token in ends or wanted.startswith(decode(longer).rstrip(_CUT)):
                margin = max(worst, float(row.max() - row[token]))
                heapq.heappush(tried, (margin, -len(longer), next(number), longer))
    return None


class Reference:
    """Float32 answers of a model, and what the gateway's sessions read of a chat."""

    def __init__(self, model: Path) -> None:
        self._format = text_format_here(model)
        self._render = renderer(self._format)
        config, params = load_model(model)
        self._ends = frozenset(self._format.text.tokenizer.eos_ids)
        self._drafter = Drafter(config, params, config.context)

    def begins(self, chat: Sequence[Message]) -> list[int]:
        """Return the tokens of a chat that a session begins with."""
        head, rest = chat_encoded(self._format, *cut(self._render, chat))
        return [*head, *rest]

    def goes_on(self, before: Sequence[int], chat: Sequence[Message]) -> list[int]:
        """Return the tokens of a chat in the session of its earlier turns, whose tokens `before`
        are, the last answer's included.
        """
        earlier = "".join(cut(self._render, chat[:-2]))
        whole = "".join(cut(self._render, chat))
        added = going_on(earlier, chat[-2].content, whole)
        assert added is not None  # by the template
        return [*before, *self._format.text.tokenizer.encode(added, goes_on=True)]

    def margin(
        self, prompt: Sequence[int], text: str, count: int
    ) -> tuple[float, list[int]] | None:
        """Return `margin_of` an answer by this model."""

        def decode(tokens: list[int]) -> str:
            return self._format.text.tokenizer.decode([t for t in tokens if t not in self._ends])

        return margin_of(self._drafter.logits, decode, self._ends, prompt, text, count)


def jain(counts: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 where all have as much, 1/n where one has all. Jain, Chiu
    and Hawe 1984.
    """
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of values, between neighbours by their distance."""
    return float(np.percentile(np.asarray(values, np.float64), percent))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median of the slopes of all pairs of points (Theil and Sen), which single peaks do
    not change; 0.0 for fewer than two.
    """
    slopes = [
        (y - x) / (late - early)
        for (early, x), (late, y) in itertools.combinations(points, 2)
        if late > early
    ]
    return statistics.median(slopes) if slopes else 0.0


def told_apart(texts: Sequence[str]) -> float:
    """Return the part of all pairs of answers whose texts differ: such a pair, mixed up, is
    seen.
    """
    pairs = len(texts) * (len(texts) - 1)
    same = sum(n * (n - 1) for n in Counter(texts).values())
    return 1 - same / pairs if pairs else 0.0
