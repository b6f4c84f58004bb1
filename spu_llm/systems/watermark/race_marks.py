"""Marked without candidates: the noise of a race, from the n - 1 tokens before.

`protocols.verification.race` draws a token as argmax (z_j + g_j), g_j Gumbel noise of the client's
choice. With g_j a pseudorandom function of a key and the tokens before position j it is the exact
one-sample watermark: argmax_v log p_v - log(-log u_v) is Aaronson's argmax u_v^(1/p_v). The noise
is made from uniforms just as the race makes its own, so it has its distribution to the last bit,
and the text that of the model.

A row depends on tokens alone, so it is the same whenever it is asked for: drafts may use it, and
those that are rejected have changed nothing. Contexts that occurred before, in this text or in the
history, get noise from a private stream of the position instead: a second draw from the same noise
would depend on the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from protocols.verification.distribution import gumbel
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import Key, token_unit

TINY = 2.0**-53

Next = Callable[[np.ndarray, tuple[int, ...]], int]  # a token, from probabilities and text so far


def uniforms(key: Key, context: Sequence[int], vocab: int) -> np.ndarray:
    """Return the numbers in (0, 1), float64 [vocab], that follow from the tokens before (up to n -
    1).
    """
    return _inside(stream_of(key, context), vocab)


def stream_of(key: Key, context: Sequence[int]) -> Prg:
    return key.stream([token_unit(token) for token in context])


def _inside(stream: Prg, count: int) -> np.ndarray:
    return np.clip(stream.uniform((count,)), TINY, 1 - TINY)


def context_of(tokens: Sequence[int], ngram: int) -> tuple[int, ...]:
    """Return the n - 1 tokens at the end, fewer where there are not so many."""
    return tuple(tokens[max(0, len(tokens) - ngram + 1) :]) if ngram > 1 else ()


class MarkedNoise:
    """The rows of one text's noise. `history`: contexts of texts before, to which `finish` adds
    this one's. `private`: noise of contexts that were used.
    """

    def __init__(
        self, key: Key, ngram: int, vocab: int, history: History, private: Prg | None = None
    ) -> None:
        self._key, self._ngram, self._vocab = key, ngram, vocab
        self._history, self._private = history, private or Prg.from_os()

    def row(self, generated: Sequence[int]) -> np.ndarray:
        """Return the noise of the token after those generated so far, drafts included: float64
        [vocab].
        """
        # Both streams are begun, and one is used: the work says little of whether it is marked.
        marked = stream_of(self._key, context_of(generated, self._ngram))
        private = self._private.child(f"noise {len(generated)}")
        return gumbel(_inside(marked if self.fresh(generated) else private, self._vocab))

    def fresh(self, generated: Sequence[int]) -> bool:
        """Return whether the next token is marked."""
        if not self._history.on:
            return True
        context = context_of(generated, self._ngram)
        before = {context_of(generated[:i], self._ngram) for i in range(len(generated))}
        return context not in before and self._name(context) not in self._history

    def names(self, generated: Sequence[int], first: int, last: int) -> set[bytes]:
        """Return the names of the contexts that the tokens at places `first` to `last - 1` are
        drawn in, for the history.
        """
        return {self._name(context_of(generated[:i], self._ngram)) for i in range(first, last)}

    def finish(self, generated: Sequence[int]) -> None:
        """Add the contexts of a text that is done to the history. Call it before the text is shown
        to others.
        """
        self._history.add(self.names(generated, 0, len(generated) + 1))

    def _name(self, context: tuple[int, ...]) -> bytes:
        return self._key.seed([b"context", *(token_unit(token) for token in context)]).name


def scored(key: Key, tokens: Sequence[int], ngram: int) -> list[tuple[bytes, float]]:
    """Return, for every token, a name of its n-gram, and the number that it was drawn by if the
    text is marked; uniform otherwise. (A row of a larger vocabulary begins with the row of a
    smaller one.)
    """
    numbers = []
    for i, token in enumerate(tokens):
        context = context_of(tokens[:i], ngram)
        gram = [token_unit(t) for t in (*context, token)]
        numbers.append((key.seed(gram).name, float(uniforms(key, context, token + 1)[token])))
    return numbers


def race_text(
    distribution: Callable[[tuple[int, ...]], np.ndarray],
    noise: MarkedNoise,
    prompt: tuple[int, ...],
    max_tokens: int,
    ends: frozenset[int],
) -> tuple[tuple[int, ...], bool]:
    """Draw the tokens of a race with this noise, in the clear; return them, and whether the text
    ended. `distribution`: probabilities [vocab] after a text.
    """

    def token(p: np.ndarray, generated: tuple[int, ...]) -> int:
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(p) + noise.row(generated)))

    return marked_text(distribution, token, prompt, max_tokens, ends)


def marked_text(
    distribution: Callable[[tuple[int, ...]], np.ndarray],
    token: Next,
    prompt: tuple[int, ...],
    max_tokens: int,
    ends: frozenset[int],
) -> tuple[tuple[int, ...], bool]:
    """Write a text whose next token `token` chooses, from probabilities [vocab] and the text so
    far; return its tokens, and whether it ended. `distribution`: probabilities after a text.
    """
    generated: tuple[int, ...] = ()
    while len(generated) < max_tokens:
        chosen = token(distribution(prompt + generated), generated)
        if chosen in ends:
            return generated, True
        generated += (chosen,)
    return generated, False
