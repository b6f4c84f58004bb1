"""What lengths tell: of a prompt, and of the text after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Lengths(NamedTuple):
    """The lengths of a prompt and of the text after it, in tokens."""

    prompt: int
    generated: int = 0


def guess(
    seen: Lengths,
    candidates: Sequence[Lengths],
    source: np.random.Generator,
    fields: Sequence[str] = Lengths._fields,
) -> int:
    """Guess which candidate it was: of those nearest by the first of these fields one of the
    nearest by the next; `source` decides between equal ones.
    """
    left = list(range(len(candidates)))
    for field in fields:
        away = {i: abs(getattr(candidates[i], field) - getattr(seen, field)) for i in left}
        left = [i for i in left if away[i] == min(away.values())]
    return int(source.choice(left))
