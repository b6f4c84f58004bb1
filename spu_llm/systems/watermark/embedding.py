"""Marked text from any sampler: Watermark and WatermarkRecursive (§2.1, §2.6), chunk by chunk.

A chunk is one of m candidates of up to k tokens. With several keys K_1, ..., K_t there are m^t, all
drawn at once, which is the same distribution (`selecting.Chooser`). With k = 1 and a sampler whose
distribution is known (`m` None), every token of the vocabulary is a candidate and its probability
is its count: the limit of many candidates, Aaronson's rule on n-grams that end with the token.

N-grams go over what was generated, never into the prompt, which a detector does not know. The
history keeps a seed from deciding twice, also in a run that goes on where another was cut short:
what had decided until then is in it, so the text goes on with n-grams that never did. Those that
would reach from the second run's text into the first's are not marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from models.stops import NONE, Stops
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import Key, Scheme, check_keys, token_unit
from spu_llm.systems.watermark.model_sampler import ModelSampler
from spu_llm.systems.watermark.sampler import Drawn, Sampler
from spu_llm.systems.watermark.selecting import Chooser, Chunk, choose
from spu_llm.systems.watermark.units import Content, Units, joined

MAX_CANDIDATES = 4096


@dataclass
class Made:
    """Generated text. `reason` why it ends: eos, stop, length, or cut where the sampler failed or
    the run was interrupted.
    """

    content: Content
    reason: str = "cut"
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Embedder:
    """Marks whatever a sampler writes. `m`: candidates a chunk and key, None: all (k = 1 alone)."""

    keys: tuple[Key, ...]
    scheme: Scheme
    sampler: Sampler
    units: Units
    m: int | None = 16
    k: int = 1
    histories: tuple[History, ...] = ()  # one a key; none given: of the texts made here
    prg: Prg = field(default_factory=Prg.from_os)

    def __post_init__(self) -> None:
        check_keys(self.keys)
        self.histories = self.histories or tuple(History() for _ in self.keys)
        if self.k < 1:
            raise InputError(f"a chunk has 1 token or more, found {self.k}")
        if self.m is None:
            known = isinstance(self.sampler, ModelSampler) and self.scheme.units == "tokens"
            if self.k != 1 or len(self.keys) > 1 or not known:
                raise InputError(
                    "all candidates are known of a model's next token alone: chunks of 1, one key, "
                    "units that are tokens"
                )
        elif self.m < 1 or self.m ** len(self.keys) > MAX_CANDIDATES:
            raise InputError(
                f"there are 1 to {MAX_CANDIDATES} candidates, of all keys together, found {self.m} "
                f"for each of {len(self.keys)}"
            )

    def text(
        self,
        prompt: Content,
        max_tokens: int,
        stops: Stops = NONE,
        as_text: Callable[[Content], str] | None = None,
        on_chunk: Callable[[Content], None] = lambda content: None,
        made: Made | None = None,
    ) -> Made:
        """Return what follows the prompt. max_tokens: the sampler's own, k to a chunk; a chunk that
        ends early is charged in full where only text comes back. It ends before the first of
        `stops`; `as_text` says where, of tokens. `made`, an empty one, is filled chunk by chunk, so
        that who gives it has what was written when the sampler fails.
        """
        made = made or Made(prompt[:0])
        left = max_tokens
        while left > 0:
            drawn, chunk = self.chunk(prompt, made.content, min(self.k, left))
            made.content = joined(made.content, drawn.content)
            made.chunks.append(chunk)
            left -= len(drawn.content) if not isinstance(drawn.content, str) else self.k
            if stops.texts and _cut_at(made, stops, as_text):
                made.reason = "stop"
                break
            if drawn.ended or not drawn.content:
                made.reason = "eos"
                break
            on_chunk(made.content)
        else:
            made.reason = "length"
        return made

    def chunk(self, prompt: Content, before: Content, count: int) -> tuple[Drawn, Chunk]:
        """Draw the next chunk after what was generated before, of up to `count` tokens."""
        prefix = joined(prompt, before)
        if self.m is None:
            return self._of_all(prefix, before)
        return self.chosen(self.sampler.sample(prefix, self.m ** len(self.keys), count), before)

    def chosen(self, drawn: Sequence[Drawn], before: Content) -> tuple[Drawn, Chunk]:
        """Choose the next chunk among m^t candidates that were drawn after what was generated
        before.
        """
        assert self.m is not None
        chooser = Chooser(self.keys, self.scheme, self.units, self.m, self.histories, self.prg)
        winner, chunk, _ = chooser.chosen(drawn, before)
        return winner, chunk

    def _of_all(self, prefix: Content, before: Content) -> tuple[Drawn, Chunk]:
        assert isinstance(self.sampler, ModelSampler)
        p = self.sampler.distribution(prefix)
        possible = np.flatnonzero(p)
        head = tuple(self.units.of(before))[max(0, len(before) - self.scheme.ngram + 1) :]
        choice = choose(
            self.keys[0],
            [[(*head, token_unit(int(token)))] for token in possible],
            p[possible].tolist(),
            self.scheme.family,
            self.prg,
            self.histories[0],
        )
        self.histories[0].add(choice.used)
        token = int(possible[choice.index])
        ended = token in self.sampler.ends
        drawn = Drawn(() if ended else (token,), ended)
        return drawn, Chunk(len(possible), (choice.seeds,))


def _cut_at(made: Made, stops: Stops, as_text: Callable[[Content], str] | None) -> bool:
    """Cut what was made before the first stop in it, tokens where the text with them has none yet;
    return whether there was one.
    """
    content = made.content
    if isinstance(content, str):
        at = stops.first_in(content)
        made.content = content[:at]
        return at is not None
    named = next((i for i, token in enumerate(content) if token in stops.tokens), None)
    kept = content[:named]
    at = stops.first_in((as_text or _no_text)(kept)) if stops.texts else None
    while at is not None and kept and len((as_text or _no_text)(kept)) > at:
        kept = kept[:-1]
    made.content = kept
    return named is not None or at is not None


def _no_text(content: Content) -> str:
    raise ValueError("stops of tokens need as_text")
