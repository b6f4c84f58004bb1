"""Ops, and cases of ops, that are made of others under contract themselves: their contract, and
calls one after the other as one op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spu_llm.core.op import Cost, ProtocolOp, View, protocol_op
from spu_llm.core.values import Owner
from spu_llm.testing import OpContract


def calls(name: str, two_party: Callable[..., Any]) -> ProtocolOp:
    """Return the op that runs two_party(party, input) and gives its results, which are shares, for
    `run_op` alone: what it costs is not said, nor how it is simulated.
    """
    return protocol_op(
        name,
        reference=lambda x: x,
        two_party=two_party,
        owners=lambda x: [Owner.JOINT],
        cost=lambda x: Cost(),
        simulate=lambda *_: View([], []),
    )


class ComposedContract(OpContract):
    """Its views are compared in `make test-all` alone: they have many columns, and every message in
    them is one that the parts' own contracts look at.
    """

    @pytest.mark.slow
    def test_views_are_simulated(self) -> None:
        super().test_views_are_simulated()

    @pytest.mark.slow
    def test_views_do_not_depend_on_the_secret(self) -> None:
        super().test_views_do_not_depend_on_the_secret()

    @pytest.mark.slow
    def test_broken_twins_are_caught(self) -> None:
        super().test_broken_twins_are_caught()
