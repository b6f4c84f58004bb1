"""One text from one batch of references: algorithm 1 of InvisibleInk, for whatever method draws.

What is public: the query, the model, all parameters, and the text as it grows. Its length is part
of what comes out, and what is charged for it is not: all T tokens are, always.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.family import ModelConfig
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.lanes import Lanes
from spu_llm.systems.dp_text.methods import Method
from spu_llm.systems.dp_text.prompts import Prompts

# Of a text, where there is no other bound: each pass keeps its cache, and with so many terms sums
# are exact (`mechanism`).
MOST_PASSES, MOST_REFERENCES = 64, 1 << 15


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
    ) -> None:
        """Prepare the lanes of a method; weights: folded (`lanes.folded`). rooms: of the public
        prompt and of a private one, where others have longer ones, so that all share what is
        compiled.
        """
        self.method, self.prompts = method, prompts
        self._config, self._weights = config, weights
        public, private = rooms or (len(prompts.public), prompts.room)
        # phi_pub comes from a forward of its own, in which no reference takes part.
        self._public = self.lanes(1, public)
        self._room = private
        self._private: list[Lanes] = []  # of B references each, as many as a text has needed

    @property
    def calls(self) -> int:
        """Return the number of next-token evaluations of the model so far: B + 1 a token, B more
        for each further pass.
        """
        return self._public.calls + sum(lanes.calls for lanes in self._private)

    def lanes(self, count: int, room: int) -> Lanes:
        """Make `count` lanes of this model for prompts of `room` tokens at most."""
        return Lanes(self._config, self._weights, count, room, self.method.max_new_tokens)

    def text(
        self, references: Sequence[str], prg: Prg, on_token: Callable[[int], None] | None = None
    ) -> Made:
        """Generate a text of its references; empty ones, and those missing to a multiple of B, are
        null. There may be more than B where the method takes them (`any_number`): B at a time go
        through the model then. on_token hears how many tokens there are.
        """
        method = self.method
        if len(references) > method.batch and not method.any_number:
            raise ValueError(f"{len(references)} references in a batch of {method.batch}")
        passes = batches(references, method.batch) or [[]]
        present = np.zeros(len(passes) * method.batch, bool)
        present[: len(references)] = [bool(reference) for reference in references]
        next_token = method.begin(present, prg)
        made: list[int] = []
        public = self._public.begin([self.prompts.public])
        lanes = self._lanes_of(passes) if method.reads else []
        rows = [self.prompts.lanes(some, method.batch) for some in passes]
        private = self._stacked([one.begin(row) for one, row in zip(lanes, rows, strict=False)])
        while True:
            token = next_token(public[0], private)
            if token is None or token in self.prompts.tokenizer.eos_ids:
                return Made(made, token is not None)
            made.append(token)
            if on_token is not None:
                on_token(len(made))
            if len(made) == method.max_new_tokens:
                return Made(made, False)
            public = self._public.step(token)
            private = self._stacked([one.step(token) for one in lanes])

    def _lanes_of(self, passes: Sequence[Sequence[str]]) -> list[Lanes]:
        missing = len(passes) - len(self._private)
        self._private += [self.lanes(self.method.batch, self._room) for _ in range(missing)]
        return self._private[: len(passes)]

    def _stacked(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(rows) if rows else np.zeros((self.method.batch, 0), np.float32)


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
