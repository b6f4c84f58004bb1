"""One text from one batch of references: algorithm 1 of InvisibleInk, for whatever method draws.

What is public: the query, the model, all parameters, and the text as it grows. Its length is part
of what comes out, and what is charged for it is not: all T tokens are, always.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.family import ModelConfig
from spu_llm.core.errors import InputError
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.systems.dp_text.lanes import Lanes
from spu_llm.systems.dp_text.methods import Method, Next
from spu_llm.systems.dp_text.prompts import Prompts

# Of a text, where there is no other bound: each pass keeps its cache, and with so many terms sums
# are exact (`mechanism`).
MOST_PASSES, MOST_REFERENCES = 64, 1 << 15
# Of texts that go through the model together: how many, and the positions of all their lanes.
MOST_TOGETHER, MOST_POSITIONS = 16, 1 << 14


@dataclass(frozen=True)
class Made:
    """Token ids of a text, without the one that ends it; `ended`: by itself, not for length."""

    tokens: list[int]
    ended: bool


class Generator:
    """A method with a model, and the prompts of one query."""

    def __init__(
        self,
        method: Method,
        config: ModelConfig,
        weights: Any,
        prompts: Prompts,
        rooms: tuple[int, int] | None = None,
        at_once: int = 1,
    ) -> None:
        """Prepare the lanes of a method; weights: folded (`lanes.folded`). rooms: of the public
        prompt and of a private one, where others have longer ones, so that all share what is
        compiled. at_once: texts that go through the model together.
        """
        self.method, self.prompts, self.at_once, self.calls = method, prompts, at_once, 0
        self._config, self._weights = config, weights
        public, private = rooms or (len(prompts.public), prompts.room)
        # phi_pub comes from a forward of its own, in which no reference takes part.
        self._public = self.lanes(at_once, public, prompts.public[:-1])
        self._room = private
        # Of B references of each text, as many as a text has needed.
        self._private: list[Lanes] = []

    def lanes(self, count: int, room: int, begin: Sequence[int] = ()) -> Lanes:
        """Make `count` lanes of this model for prompts of `room` tokens at most, which begin alike
        and are the longer by one token at least.
        """
        new = self.method.max_new_tokens
        return Lanes(self._config, self._weights, count, room, new, begin)

    def text(
        self, references: Sequence[str], prg: Prg, on_token: Callable[[int], None] | None = None
    ) -> Made:
        """Generate a text of its references, as one of `texts`."""
        return self.texts([references], prg, on_token)[0]

    def texts(
        self,
        parts: Sequence[Sequence[str]],
        prg: Prg,
        on_token: Callable[[int], None] | None = None,
    ) -> list[Made]:
        """Generate a text of each part of the references, `at_once` texts at most; empty
        references, and those missing to a multiple of B, are null. A part may have more than B
        where the method takes them (`any_number`): B at a time go through the model then. Each
        text draws from a stream of its own. on_token hears how many tokens the texts have that are
        not at their end. calls: B + 1 for each token of each text, B more for each further pass.
        """
        method, size, most = self.method, self.method.batch, self.method.max_new_tokens
        ends = self.prompts.tokenizer.eos_ids
        if not 1 <= len(parts) <= self.at_once:
            raise ValueError(f"{len(parts)} texts where {self.at_once} go together")
        if any(len(part) > size for part in parts) and not method.any_number:
            raise ValueError(f"{max(map(len, parts))} references in a batch of {size}")
        passes = [batches(part, size) for part in parts]
        depth = max(1, *map(len, passes))
        drafts = [
            _Draft(method.begin(_present(part, depth * size), _own_stream(prg))) for part in parts
        ]
        public = self._public.begin([self.prompts.public] * self.at_once)
        lanes = self._lanes_of(depth) if method.reads else []
        private = [one.begin(self._rows(passes, number)) for number, one in enumerate(lanes)]
        length = 0
        while any(draft.made is None for draft in drafts):
            if length > 0:
                # A text that has ended keeps its lanes, which nobody reads.
                last = [draft.tokens[-1] if draft.tokens else 0 for draft in drafts]
                last += [0] * (self.at_once - len(drafts))
                public = self._public.step(last)
                private = [one.step(np.repeat(last, size)) for one in lanes]
            length += 1
            for i, draft in enumerate(drafts):
                if draft.made is None:
                    rows = [logits[i * size : (i + 1) * size] for logits in private]
                    draft.add(draft.next_token(public[i], self._stacked(rows)), ends, most)
                    self.calls += 1 + size * len(lanes)
            if on_token is not None and any(len(draft.tokens) == length for draft in drafts):
                on_token(length)
        for one in (self._public, *lanes):
            one.end()
        return [draft.made for draft in drafts if draft.made is not None]

    def _lanes_of(self, passes: int) -> list[Lanes]:
        count, before = self.at_once * self.method.batch, self.prompts.before[:-1]
        while len(self._private) < passes:
            self._private.append(self.lanes(count, self._room, before))
        return self._private[:passes]

    def _rows(self, passes: Sequence[Sequence[Sequence[str]]], number: int) -> list[list[int]]:
        """Return the prompts of one pass, B of each text, nulls where it has fewer passes."""
        some = [part[number] if number < len(part) else [] for part in passes]
        some += [[]] * (self.at_once - len(passes))
        return [row for part in some for row in self.prompts.lanes(part, self.method.batch)]

    def _stacked(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(rows) if rows else np.zeros((self.method.batch, 0), np.float32)


@dataclass
class _Draft:
    """A text as it grows; made: the whole one, once it has ended."""

    next_token: Next
    tokens: list[int] = field(default_factory=list)
    made: Made | None = None

    def add(self, token: int | None, ends: Collection[int], most: int) -> None:
        """Take the next token; None: the method gives no more."""
        if token is None or token in ends:
            self.made = Made(self.tokens, ended=token is not None)
            return
        self.tokens.append(token)
        if len(self.tokens) == most:
            self.made = Made(self.tokens, ended=False)


def _own_stream(prg: Prg) -> Prg:
    """Return a stream under the next words of `prg` as its key: no two texts share one."""
    return Prg(prg.words((KEY_BYTES // 8,)).tobytes())


def _present(references: Sequence[str], rows: int) -> np.ndarray:
    """Tell of each row whether it has a reference: bool [rows]."""
    present = np.zeros(rows, bool)
    present[: len(references)] = [bool(reference) for reference in references]
    return present


def together(method: Method, room: int, texts: int) -> int:
    """Return how many of so many texts go through the model together, with private prompts of
    `room` tokens: a product of more rows reads the weights once for all of them, but every lane
    keeps a cache. One where a text may have several passes, each with a cache of its own.
    """
    if method.any_number and method.reads:
        return 1
    lanes = method.batch + 1 if method.reads else 1
    return max(
        1, min(MOST_TOGETHER, texts, MOST_POSITIONS // (lanes * (room + method.max_new_tokens)))
    )


def batches(references: Sequence[str], batch: int) -> list[list[str]]:
    """Cut references into a fixed partition, by place in the file alone: reference j is in batch j
    // B. The last batch may be short; it is filled up with nulls.
    """
    return [list(references[i : i + batch]) for i in range(0, len(references), batch)]


def dealt(references: Sequence[str], texts: int, batch: int) -> list[list[str]]:
    """Deal references out to texts, each by its own words alone, so that all others stay where they
    are when one comes or goes. A text's list has multiples of B places, nulls among them: words say
    the text, and the place in B (the row of a forward, whose last bits may depend on it), where
    references follow one another in passes. InputError where a text gets too many.
    """
    places: dict[int, dict[int, list[str]]] = {}
    for reference in filter(None, references):  # an empty one is null
        data = reference.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(data, digest_size=16, person=b"dp text").digest()
        text, place = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
        places.setdefault(text % texts, {}).setdefault(place % batch, []).append(reference)
    most = min(MOST_PASSES * batch, MOST_REFERENCES)
    made = [_in_passes(places.get(text, {}), batch) for text in range(texts)]
    if (largest := max(map(len, made))) > most:
        raise InputError(
            f"a text would go through {largest // batch} passes of --batch references; give more "
            "--texts, or a larger --batch"
        )
    return made


def _in_passes(places: Mapping[int, Sequence[str]], batch: int) -> list[str]:
    """Return the references of each place, one pass after the other."""
    passes = max(map(len, places.values()), default=0)
    rows = [places.get(place, []) for place in range(batch)]
    return [row[i] if i < len(row) else "" for i in range(passes) for row in rows]
