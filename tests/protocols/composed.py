"""The contract of ops, and cases of ops, that are made of others under contract themselves."""

from __future__ import annotations

import pytest

from spu_llm.testing import OpContract


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
