"""One text from one batch of references: algorithm 1 of InvisibleInk, for whatever method draws.

What is public: the query, the model, all parameters, and the text as it grows. Its length is part
of what comes out, and what is charged for it is not: all T tokens are, always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.family import ModelConfig
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.lanes import Lanes
from spu_llm.systems.dp_text.methods import Method
from spu_llm.systems.dp_text.prompts import Prompts


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
        self._private = self.lanes(method.batch, private) if method.reads else None
        self._none = np.zeros((method.batch, 0), np.float32)

    @property
    def calls(self) -> int:
        """Return the number of next-token evaluations of the model so far: B + 1 a token."""
        return self._public.calls + (self._private.calls if self._private else 0)

    def lanes(self, count: int, room: int) -> Lanes:
        """Make `count` lanes of this model for prompts of `room` tokens at most."""
        return Lanes(self._config, self._weights, count, room, self.method.max_new_tokens)

    def text(
        self, references: Sequence[str], prg: Prg, on_token: Callable[[int], None] | None = None
    ) -> Made:
        """Generate a text of up to B references; empty ones, and those missing to B, are null.
        on_token hears how many tokens there are.
        """
        method = self.method
        if len(references) > method.batch:
            raise ValueError(f"{len(references)} references in a batch of {method.batch}")
        present = np.zeros(method.batch, bool)
        present[: len(references)] = [bool(reference) for reference in references]
        next_token = method.begin(present, prg)
        made: list[int] = []
        public = self._public.begin([self.prompts.public])
        private = self._none
        if self._private:
            private = self._private.begin(self.prompts.lanes(references, method.batch))
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
            if self._private:
                private = self._private.step(token)


def batches(references: Sequence[str], batch: int) -> list[list[str]]:
    """Cut references into a fixed partition, by place in the file alone: reference j is in batch j
    // B. The last batch may be short; it is filled up with nulls.
    """
    return [list(references[i : i + batch]) for i in range(0, len(references), batch)]
