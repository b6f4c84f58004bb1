"""What to make next: pure functions of what is asked for and what is there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from spu_llm.compiler.demand import CorrelationRequest
from spu_llm.core.correlation import Correlation


def lacking(
    requests: Iterable[CorrelationRequest], available: Callable[[Correlation], int]
) -> list[CorrelationRequest]:
    """Return what is asked for and not there, in the same order. available: units that are."""
    missing = [replace(one, units=one.units - available(one.correlation)) for one in requests]
    return [one for one in missing if one.units > 0]


def batches(requests: Sequence[CorrelationRequest]) -> int:
    """Return how many batches, of one chunk each, make what is asked for; positions that are the
    last ones under a key may take one more.
    """
    return sum(math.ceil(one.units / one.correlation.chunk) for one in requests)
