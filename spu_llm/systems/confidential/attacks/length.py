"""What lengths tell: of a prompt, and of the text after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Lengths(NamedTuple):
    """In tokens. generated: None where it is not looked at."""

    prompt: int
    generated: int | None = None


def guess(seen: Lengths, candidates: Sequence[Lengths], source: np.random.Generator) -> int:
    """Which candidate it was: one of those nearest by the prompt's length, of these one of the
    nearest by what was generated.
    """
    left = list(range(len(candidates)))
    for field in Lengths._fields:
        wanted = getattr(seen, field)
        if wanted is not None:
            away = {i: abs(getattr(candidates[i], field) - wanted) for i in left}
            left = [i for i in left if away[i] == min(away.values())]
    return int(source.choice(left))
