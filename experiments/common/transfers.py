"""SPU's stocks of oblivious transfers, and which batches of correlations extend them.

SPU has a stock of correlated transfers for each direction. A correlation that needs transfers takes
equally many from both stocks; where it does not, both count as the larger number
(`Correlation.transfers`). A stock that runs out is extended in the middle of a batch, by Ferret
(CCS'20, figure 9) with the parameters of SPU's YACL_Ferret: n = 10,485,760 transfers from t = 1,280
noisy positions, a message each, and k = 452,000 transfers of the stock before. The messages go one
way and are not awaited.
"""

from __future__ import annotations

import math

from protocols.bits.compare import leaf
from protocols.bits.gates import correlation
from spu_llm.runtime.party_session import PartySession

_POSITIONS, _DEPTH = 1280, 13  # a tree of so many levels, which takes a transfer each, per position
_MESSAGES = _POSITIONS + 1  # and the seed of the code
STOCK = 10_485_760 - (452_000 + _DEPTH * _POSITIONS)  # what an extension leaves for others


def stocks_extended(messages: int) -> int:
    """Return how many of both stocks (0 to 2) were extended by a batch with so many messages."""
    return messages // _MESSAGES


def extend(session: PartySession, count: int) -> None:
    """Make as many batches of a gate as extend both stocks `count` times."""
    gate = correlation(leaf(root=False))
    batches = math.ceil(count * STOCK / (gate.chunk * gate.transfers))
    there = session.preprocessing.available(gate)
    session.preprocessing.prepare(gate, there + batches * gate.chunk)
