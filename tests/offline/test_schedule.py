"""What to make next, by hand and by its properties."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from spu_llm.compiler.demand import CorrelationRequest
from spu_llm.offline.schedule import batches, lacking
from tests.kit.dealing import CORRELATIONS, TRIPLE


def test_only_what_is_not_there_is_made() -> None:
    """Three of five triples are there; two are one batch of 16."""
    (one,) = lacking([CorrelationRequest(TRIPLE, 5)], lambda correlation: 3)
    assert (one.correlation, one.units) == (TRIPLE, 2)
    assert TRIPLE.chunk == 16 and batches([one]) == 1
    assert lacking([CorrelationRequest(TRIPLE, 5)], lambda correlation: 5) == []
    assert batches([CorrelationRequest(TRIPLE, 17)]) == 2 and batches([]) == 0


@given(
    st.lists(st.tuples(st.sampled_from(CORRELATIONS), st.integers(0, 100)), max_size=5), st.data()
)
def test_what_is_there_and_what_lacks_are_what_is_asked_for(
    asked: list, data: st.DataObject
) -> None:
    stock = {kind.name: data.draw(st.integers(0, 100)) for kind, _ in asked}
    requests = [CorrelationRequest(kind, units) for kind, units in asked]
    missing = lacking(requests, lambda correlation: stock[correlation.name])
    wanted = [max(0, one.units - stock[one.correlation.name]) for one in requests]
    assert [one.units for one in missing] == [units for units in wanted if units]
    assert batches(missing) == sum(math.ceil(one.units / one.correlation.chunk) for one in missing)
