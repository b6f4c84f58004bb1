"""Guesses judged by the truth, against what they are worth for other texts.

Chance is how often the same guesses are right for other texts in the same places: what guesses are
worth that know of text, but not of this one. That they were right as often by luck is judged by
putting other texts in the places of the true ones, since tokens of one text are no independent
tries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from models.tokenizer import Tokenizer
from spu_llm.systems.outcome import AttackOutcome
from spu_llm.systems.split import scores
from spu_llm.systems.split.attacks.views import Texts

DRAWS = 9_999  # of other texts: the least probability of luck is one in 10,000
SHUFFLES = 999
FEW = 40  # other texts that wins are tried on: a comparison takes a millisecond

WINS: dict[str, Callable[[str, str], bool]] = {
    "privacy won (BLEU-1 of 20 or ROUGE-1 of 0.4)": lambda g, t: scores.wins_privacy([g], t),
    "confidentiality won (CodeBLEU-like score of 20)": lambda g, t: scores.wins_confidentiality(
        [g], t
    ),
    "an identifier of the text leaked": scores.identifier_leak,
}


def of_tokens(
    attack: str,
    mode: str,
    what: str,
    guesses: Texts,
    truths: Texts,
    others: Texts = (),
    counted: slice = slice(None),
    notes: str = "",
) -> AttackOutcome:
    """Score guesses of the right token in its place, at the positions `counted` of every text.
    others: further texts like the true ones.

    The probability of luck is that of this draw: in the place of each text one that is drawn from
    all of them and `others`, as if the guess had been made for it; guesses that know nothing of
    their own text are right as often then.
    """
    guessed = [np.asarray(guess)[counted] for guess in guesses]
    pool = [np.asarray(text)[counted] for text in [*truths, *others]]
    hits = np.array([[_equal(guess, text) for text in pool] for guess in guessed])
    tries = sum(len(text) for text in pool[: len(guessed)])
    return _outcome(attack, mode, what, tries, hits, notes)


def of_texts(
    attack: str,
    mode: str,
    how: str,
    guesses: Texts,
    truths: Texts,
    others: Texts,
    tokenizer: Tokenizer,
    counted: slice = slice(None),
) -> Iterator[AttackOutcome]:
    """Yield scores of texts as wholes, or of their parts `counted`: CRT, the tokens of a text
    wherever they stand, and NOIR's win rules and leak, a try a text.
    """
    guessed = [list(guess)[counted] for guess in guesses]
    pool = [list(text)[counted] for text in [*truths, *others[:FEW]]]
    equal = np.array([[round(len(t) * scores.crt(t, g)) for t in pool] for g in guessed])
    tries = sum(map(len, pool[: len(guessed)]))
    yield _outcome(
        attack, mode, f"a token of the text, wherever it stands (CRT), {how}", tries, equal
    )
    said, true = ([tokenizer.decode(ids) for ids in texts] for texts in (guessed, pool))
    for what, wins in WINS.items():
        hits = np.array([[int(wins(guess, text)) for text in true] for guess in said])
        yield _outcome(attack, mode, f"{what}, {how}", len(said), hits)


def _outcome(
    attack: str, mode: str, what: str, tries: int, hits: np.ndarray, notes: str = ""
) -> AttackOutcome:
    """Score hits [guess, text]: the first texts are those of the guesses, the others stand for what
    they might have been.
    """
    own = np.arange(len(hits))
    right = int(hits[own, own].sum())
    elsewhere = np.ones(hits.shape, bool)
    elsewhere[own, own] = False
    rate = float(hits[elsewhere].sum() / max(1, elsewhere.sum()) * len(hits) / tries)
    return AttackOutcome(
        attack, mode, what, tries, right, min(rate, 1.0), notes=notes, luck=_luck(hits, right)
    )


def _equal(guess: np.ndarray, text: np.ndarray) -> int:
    n = min(len(guess), len(text))
    return int((guess[:n] == text[:n]).sum())


def _luck(hits: np.ndarray, right: int) -> float:
    """Return how often drawn texts give `right` hits or more, of hits [guess, text], this very case
    included (so that it is never 0).
    """
    source = np.random.default_rng(0)
    drawn = source.integers(hits.shape[1], size=(DRAWS, len(hits)))
    by_luck = hits[np.arange(len(hits)), drawn].sum(axis=1)
    return float((1 + (by_luck >= right).sum()) / (1 + DRAWS))


def of_beginnings(
    attack: str, mode: str, guess: Sequence[Sequence[int]], true: Sequence[Sequence[int]]
) -> AttackOutcome:
    """Score, over the pairs of texts that have a beginning in common, whether its length was found
    (A9). Chance: that of a guess that was made for another pair; the probability of luck is found
    by giving the texts each other's places, since a text stands in many pairs.
    """
    guessed, wanted = np.asarray(guess), np.asarray(true)
    upper, source = np.triu_indices(len(true), 1), np.random.default_rng(0)
    common = wanted[upper] > 0
    first, second = upper[0][common], upper[1][common]
    said = int((guessed[upper][~common] > 0).sum())
    if not common.any():
        raise ValueError("no two of the texts have a beginning in common")
    lengths = wanted[first, second]
    chance = float((guessed[upper][None] == lengths[:, None]).mean())
    right = int((guessed[first, second] == lengths).sum())

    def drawn() -> int:
        place = source.permutation(len(true))
        return int((guessed[place[first], place[second]] == lengths).sum())

    luck = (1 + sum(drawn() >= right for _ in range(DRAWS))) / (1 + DRAWS)
    return AttackOutcome(
        attack,
        mode,
        "the length of the beginning that two texts have in common",
        int(common.sum()),
        right,
        chance,
        luck=luck,
        notes=f"of {int((~common).sum())} pairs without one, {said} were said to have one",
    )


def of_twins(attack: str, mode: str, what: str, twins: Sequence[int]) -> AttackOutcome:
    """Score guesses of the other text of each text's pair, 0 and 1, 2 and 3, and so on (A9).
    Chance: that of one of all other texts; the probability of luck is found by other ways of
    pairing texts.
    """
    guess, n = np.asarray(twins), len(twins)
    if n < 4 or n % 2:
        raise ValueError(f"{n} texts are no pairs to choose from")
    right, source = int((guess == (np.arange(n) ^ 1)).sum()), np.random.default_rng(0)

    def drawn() -> int:
        pairs, partner = source.permutation(n).reshape(-1, 2), np.empty(n, int)
        partner[pairs] = pairs[:, ::-1]
        return int((guess == partner).sum())

    luck = (1 + sum(drawn() >= right for _ in range(DRAWS))) / (1 + DRAWS)
    return AttackOutcome(attack, mode, what, n, right, 1 / (n - 1), luck=luck)


def of_nearest(
    attack: str, mode: str, what: str, pairs: Sequence[Sequence[tuple[int, int]]], texts: Texts
) -> AttackOutcome:
    """Score, for each row, the row of another text, as (text, place), that is said to be of the
    same token (A5). Chance: of a random row of another text; the probability of luck is found by
    shuffling the tokens of each text.
    """
    tokens, source = [np.asarray(text) for text in texts], np.random.default_rng(0)
    start = np.concatenate([[0], np.cumsum([len(text) for text in tokens])])
    said = np.array([start[text] + at for of_text in pairs for text, at in of_text])

    def equal(tokens: Sequence[np.ndarray]) -> int:
        flat = np.concatenate(tokens)
        return int((flat == flat[said]).sum())

    every = np.concatenate(tokens)
    rates = [
        np.mean(text[:, None] == np.delete(every, slice(start[i], start[i + 1])), axis=1)
        for i, text in enumerate(tokens)
    ]
    right = equal(tokens)
    shuffled = [equal([source.permutation(text) for text in tokens]) for _ in range(SHUFFLES)]
    luck = (1 + sum(n >= right for n in shuffled)) / (1 + SHUFFLES)
    chances = np.concatenate(rates)
    return AttackOutcome(
        attack,
        mode,
        what,
        len(every),
        right,
        float(chances.mean()),
        luck=luck,
        notes=f"{(chances > 0).mean():.1%} of the rows have one of their token in another text",
    )


def of_pairs(
    attack: str, mode: str, what: str, groups: Sequence[Sequence[int]], labels: Texts
) -> AttackOutcome:
    """Score pairs of positions that are said to have equal labels: how many have them (A11).
    groups: a number for each position, the same where labels are said to be equal, negative where
    nothing is said. Chance: the rate of all pairs; the probability of luck is found by shuffling
    labels.
    """
    group = np.concatenate([np.asarray(g) for g in groups])
    label = np.concatenate([np.asarray(t) for t in labels])
    known = group >= 0
    group, label = group[known], np.unique(label[known], return_inverse=True)[1].ravel()
    said, equal = _pairs(group), _pairs(label)
    every = max(1, len(label) * (len(label) - 1) // 2)
    if not said:
        return AttackOutcome(
            attack, mode, what, 1, 0, equal / every, notes="no two were said to be equal"
        )
    size, source = label.max() + 1, np.random.default_rng(0)
    both = _pairs(group * size + label)
    shuffled = [_pairs(group * size + source.permutation(label)) for _ in range(SHUFFLES)]
    luck = (1 + sum(n >= both for n in shuffled)) / (1 + SHUFFLES)
    return AttackOutcome(
        attack,
        mode,
        what,
        said,
        both,
        equal / every,
        luck=luck,
        notes=f"of {equal} equal pairs {both / max(1, equal):.1%} were found",
    )


def _pairs(numbers: np.ndarray) -> int:
    counts = np.unique(numbers, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())
