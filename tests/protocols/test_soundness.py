"""Whether activations stayed in range: zero or not, and no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocols.soundness import random_multiple, require_sound, sound
from spu_llm.errors import RangeError
from spu_llm.secure import SecureFunction, Simulation
from spu_llm.testing import Case
from spu_llm.values import CLIENT, PROVIDER, Owner
from tests.protocols.composed import ComposedContract


class TestRandomMultiple(ComposedContract):
    """Of zeros, whose multiples are known."""

    op = random_multiple
    fresh = True
    cases = [
        Case((np.zeros(5, np.int64),), (form,)) for form in ("arith", "degenerate", "provider")
    ]


def opened(simulation: Simulation, count: int) -> int:
    """What the client learns of a count that the provider has a part of."""
    function = SecureFunction(lambda a, b: sound(a + b), (Owner.CLIENT, Owner.PROVIDER), "sound")

    def program(session: Any) -> Any:
        mine = session.private(CLIENT, lambda: count - 3, (), np.int32)
        theirs = session.private(PROVIDER, lambda: 3, (), np.int32)
        return session.get(session.call(function, mine, theirs))

    found, nothing = simulation.run(program)
    assert nothing is None
    return int(found)


def test_zero_opens_as_zero_and_anything_else_as_noise(simulation: Simulation) -> None:
    assert opened(simulation, 0) == 0
    # Chance alone makes two of 2^32 words equal or one of them zero.
    found = [opened(simulation, count) for count in (1, 1, 6)]
    assert len({0, *found}) == 4


def test_the_client_ends_when_something_left_its_range() -> None:
    require_sound(np.array(0))
    require_sound(None)
    with pytest.raises(RangeError, match="left the range"):
        require_sound(np.array(-7))
