"""What calls of secure functions take and cost: the result of a dry run (`dry_run`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import PoolError
from spu_llm.core.integers import Factor, equal
from spu_llm.core.op import Cost


@dataclass(frozen=True)
class CorrelationRequest:
    """A request for units of one correlation. `fixed`: the provider's matrix that the units are
    bound to; known at the provider alone, and only where a dry run has seen it.
    """

    correlation: Correlation
    units: int
    fixed: Factor | None = None


@dataclass(frozen=True)
class Call:
    """A call of an op: its name, its name scope in the program, and its exact price.

    At this party also: what the call takes, the correlations that keep other calls from running
    beside it (`names`), and its messages in their order: whether it sends them, and their bytes.
    """

    op: str
    scope: str
    cost: Cost
    taken: tuple[CorrelationRequest, ...] = field(default=(), compare=False)
    names: frozenset[str] = field(default=frozenset(), compare=False)
    messages: tuple[tuple[bool, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Demand:
    """The preprocessing that some calls of secure functions need: correlated randomness by name of
    correlation, in the order of first use, and the ops that run.
    """

    correlations: dict[str, CorrelationRequest] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()

    @staticmethod
    def of(taken: Iterable[CorrelationRequest], calls: Iterable[Call] = ()) -> Demand:
        """Sum up `taken` by name of correlation; PoolError when one name is bound to two
        matrices.
        """
        total: dict[str, CorrelationRequest] = {}
        for need in taken:
            name = need.correlation.name
            before = total.get(name, CorrelationRequest(need.correlation, 0))
            fixed = need.fixed if before.fixed is None else before.fixed
            if need.fixed is not None and not equal(fixed, need.fixed):
                raise PoolError(f"{name} is asked for with other weights than before")
            total[name] = CorrelationRequest(need.correlation, before.units + need.units, fixed)
        return Demand(total, tuple(calls))

    def __add__(self, other: Demand) -> Demand:
        """Return the demand of this one's calls followed by the other's."""
        needs = [*self.correlations.values(), *other.correlations.values()]
        return Demand.of(needs, self.calls + other.calls)

    @property
    def unbound(self) -> Demand:
        """Return the demand without correlated randomness that is bound to weights: what a pool
        keeps.
        """
        kept = {name: n for name, n in self.correlations.items() if n.correlation.fixed is None}
        return Demand(kept, self.calls)

    @property
    def cost(self) -> Cost:
        """Return the online price of the ops, one after the other."""
        return sum((call.cost for call in self.calls), Cost())
