"""A party's session in which calls may make nothing, and what they take is recorded."""

from __future__ import annotations

from collections import Counter
from typing import Any

from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.correlation import Correlation, Correlations
from spu_llm.core.integers import Factor
from spu_llm.runtime.party_session import PartySession


class Watched:
    """`session`, whose calls find in the pool all that they take, or fail."""

    def __init__(self, session: PartySession) -> None:
        self._session = session
        self.units: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def call(self, function: SecureFunction, *args: Any) -> Any:
        with self._session.supplied_by(self):
            return self._session.call(function, *args)

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        self.units[correlation.name] += units
        assert self._session.preprocessing.available(correlation) >= units
        return self._session.preprocessing.take(correlation, units, fixed)
