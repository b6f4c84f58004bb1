"""Random transfers of a session, and how often they are extended.

A correlation that takes transfers takes a number of them from each direction
(`Correlation.transfers`); one extension makes equally many for both. What is left of one direction
when the other one's are used up is kept up to a number (`spu_llm.offline.ot.transfers`), so the
direction that more is taken of says how many extensions are made.
"""

from __future__ import annotations

import math

from protocols.bits.compare import leaf
from protocols.bits.gates import correlation
from spu_llm.core.correlation import Correlation
from spu_llm.offline.ot.code import PARAMETERS
from spu_llm.runtime.party_session import PartySession


def extensions(one: Correlation, units: float) -> float:
    """Return how many extensions so many units of a correlation use up."""
    return units * max(one.transfers) / PARAMETERS.serving


def extend(session: PartySession, count: int) -> None:
    """Make as many batches of a gate as use up `count` extensions."""
    gate = correlation(leaf(root=False))
    batches = math.ceil(count / extensions(gate, gate.chunk))
    there = session.preprocessing.available(gate)
    session.preprocessing.prepare(gate, there + batches * gate.chunk)
