"""How much is made ahead of time: as much as there is room for on the disk."""

from __future__ import annotations

import pytest

from spu_llm.compiler.demand import CorrelationRequest, Demand
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.offline.pool import Pool
from spu_llm.systems.decoding.preparation import demands_within, growth_bytes
from tests.kit.dealing import GATE, TRIPLE, refuses

POOL = Pool(CLIENT, Prg.from_os(), refuses)
TRIPLES, GATES = (POOL.growth_bytes(kind, 1) for kind in (TRIPLE, GATE))  # bytes of a batch
PREFILL = Demand.of([CorrelationRequest(TRIPLE, 20)])
STEP = Demand.of([CorrelationRequest(TRIPLE, 10), CorrelationRequest(GATE, 5)])
# Batches that it takes, of 16 triples and of 11 gates: 2 and 0, 2 and 1, 3 and 1, 4 and 2.
COURSE = [PREFILL, STEP, STEP, STEP]


@pytest.mark.parametrize(
    ("room", "count"),
    [
        (None, 4),
        (4 * TRIPLES + 2 * GATES, 4),
        (4 * TRIPLES + 2 * GATES - 1, 3),
        (3 * TRIPLES + GATES, 3),
        (3 * TRIPLES + GATES - 1, 2),
        (2 * TRIPLES + GATES, 2),
        (2 * TRIPLES + GATES - 1, 0),  # the prefill alone would fit
        (0, 0),
    ],
)
def test_steps_that_there_is_room_for(room: int | None, count: int) -> None:
    assert demands_within(POOL, COURSE, room) == count


def test_a_prefill_may_be_all_that_is_asked_for() -> None:
    assert demands_within(POOL, COURSE[:1], 2 * TRIPLES) == 1
    assert demands_within(POOL, COURSE[:1], 2 * TRIPLES - 1) == 0


def test_growth_is_that_of_all_kinds() -> None:
    assert growth_bytes(POOL, PREFILL + STEP) == 2 * TRIPLES + GATES
    assert growth_bytes(POOL, Demand()) == 0
