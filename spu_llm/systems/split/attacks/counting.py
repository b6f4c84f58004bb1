"""A5 and A6: the same token is the same codebook vector, and language is known.

Both group rows, less the public positions, that are alike (`grouping`). What they rest on, that
rows of one token are alike wherever they stand, shows without groups (`nearest`).

A5 (frequency): counts of groups, or of k-grams of groups, are ranked, and matched with ranked
public k-grams.

A6 (clustering): rows are grouped by similarity, by position, or by both, and a group is matched
with what stands at the same positions in public text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from spu_llm.systems.split.attacks import NONE, grouping
from spu_llm.systems.split.attacks.views import HostView, Public, Texts

WAYS = ("similarity", "position", "both")


def groups(view: HostView, public: Public) -> list[list[int]]:
    """Return, for each row of each text, the number of its group, the largest group first."""
    rows = grouping.without_positions(public, view.rows)
    numbers = grouping.groups_of(np.concatenate(rows), grouping.equal_share(public.texts))
    return grouping.cut(numbers, rows)


def nearest(view: HostView, public: Public) -> list[list[tuple[int, int]]]:
    """Find, for each row of each text, the row of another text, as (text, place), that has the
    highest centred cosine with it.
    """
    rows = grouping.directions(public, view.rows)
    every = np.concatenate(rows)
    text = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    place = np.concatenate([np.arange(len(r)) for r in rows])
    pairs = []
    for i, own in enumerate(rows):
        best = np.where(text == i, -np.inf, own @ every.T).argmax(axis=1)
        pairs.append([(int(text[j]), int(place[j])) for j in best])
    return pairs


def by_frequency(grouped: Texts, public: Public, k: int = 1) -> list[list[int]]:
    """Guess tokens by frequency (A5). A position takes its token from the highest-ranked of the
    k-grams of groups over it; with k of 2 or more those seen once are no k-grams, and say nothing.
    """
    observed = [gram for gram, n in _grams(grouped, k).most_common() if k == 1 or n > 1]
    ranked = [gram for gram, _ in _grams(public.texts, k).most_common(len(observed))]
    meaning = dict(zip(observed, ranked, strict=False))
    rank = {gram: i for i, gram in enumerate(meaning)}
    guesses = []
    for text in grouped:
        guess, best = [NONE] * len(text), [len(rank)] * len(text)
        for at in range(len(text) - k + 1):
            gram = tuple(text[at : at + k])
            for i, token in enumerate(meaning.get(gram, ())):
                if rank[gram] < best[at + i]:
                    guess[at + i], best[at + i] = token, rank[gram]
        guesses.append(guess)
    return guesses


def _grams(texts: Texts, k: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text[i : i + k]) for text in texts for i in range(len(text) - k + 1))


def attack(view: HostView, public: Public, k: int = 1) -> list[list[int]]:
    """Group the rows of a view, and guess tokens by the frequency of k-grams of groups (A5)."""
    return by_frequency(groups(view, public), public, k)


def by_place(
    view: HostView, public: Public, way: str, grouped: Texts | None = None
) -> list[list[int]]:
    """Guess tokens by place (A6). similarity: a group takes the token under which its positions are
    likeliest in public text. position: the most frequent public token there, whatever the row.
    both: groups of one position, ranked, take that position's ranked tokens.
    """
    longest = max(len(rows) for rows in view.rows)
    at = [Counter(text[j] for text in public.texts if len(text) > j) for j in range(longest)]
    if way == "position":
        return [[_ranked(at[j], 0) for j in range(len(rows))] for rows in view.rows]
    if way == "both":
        return _of_positions(view, public, at)
    assert way == "similarity"
    return _of_groups(groups(view, public) if grouped is None else grouped, public, at)


def _ranked(counts: Counter[int], rank: int) -> int:
    """Return the token of this rank, from 0 on; `NONE` where there are too few tokens."""
    best = counts.most_common(rank + 1)
    return best[rank][0] if rank < len(best) else NONE


def _of_positions(view: HostView, public: Public, at: Sequence[Counter[int]]) -> list[list[int]]:
    guesses = [[NONE] * len(rows) for rows in view.rows]
    for j, counts in enumerate(at):
        those = [i for i, rows in enumerate(view.rows) if len(rows) > j]
        total = sum(counts.values())
        share = sum(n * (n - 1) for n in counts.values()) / max(1, total * (total - 1))
        grouped = grouping.groups_of(np.array([view.rows[i][j] for i in those]), share)
        for i, group in zip(those, grouped, strict=True):
            guesses[i][j] = _ranked(counts, int(group))
    return guesses


def _of_groups(grouped: Texts, public: Public, at: Sequence[Counter[int]]) -> list[list[int]]:
    tokens = np.unique([t for counts in at for t in counts])
    table = np.array([[counts[t] for t in tokens] for counts in at], float)  # [position, token]
    likely = np.log((table + 0.1) / (table + 0.1).sum(axis=1, keepdims=True))
    numbers = max(g for text in grouped for g in text) + 1
    seen = np.zeros((numbers, len(at)))
    for text in grouped:
        np.add.at(seen, (np.asarray(text), np.arange(len(text))), 1)
    best = tokens[(seen @ likely).argmax(axis=1)]
    return [best[np.asarray(text)].tolist() for text in grouped]
