"""The candidates of one token, as both forms of the two-party draw have them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocols.dp.choice import Choice
from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.mechanism import expanded_top_k, sanitised
from spu_llm.systems.dp_text.secure_records import TextRequest


@dataclass(frozen=True)
class Candidates:
    """tokens: V_k+, or the likeliest of it, int64 [m]. at: the place of each, [m]. public: phi_pub
    in units, and base: B times what it is below the largest, int32 [places]; places that hold no
    candidate never win.
    """

    tokens: np.ndarray
    at: np.ndarray
    public: np.ndarray
    base: np.ndarray

    @staticmethod
    def of(
        logits: np.ndarray, request: TextRequest, choice: Choice, order: Prg | None = None
    ) -> Candidates:
        """Make the candidates of phi_pub [vocab]; a function of it alone, but for the order, which
        is uniform under `order` (None: ascending).
        """
        tokens = expanded_top_k(logits, request.top_k, request.clip, request.batch)
        held = sanitised(logits)[tokens]
        if len(tokens) > request.places:
            # The largest, of equal ones the first.
            kept = np.sort(np.argsort(-held, kind="stable")[: request.places])
            tokens, held = tokens[kept], held[kept]
        units, base = choice.quantised(np.clip(held, -4000.0, 4000.0), request.places)
        places = np.arange(request.places)
        if order is not None:
            places = _permutation(order, request.places)
        public, scores = np.zeros_like(units), np.zeros_like(base)
        public[places], scores[places] = units, base
        return Candidates(tokens, places[: len(tokens)], public, scores)

    def token(self, place: int) -> int:
        """Return the token at a place; WireError for a place without one."""
        places = np.flatnonzero(self.at == place)
        if len(places) != 1:
            raise WireError(f"place {place} won, at which no candidate stands")
        return int(self.tokens[places[0]])


def _permutation(stream: Prg, n: int) -> np.ndarray:
    """Draw a uniform permutation: by 64-bit keys, anew in the rare case that two are equal."""
    while True:
        keys = stream.words((n,))
        if len(np.unique(keys)) == n:
            return np.argsort(keys)
