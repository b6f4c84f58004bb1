"""A session without a peer, which only records what secure functions take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from spu_llm.compiler.demand import Demand
from spu_llm.compiler.dry_run import DryRun
from spu_llm.compiler.plan import Plan
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.ledger import Ledger
from spu_llm.core.meter import Meter
from spu_llm.runtime.session import Session

T = TypeVar("T")


@dataclass(frozen=True)
class Noted:
    """A recorded call: of which function, by which plan, and what it takes."""

    function: SecureFunction
    plan: Plan
    demand: Demand


class DrySession:
    """A session for a driver's public course: the parties' inputs are shapes, and results are
    stand-ins.
    """

    def __init__(self, dry_run: DryRun) -> None:
        self.meter, self.ledger = Meter(), Ledger()
        self._dry_run = dry_run
        self._calls: list[Noted] = []

    def prepare(self, function: SecureFunction, *args: Any) -> None:
        """Do nothing: there is no peer to agree with."""

    def preprocess(self, function: SecureFunction, *args: Any) -> Demand:
        return Demand()

    def prefetch(self, course: Callable[[Session], None]) -> None:
        """Do nothing: a dry session makes no correlated randomness."""

    def stop_prefetching(self) -> None:
        """Do nothing: a dry session makes no correlated randomness."""

    def call(self, function: SecureFunction, *args: Any) -> Any:
        plan, out_tree = function.plan(*args)
        demand, results = self._dry_run.run(plan, jax.tree.leaves(args))
        self._calls.append(Noted(function, plan, demand))
        return jax.tree.unflatten(out_tree, results)

    def local(self, owner: int, work: Callable[..., T], *args: Any) -> T | None:
        return None

    def alone(self, owner: int, work: Callable[..., T], *args: Any) -> T | None:
        return None

    def private(
        self, owner: int, work: Callable[..., Any], shape: tuple[int, ...], dtype: Any, *args: Any
    ) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def get(self, value: Any) -> np.ndarray | None:
        return None

    def taken(self) -> list[Noted]:
        """Return all calls recorded since the last time, and forget them."""
        calls, self._calls = self._calls, []
        return calls

    def demand(self) -> Demand:
        """Return the demand of all calls since the last time, and forget them."""
        return sum((call.demand for call in self.taken()), Demand())
