"""How good a guess or a completion is: NOIR's scores and win rules (§3 and §5 of the digest).

BLEU-1 and ROUGE-1 are written out here: each is one line over unigram counts. Both take words as
`python_code.words` has them (a string literal is one word, case counts, no stemming), of prompts of
code and text alike; scores of sacrebleu or rouge-score differ by their tokenizers.

`codebleu_like` follows CodeBLEU (Ren et al. 2020), 100 times the mean of four shares of what the
truth has, and differs from it in this:

| share       | here                                        | CodeBLEU                           |
|-------------|---------------------------------------------|------------------------------------|
| n-grams     | BLEU-4 of one text, 0.1 for a count of zero | the same, of a corpus              |
| weighted    | unigrams in BLEU-4 weigh 1 for keywords and | of recall, in its code             |
|             | 0.2 for others                              |                                    |
| syntax      | subtrees of Python's `ast`                  | of tree-sitter, which reads broken |
|             |                                             | text too                           |
| data flow   | target and source variables, numbered by    | of tree-sitter's leaves, per       |
|             | where they first stand; returns             | occurrence                         |

A guess that does not parse has no syntax and no data flow; a truth that does not parse, or has no
flow, is scored by the other shares.
"""

from __future__ import annotations

import ast
import keyword
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from spu_llm.systems.outcome import wilson
from spu_llm.systems.split import python_code

T = TypeVar("T", bound=Hashable)
BLEU_WINS, ROUGE_WINS, CODEBLEU_WINS, FUSI_ABOVE = 20.0, 0.4, 20.0, 0.0


# ---- text


def bleu1(guess: str, truth: str) -> float:
    """Return clipped unigram precision times brevity penalty, 0 to 100 (Papineni et al. 2002)."""
    g, t = python_code.words(guess), python_code.words(truth)
    if not g or not t:
        return 0.0
    return 100 * _brevity(len(g), len(t)) * _common(g, t) / len(g)


def rouge1(guess: str, truth: str) -> float:
    """Compute F1 of unigrams, 0 to 1 (Lin 2004)."""
    g, t = python_code.words(guess), python_code.words(truth)
    return 2 * _common(g, t) / (len(g) + len(t)) if g or t else 0.0


def crt(truth: Sequence[int], guess: Sequence[int]) -> float:
    """Return the share of correctly recovered tokens of one text, |x and x'| / |x|, with
    repetitions and without order: the paper does not say more. Its CRT is the mean over texts.
    ValueError for an empty truth.
    """
    if not len(truth):
        raise ValueError("an empty text has no tokens to recover")
    return _common([int(t) for t in truth], [int(t) for t in guess]) / len(truth)


def in_place(truth: Sequence[int], guess: Sequence[int]) -> float:
    """Return the share of the truth's tokens that the guess has at their very places. ValueError
    for an empty truth.
    """
    if not len(truth):
        raise ValueError("an empty text has no tokens to recover")
    return sum(int(a) == int(b) for a, b in zip(truth, guess, strict=False)) / len(truth)


def _common(first: Iterable[Hashable], second: Iterable[Hashable]) -> int:
    return (Counter(first) & Counter(second)).total()


def _brevity(guess: int, truth: int) -> float:
    return 1.0 if guess >= truth else math.exp(1 - truth / guess)


# ---- code


def codebleu_like(guess: str, truth: str) -> float:
    """Score code from 0 to 100; what the score is, and what it is not: see above."""
    g, t = python_code.words(guess), python_code.words(truth)
    shares = [_bleu4(g, t, lambda _: 1.0), _bleu4(g, t, _weight)]
    wanted, guessed = python_code.parsed(truth), python_code.parsed(guess) or ast.Module([], [])
    if wanted is not None and t:
        shares.append(_share(python_code.subtrees(guessed), python_code.subtrees(wanted)))
        if flows := python_code.flows(wanted):
            shares.append(_share(python_code.flows(guessed), flows))
    return 100 * sum(shares) / len(shares)


def _share(guessed: Counter[T], wanted: Counter[T]) -> float:
    """Return how much of `wanted` was found, 0 to 1."""
    return (guessed & wanted).total() / wanted.total() if wanted else 0.0


def _weight(word: str) -> float:
    return 1.0 if keyword.iskeyword(word) else 0.2


def _bleu4(guess: list[str], truth: list[str], weight: Callable[[str], float]) -> float:
    """Compute BLEU-4 of one text, 0 to 1; `weight` of unigrams."""
    if not guess or not truth:
        return 0.0
    logs = 0.0
    for n in (1, 2, 3, 4):
        of_guess, of_truth = (
            Counter(zip(*(x[i:] for i in range(n)), strict=False)) for x in (guess, truth)
        )
        weights = {gram: weight(gram[0]) if n == 1 else 1.0 for gram in of_guess}
        common = sum(c * weights[gram] for gram, c in (of_guess & of_truth).items())
        total = sum(c * weights[gram] for gram, c in of_guess.items())
        if n == 1 and not common:
            return 0.0
        logs += math.log((common or 0.1) / (total or 1.0)) if of_guess or of_truth else 0.0
    return _brevity(len(guess), len(truth)) * math.exp(logs / 4)


def leaked_identifiers(guess: str, truth: str) -> set[str]:
    """Return what the truth imports, and names of its variables and functions, that stand in the
    guess. Names of any Python text (`python_code.COMMON`) do not count; short ones do, which a
    blind guess often has: compare with what it leaks.
    """
    return python_code.defined(truth) & python_code.names(guess)


def identifier_leak(guess: str, truth: str) -> bool:
    """Return leak(y): whether an identifier of the truth stands in the guess."""
    return bool(leaked_identifiers(guess, truth))


# ---- tests that code passes


def pass_at(n: int, c: int, r: int) -> float:
    """Compute Pass@r of one prompt, 1 - C(n - c, r) / C(n, r), correctly rounded: n
    completions, c of them pass all tests. The paper has n = 2 r. ValueError unless 0 <= c <= n and
    1 <= r <= n.
    """
    if not (0 <= c <= n and 1 <= r <= n):
        raise ValueError(f"there is no Pass@{r} of {n} completions, {c} of which pass")
    return (math.comb(n, r) - math.comb(n - c, r)) / math.comb(n, r)


def fusi(passed_guess: Set[Hashable], passed_truth: Set[Hashable]) -> float:
    """Compute Eq. 1: of the unit tests that the truth passes, the share that the guess passes too.
    Sets of tests; running them is the caller's. ValueError where the truth passes none.
    """
    if not passed_truth:
        raise ValueError("the true code passes no test: Fusi is not defined")
    return len(passed_guess & passed_truth) / len(passed_truth)


# ---- who wins (§5.1, 5.2 of the paper): the best of all attempts counts


def wins_privacy(guesses: Iterable[str], truth: str) -> bool:
    """Return whether a guess reaches BLEU-1 of 20 or ROUGE-1 of 0.4."""
    return any(
        bleu1(guess, truth) >= BLEU_WINS or rouge1(guess, truth) >= ROUGE_WINS for guess in guesses
    )


def wins_confidentiality(guesses: Iterable[str], truth: str) -> bool:
    """Return whether a guess reaches CodeBLEU (here: `codebleu_like`) of 20."""
    return any(codebleu_like(guess, truth) >= CODEBLEU_WINS for guess in guesses)


def wins_functionality(passed: Iterable[Set[Hashable]], passed_truth: Set[Hashable]) -> bool:
    """Return whether a guess reaches Fusi above 0. passed: tests passed by each guess."""
    return any(fusi(one, passed_truth) > FUSI_ABOVE for one in passed)


@dataclass(frozen=True)
class SuccessRate:
    """ASR, over texts, with its 95 % interval (Wilson)."""

    wins: int
    texts: int

    @staticmethod
    def of(wins: Iterable[bool]) -> SuccessRate:
        outcomes = [bool(won) for won in wins]
        return SuccessRate(sum(outcomes), len(outcomes))

    @property
    def rate(self) -> float:
        return self.wins / self.texts

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.wins, self.texts)
