"""What a call of a secure function takes from the pool, and what its ops cost, without running it.

A dry run walks the plan at one party with a peer that says nothing: shares and messages are zeros,
of the sizes that the real ones have. Every op runs its own two-party code on them, so that nothing
else has to know what an op takes. The pool hands out zeros and records what is asked of it.

Nothing here depends on a secret: sizes follow from the plan, public values, and the state of shares
that have one (which rows of a cache are open). The client's inputs are left out, and the provider's
are looked at only where material is bound to them. Both parties find the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spu_llm.compiler.demand import Call, Demand, Need, by_name
from spu_llm.compiler.linear import has_numbers_in_bits
from spu_llm.compiler.plan import OpCall, Plan, Run
from spu_llm.compiler.walker import walk_plan
from spu_llm.core._jax import shape_of
from spu_llm.core.correlation import Correlation, Material
from spu_llm.core.integers import Factor
from spu_llm.core.ledger import Ledger, element_bits, opening_bytes
from spu_llm.core.op import Cost
from spu_llm.core.party import Party
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.core.values import (
    PROVIDER,
    Arith,
    Bool,
    Owner,
    Private,
    Public,
    Stateful,
    Value,
    fork,
    frac_bits_of,
    public,
)


class _Source:
    """A pool that hands out zeros and records what is taken."""

    def __init__(self) -> None:
        self.taken: list[Need] = []

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Material:
        self.taken.append(Need(correlation, units, fixed))
        zeros = [
            [np.zeros((units, *part.shape), np.uint64) for part in parts]
            for parts in (correlation.masks, correlation.results)
        ]
        return Material(*zeros)


class _Silence:
    """A channel to nobody; each message that comes is zeros, of the size that is expected. `heard`
    has them all in order: whether they are sent from here, and their sizes.
    """

    def __init__(self) -> None:
        self.expected = 0
        self.heard: list[tuple[bool, int]] = []

    def send(self, data: bytes) -> None:
        self.heard.append((True, len(data)))

    def recv(self) -> bytes:
        self.heard.append((False, self.expected))
        return bytes(self.expected)


@dataclass
class _Alone(Party):
    """A party whose peer says nothing."""

    def recv_bytes(self, shape: tuple[int, ...]) -> np.ndarray:
        self._expect(math.prod(shape))
        return super().recv_bytes(shape)

    def open(self, value: Value, to: Owner, label: str) -> Public | Private:
        self._expect(opening_bytes(math.prod(value.shape), element_bits(value)))
        return super().open(value, to, label)

    def _expect(self, size: int) -> None:
        assert isinstance(self.channel, _Silence)
        self.channel.expected = size


@dataclass(frozen=True)
class _Known:
    """What a variable stands for. `certain`: its real content, where this party has it."""

    value: Value
    certain: bool


@dataclass(frozen=True)
class _Result:
    """Of a step on values of some form. `bound_to`: digests of the provider's inputs, where
    material is bound to them; the result holds for no others.
    """

    values: list[Value]
    taken: list[Need] = field(default_factory=list)
    cost: Cost = Cost()
    messages: tuple[tuple[bool, int], ...] = ()
    bound_to: tuple[str, ...] = ()

    def holds_for(self, values: Sequence[Value]) -> bool:
        return not self.bound_to or self.bound_to == _digests(values)


class DryRun:
    """Dry runs of one party's session. What it has found of a step is kept: forms and shapes
    decide, and the weights that material is bound to.

    run_local(run, values): a local run on this party's values, as in the session.
    """

    def __init__(
        self, rank: int, frac_bits: int, run_local: Callable[[Run, Sequence[Value]], list[Value]]
    ) -> None:
        self._rank, self._frac_bits, self._run_local = rank, frac_bits, run_local
        self._found: dict[Hashable, _Result] = {}

    def run(self, plan: Plan, inputs: Sequence[Any]) -> tuple[Demand, list[Value]]:
        """Needs of one call, and stand-ins for its results: inputs of the next dry run.

        inputs: values, or shapes with a dtype. They stay as they are.
        """
        taken: list[Need] = []
        made: list[Call] = []

        def run(step: Run, operands: list[_Known]) -> list[_Known]:
            certain = all(x.certain for x in operands)
            result = self._work(step, [x.value for x in operands], certain)
            return [_Known(v, certain and _is_plaintext(step)) for v in result.values]

        def op(call: OpCall, operands: list[_Known]) -> list[_Known]:
            values = [x.value for x in operands]
            result = self._op(call, operands)
            taken.extend(result.taken)
            stateful = any(isinstance(v, Stateful) for v in values)
            names = self.names(call, values) if stateful else _names(result.taken)
            here = tuple(result.taken), names, result.messages
            made.append(Call(call.op.name, call.scope, result.cost, *here))
            return [_Known(v, False) for v in result.values]

        def ops(calls: list[OpCall], operands: list[list[_Known]]) -> list[list[_Known]]:
            return [op(*call) for call in zip(calls, operands, strict=True)]

        stand_ins = self._stand_ins(plan, inputs)
        outputs = walk_plan(plan, stand_ins, lambda x: _Known(public(x), True), run, ops)
        return Demand(by_name(taken), tuple(made)), [x.value for x in outputs]

    def names(self, call: OpCall, values: Sequence[Value]) -> frozenset[str]:
        """The correlations of one call, by name: for a value with state, those that it takes units
        of at some time, so that no other call with it runs beside this one.
        """
        plain = [v.plain() if isinstance(v, Stateful) else v for v in values]
        return _names(self._op(call, [_Known(v, True) for v in plain]).taken)

    def takes(self, call: OpCall, values: Sequence[Value]) -> list[Need]:
        """What one call with these values takes, as their state is now."""
        return self._op(call, [_Known(v, True) for v in fork(values)]).taken

    def _stand_ins(self, plan: Plan, inputs: Sequence[Any]) -> list[_Known]:
        """Inputs without the client's content, and with forks of their states."""
        made: list[_Known] = []
        for var, owner, x in zip(plan.inputs, plan.input_owners, fork(inputs), strict=True):
            value: Value
            if isinstance(x, Stateful):
                assert isinstance(x, Arith | Bool)
                value = x
            elif isinstance(x, Arith | Bool):
                value = _blank(x)
            elif _has_content(x) or (isinstance(x, Private) and x.owner != self._rank):
                value = x
            else:
                value = self._zeros(owner, shape_of(var).shape, shape_of(var).dtype)
            made.append(_Known(value, _has_content(x)))
        return made

    def _zeros(self, owner: Owner, shape: tuple[int, ...], dtype: Any) -> Value:
        dtype = np.dtype(dtype)
        if owner is Owner.JOINT:
            words = np.zeros(shape, np.uint64)
            if dtype == np.bool_:
                return Bool(words, dtype, 0, 1)
            return Arith(words, dtype, frac_bits_of(dtype, self._frac_bits))
        if owner is Owner.PUBLIC:
            return Public(np.zeros(shape, dtype))
        holds = owner.rank == self._rank
        return Private(owner.rank, shape, dtype, np.zeros(shape, dtype) if holds else None)

    def _op(self, call: OpCall, operands: Sequence[_Known]) -> _Result:
        values = [x.value for x in operands]
        key = _key(call.op, call.static, operands)
        found = self._found.get(key)
        if found is not None and found.holds_for(values):
            return found
        cost = call.op.cost(*values, **call.static)
        source, channel = _Source(), _Silence()
        party = _Alone(
            self._rank, channel, Prg(bytes(KEY_BYTES)), self._frac_bits, source,
            Prg(bytes(KEY_BYTES)), Ledger(),
        )  # fmt: skip
        results = call.op.run(party, [_without_guess(x) for x in operands], call.static)
        taken = source.taken
        if any(map(_is_guess, operands)):
            # Material is never made for an array that only stands in for the provider's.
            taken = [Need(need.correlation, need.units) for need in taken]
        bound = any(need.fixed is not None for need in taken)
        bound_to = _digests(values) if bound else ()
        return self._keep(key, _Result(results, taken, cost, tuple(channel.heard), bound_to))

    def _work(self, run: Run, values: list[Value], certain: bool) -> _Result:
        """Plaintext work of one party, of both, or work on shares: no op."""
        plain = _is_plaintext(run)
        if plain and (run.owner is Owner.PUBLIC or (certain and run.owner.rank == self._rank)):
            return _Result(self._run_local(run, values))
        key = _key((run.digest, run.owner, run.local), {}, [_Known(v, False) for v in values])
        if (found := self._found.get(key)) is not None:
            return found
        if run.local and not plain and not has_numbers_in_bits(values):
            results = self._run_local(run, values)
        else:
            # SPU's results are shares; numbers come as additive ones.
            shapes = map(shape_of, run.outputs)
            results = [self._zeros(run.owner, s.shape, s.dtype) for s in shapes]
        return self._keep(key, _Result(results))

    def _keep(self, key: Hashable, result: _Result) -> _Result:
        if key is None or any(isinstance(v, Stateful) for v in result.values):
            return result
        blank = [_blank(v) if isinstance(v, Arith | Bool) else v for v in result.values]
        self._found[key] = replace(result, values=blank)
        return self._found[key]


def _digests(values: Sequence[Value]) -> tuple[str, ...]:
    """Of what the provider alone knows, at the provider."""
    return tuple(v.digest for v in values if isinstance(v, Private) and _has_content(v))


def _names(taken: Iterable[Need]) -> frozenset[str]:
    return frozenset(need.correlation.name for need in taken)


def _is_plaintext(run: Run) -> bool:
    return run.owner is not Owner.JOINT


def _has_content(x: Any) -> bool:
    """Public values, and what the provider has of its own."""
    if isinstance(x, Private):
        return x.owner == PROVIDER and x.value is not None
    return isinstance(x, Public)


def _is_guess(x: _Known) -> bool:
    """Whether a value stands in for what the provider alone knows."""
    return isinstance(x.value, Private) and x.value.owner == PROVIDER and not x.certain


def _without_guess(x: _Known) -> Value:
    """The value; zeros for what only stands in: what is kept must not depend on it."""
    if _is_guess(x) and isinstance(x.value, Private) and x.value.value is not None:
        return replace(x.value, value=np.zeros(x.value.shape, x.value.dtype))
    return x.value


def _blank(share: Arith | Bool) -> Arith | Bool:
    return replace(share, words=np.zeros(share.shape, np.uint64))


def _key(what: Hashable, static: dict[str, Any], operands: Sequence[_Known]) -> Hashable:
    """What a step's result depends on beside secrets; None when it may be more than forms."""
    forms: list[Hashable] = []
    for operand in operands:
        value, certain = operand.value, operand.certain
        form: tuple[Any, ...] = (type(value), value.shape, value.dtype.str, certain)
        if isinstance(value, Stateful):
            return None
        if isinstance(value, Public):
            form += (value.digest,)
        elif isinstance(value, Private):
            form += (value.owner,)
        else:
            form += (value.frac_bits, value.bits)
        forms.append(form)
    key = (what, tuple(sorted(static.items())), tuple(forms))
    try:
        hash(key)
    except TypeError:  # a parameter that cannot be a key
        return None
    return key
