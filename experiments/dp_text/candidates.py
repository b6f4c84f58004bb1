"""How many candidates top-k+ gives, and how many tokens come from what it adds to the top k: table
12 of "InvisibleInk" (Vinod, Pillutla, Thakurta).

The paper calls the mean size of V_k+ the effective k. A token is *added* when its public logit lies
below the k-th largest, so that plain top-k could not have drawn it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from experiments.dp_text import metrics
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.mechanism import expanded_top_k
from spu_llm.systems.dp_text.methods import Method, Next


@dataclass
class Expansion:
    """Counts of each text: the size of V_k+ at every token, and the tokens drawn from what was
    added.
    """

    sizes: list[list[int]] = field(default_factory=list)
    added: list[int] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the mean over texts of both, each with half its interval."""
        return {
            "effective_k": metrics.mean([float(np.mean(of)) for of in self.sizes if of]),
            "added": metrics.mean(self.added),
        }


def counted(method: Method, expansion: Expansion) -> Method:
    """Return InvisibleInk's method with its candidates counted; the tokens are the same ones."""
    k, clip, batch = (method.facts[name] for name in ("top_k", "clip", "batch"))

    def begin(present: np.ndarray, prg: Prg) -> Next:
        draw = method.begin(present, prg)
        sizes: list[int] = []
        expansion.sizes.append(sizes)
        expansion.added.append(0)

        def token(public: np.ndarray, private: np.ndarray) -> int | None:
            drawn = draw(public, private)
            sizes.append(len(expanded_top_k(public, k, clip, batch)))
            expansion.added[-1] += drawn not in expanded_top_k(public, k, 0.0, batch)
            return drawn

        return token

    return replace(method, begin=begin)
