"""Somebody without the key who has seen N texts of it: can he write text that it takes for its own,
and does he learn what the key says of n-grams?

Forgers:

    walk      goes from n-gram to n-gram that he has seen: the next token is any that he saw after
              the last three; where there is none he jumps to another place
    paste     phrases of 8 tokens, each from anywhere in what he has seen
    draft     the public model's own text, in which a token that he saw after the last three has 8
              nats more

The same is done with unmarked texts, which must give p-values like any.

Guesses: of two tokens after the same three, which has the larger number? By whether he has seen
these four together; and where he has seen neither, by how much more often the endings (three, two,
one token) came in marked texts than in as many unmarked ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.watermark.texts import NGRAM, Lanes, distribution_of, draws
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.keys import Key, token_unit

PHRASE = 8
MORE = 8.0  # nats
Gram = tuple[int, ...]


def _any(count: int, prg: Prg) -> int:
    return int(prg.words((1,))[0] % np.uint64(count))


def followers(texts: Sequence[Sequence[int]], n: int = NGRAM) -> dict[Gram, list[int]]:
    """Return what was seen after each n - 1 tokens."""
    after: dict[Gram, list[int]] = defaultdict(list)
    for text in texts:
        for i in range(n - 1, len(text)):
            after[tuple(text[i - n + 1 : i])].append(text[i])
    return dict(after)


def walk(texts: Sequence[Sequence[int]], length: int, prg: Prg) -> list[int]:
    """Forge a text by the walk that the module describes."""
    after = followers(texts)
    contexts = list(after)
    text: list[int] = []
    while len(text) < length:
        known = after.get(tuple(text[-NGRAM + 1 :]))
        if known is None or len(text) < NGRAM - 1:
            text += contexts[_any(len(contexts), prg)]
        else:
            text.append(known[_any(len(known), prg)])
    return text[:length]


def paste(texts: Sequence[Sequence[int]], length: int, prg: Prg) -> list[int]:
    """Forge a text by the pasting that the module describes."""
    pasted: list[int] = []
    while len(pasted) < length:
        text = texts[_any(len(texts), prg)]
        start = _any(max(1, len(text) - PHRASE + 1), prg)
        pasted += text[start : start + PHRASE]
    return pasted[:length]


FORGERS: dict[str, Callable[[Sequence[Sequence[int]], int, Prg], list[int]]] = {
    "walk": walk,
    "paste": paste,
}


def draft(
    texts: Sequence[Sequence[int]],
    length: int,
    lanes: Lanes,
    prompts: np.ndarray,
    never: Sequence[int],
    prg: Prg,
) -> list[list[int]]:
    """Forge a text after each prompt [text, token] by the drafting that the module describes."""
    after = followers(texts)
    drafted: list[list[int]] = [[] for _ in prompts]
    state = lanes.begun(prompts)
    for i in range(length):
        p = distribution_of(state.logits, 1.0, never).p
        for j, point in enumerate(prg.uniform((len(prompts), 1))):
            known = after.get(tuple(drafted[j][-NGRAM + 1 :]), []) if i >= NGRAM - 1 else []
            if known:
                p[j, known] *= math.exp(MORE)
            drafted[j].append(draws(p[j], point)[0])
        if i + 1 < length:
            state = lanes.after(state, np.array([text[-1] for text in drafted]))
    return drafted


# ---- what the key says


def number(key: Key, gram: Gram) -> float:
    return key.seed([token_unit(token) for token in gram]).uniform


def guesses(
    marked: Sequence[Sequence[int]],
    unmarked: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    key: Key,
    prg: Prg,
) -> dict[str, dict[str, float]]:
    """Return how often the forger guesses right, and of how many pairs. `others`: texts that nobody
    marked, where the contexts of unseen n-grams are from.
    """
    seen = set(_grams(marked, NGRAM))
    more = [_excess(marked, unmarked, n) for n in (1, 2, 3)]

    def weight(gram: Gram) -> float:
        return sum(of.get(gram[-n:], 0.0) for n, of in enumerate(more, 1))

    right: dict[str, list[float]] = {"seen": [], "unseen": [], "unseen, where he sees any": []}
    pool = [gram[-1] for gram in _grams(others, 1)]
    for gram in sorted(seen):
        other = (*gram[:-1], pool[_any(len(pool), prg)])
        if other not in seen:
            right["seen"].append(number(key, gram) > number(key, other))
    for gram in _grams(others, NGRAM):
        other = (*gram[:-1], pool[_any(len(pool), prg)])
        if gram in seen or other in seen or gram == other:
            continue
        a, b = weight(gram), weight(other)
        truth = number(key, gram) > number(key, other)
        guess = a > b if a != b else bool(_any(2, prg))
        right["unseen"].append(guess == truth)
        if a != b:
            right["unseen, where he sees any"].append(guess == truth)
    return {
        what: {"pairs": len(of), "right": round(float(np.mean(of)), 4) if of else math.nan}
        for what, of in right.items()
    }


def _grams(texts: Sequence[Sequence[int]], n: int) -> list[Gram]:
    return [tuple(text[i - n + 1 : i + 1]) for text in texts for i in range(n - 1, len(text))]


def _excess(
    marked: Sequence[Sequence[int]], unmarked: Sequence[Sequence[int]], n: int
) -> Mapping[Gram, float]:
    """Return the log of how much more often an ending came in marked texts."""
    a, b = Counter(_grams(marked, n)), Counter(_grams(unmarked, n))
    return {gram: math.log((a[gram] + 0.5) / (b[gram] + 0.5)) for gram in {*a, *b}}
