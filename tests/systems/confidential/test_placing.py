"""Where a prompt stands among fakes that somebody else has made."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from spu_llm.systems.confidential.placing import place_of, placed

KEYS = st.binary(min_size=32, max_size=32)


@given(KEYS, st.text(max_size=20), st.lists(st.integers(), min_size=1, max_size=9), st.data())
def test_the_prompt_is_where_its_user_looks(
    key: bytes, prompt: str, rows: list[int], data: st.DataObject
) -> None:
    own = data.draw(st.integers(0, len(rows) - 1))
    rows = [*range(len(rows))]
    actual = placed(key, prompt, rows, own)
    assert sorted(actual) == rows and actual[place_of(key, prompt, len(rows))] == own
    assert placed(key, prompt, rows, own) == actual  # asked the same again


def test_places_and_orders_are_uniform_and_of_each_prompt() -> None:
    """Chi-square with 24 - 1 degrees of freedom is above 49.7 by chance in 1 of 1,000."""
    key, prompts = bytes(range(32)), [f"prompt {i}" for i in range(2400)]
    orders = Counter(tuple(placed(key, prompt, [0, 1, 2, 3], 2)) for prompt in prompts)
    assert sum((orders[o] - 100) ** 2 / 100 for o in orders) + 100 * (24 - len(orders)) < 49.7
    places = Counter(place_of(key, prompt, 4) for prompt in prompts)
    assert all(500 < places[place] < 700 for place in range(4))  # 5 deviations
    other = [place_of(bytes(32), prompt, 4) for prompt in prompts]
    same = sum(a == place_of(key, p, 4) for a, p in zip(other, prompts, strict=True))
    assert 500 < same < 700
