"""What a call of a secure function takes from the pool, and what its ops cost, without running it.

A dry run walks the plan at one party with a peer that says nothing: shares and messages are zeros,
of the sizes that the real ones have. Every op runs its own two-party code on them, so that nothing
else has to know what an op takes. The pool hands out zeros and records what is asked of it.

Nothing here depends on a secret: sizes follow from the plan, public values, and the state of shares
that have one (which rows of a cache are open). The client's inputs are left out, and the provider's
are looked at only where correlated randomness is bound to them. Both parties find the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from spu_llm.compiler.demand import Call, CorrelationRequest, Demand
from spu_llm.compiler.linear import has_numbers_in_bits
from spu_llm.compiler.plan import OpCall, Plan, Run
from spu_llm.compiler.walker import run_local, walk_plan
from spu_llm.core._jax import Var, shape_of
from spu_llm.core.correlation import Correlation, Correlations
from spu_llm.core.integers import Factor
from spu_llm.core.ledger import element_bits, opening_bytes
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
        self.taken: list[CorrelationRequest] = []

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        self.taken.append(CorrelationRequest(correlation, units, fixed))
        zeros = [
            [np.zeros((units, *part.shape), np.uint64) for part in parts]
            for parts in (correlation.masks, correlation.results)
        ]
        return Correlations(*zeros)


class _Silence:
    """A channel without a peer; each message received is zeros, of the expected size. `heard` lists
    all messages in order: whether this party sends them, and their sizes.
    """

    def __init__(self) -> None:
        self.expected = 0
        self.heard: list[tuple[bool, int]] = []

    def send(self, data: bytes) -> None:
        self.heard.append((True, len(data)))

    def recv(self) -> bytes:
        self.heard.append((False, self.expected))
        return bytes(self.expected)


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
    """A stand-in for a variable. `certain`: its real content, where this party has it."""

    value: Value
    certain: bool

    @property
    def is_guess(self) -> bool:
        """Return whether the value stands in for what the provider alone knows."""
        value = self.value
        return isinstance(value, Private) and value.owner == PROVIDER and not self.certain


@dataclass(frozen=True)
class _Result:
    """The result of a step on values of some form. `bound_to`: digests of the provider's inputs,
    where correlated randomness is bound to them; the result holds for no other inputs.
    """

    values: list[Value]
    taken: tuple[CorrelationRequest, ...] = ()
    cost: Cost = Cost()
    messages: tuple[tuple[bool, int], ...] = ()
    bound_to: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(need.correlation.name for need in self.taken)


def _certain(step: Run, operands: Sequence[bool]) -> list[bool]:
    """Return which results of plaintext work follow from certain operands alone: work that one
    party does in one go may mix weights with randomness not yet drawn.
    """
    jaxpr = step.jaxpr.jaxpr
    if step.owner is Owner.JOINT:
        return [False] * len(jaxpr.outvars)
    unknown = {v for v, known in zip(jaxpr.invars, operands, strict=True) if not known}
    for eqn in jaxpr.eqns:
        if any(isinstance(v, Var) and v in unknown for v in eqn.invars):
            unknown.update(eqn.outvars)
    return [not (isinstance(v, Var) and v in unknown) for v in jaxpr.outvars]


# Results that are kept. One step of a model asks for some hundreds; those of public arguments, such
# as a position, are others at every step.
_KEPT = 4096


class DryRun:
    """Dry runs of one party's session. Results of the steps asked for last are cached: they depend
    on forms, shapes and public values, and on the weights that correlated randomness is bound to.
    """

    def __init__(self, rank: int, frac_bits: int) -> None:
        self._rank, self._frac_bits = rank, frac_bits
        self._found: dict[Hashable, _Result] = {}  # in the order in which they were asked for

    def run(self, plan: Plan, inputs: Sequence[Any]) -> tuple[Demand, list[Value]]:
        """Return what one call takes, and stand-ins for its results: inputs of the next dry run.

        inputs: values, or shapes with a dtype. They stay as they are.
        """
        made: list[Call] = []

        def run(step: Run, operands: list[_Known]) -> list[_Known]:
            certain = _certain(step, [x.certain for x in operands])
            results = self._work(step, [x.value for x in operands], any(certain))
            return [_Known(v, known) for v, known in zip(results, certain, strict=True)]

        def op(call: OpCall, operands: list[_Known]) -> list[_Known]:
            values = [x.value for x in operands]
            result = self._op(call, operands)
            stateful = any(isinstance(v, Stateful) for v in values)
            names = self.names(call, values) if stateful else result.names
            here = result.cost, result.taken, names, result.messages
            made.append(Call(call.op.name, call.scope, *here))
            return [_Known(v, False) for v in result.values]

        def ops(group: list[tuple[OpCall, list[_Known]]]) -> list[list[_Known]]:
            return [op(*call) for call in group]

        stand_ins = self._stand_ins(plan, inputs)
        outputs = walk_plan(plan, stand_ins, lambda x: _Known(public(x), True), run, ops)
        taken = [need for call in made for need in call.taken]
        return Demand.of(taken, made), [x.value for x in outputs]

    def names(self, call: OpCall, values: Sequence[Value]) -> frozenset[str]:
        """Return the names of one call's correlations; for a value with state, of all that it takes
        units of at some time, so that no other call with one of them runs beside this one.
        """
        plain = [v.plain() if isinstance(v, Stateful) else v for v in values]
        return self._op(call, [_Known(v, True) for v in plain]).names

    def takes(self, call: OpCall, values: Sequence[Value]) -> tuple[CorrelationRequest, ...]:
        """Return what one call with these values takes, as their state is now."""
        return self._op(call, [_Known(v, True) for v in fork(values)]).taken

    def _stand_ins(self, plan: Plan, inputs: Sequence[Any]) -> list[_Known]:
        """Return the inputs without the client's content, and with forks of their states."""
        made: list[_Known] = []
        for var, owner, x in zip(plan.inputs, plan.input_owners, fork(inputs), strict=True):
            value: Value
            if isinstance(x, Arith | Private) and isinstance(x, Stateful):
                value = x  # a fork already
            elif isinstance(x, Arith | Bool):
                value = _blank(x)
            elif _has_content(x) or (isinstance(x, Private) and x.owner != self._rank):
                value = x
            else:
                value = self._zeros(owner, shape_of(var))
            made.append(_Known(value, _has_content(x)))
        return made

    def _zeros(self, owner: Owner, like: jax.ShapeDtypeStruct) -> Value:
        shape, dtype = like.shape, np.dtype(like.dtype)
        if owner is Owner.JOINT:
            if dtype == np.bool_:
                return Bool(_zero_words(shape), dtype, 0, 1)
            return Arith(_zero_words(shape), dtype, frac_bits_of(dtype, self._frac_bits))
        if owner is Owner.PUBLIC:
            return Public(np.zeros(shape, dtype))
        holds = owner.rank == self._rank
        return Private(owner.rank, shape, dtype, np.zeros(shape, dtype) if holds else None)

    def _op(self, call: OpCall, operands: Sequence[_Known]) -> _Result:
        values = [x.value for x in operands]
        guesses = tuple(x.is_guess for x in operands)
        key = _key(values, call.op, tuple(sorted(call.static.items())), guesses)
        if (known := self._look_up(key, values)) is not None:
            return known
        cost = call.op.cost(*values, **call.static)
        source, channel = _Source(), _Silence()
        party = _Alone(
            self._rank,
            channel,
            Prg(bytes(KEY_BYTES)),
            self._frac_bits,
            source,
            Prg(bytes(KEY_BYTES)),
        )
        results = call.op.run(party, [_without_guess(x) for x in operands], call.static)
        taken = source.taken
        if any(guesses):
            # Correlated randomness is never made for an array that only stands in for the
            # provider's.
            taken = [CorrelationRequest(need.correlation, need.units) for need in taken]
        bound = any(need.fixed is not None for need in taken)
        bound_to = _digests(values) if bound else ()
        result = _Result(results, tuple(taken), cost, tuple(channel.heard), bound_to)
        return self._keep(key, result)

    def _work(self, run: Run, values: list[Value], certain: bool) -> list[Value]:
        """Return results, or stand-ins for them, of a run, in which no op is: plaintext work of one
        party, of both, or work on shares.
        """
        plain = run.owner is not Owner.JOINT
        if plain and (run.owner is Owner.PUBLIC or (certain and run.owner.rank == self._rank)):
            return run_local(self._rank, self._frac_bits, run, values)
        if plain or not run.local or has_numbers_in_bits(values):
            # SPU's results are shares; numbers come as additive ones.
            return [self._zeros(run.owner, shape_of(v)) for v in run.outputs]
        key = _key(values, run.digest)
        if (known := self._look_up(key, values)) is not None:
            return known.values
        results = run_local(self._rank, self._frac_bits, run, values)
        return self._keep(key, _Result(results)).values

    def _look_up(self, key: Hashable, values: Sequence[Value]) -> _Result | None:
        known = self._found.pop(key, None)
        if known is None or (known.bound_to and known.bound_to != _digests(values)):
            return None
        self._found[key] = known
        return known

    def _keep(self, key: Hashable, result: _Result) -> _Result:
        if key is None or any(isinstance(v, Stateful) for v in result.values):
            return result
        blank = [_blank(v) if isinstance(v, Arith | Bool) else v for v in result.values]
        self._found[key] = replace(result, values=blank)
        if len(self._found) > _KEPT:
            del self._found[next(iter(self._found))]
        return self._found[key]


def _digests(values: Sequence[Value]) -> tuple[str, ...]:
    """Return the digests of what the provider alone knows, at the provider."""
    return tuple(v.digest for v in values if isinstance(v, Private) and _has_content(v))


def _has_content(x: Any) -> bool:
    """Return whether `x` has content here that is not the client's: a public value, or the
    provider's own.
    """
    if isinstance(x, Private):
        return x.owner == PROVIDER and x.value is not None
    return isinstance(x, Public)


def _without_guess(x: _Known) -> Value:
    """Return the value; zeros for what only stands in: what is kept must not depend on it."""
    if x.is_guess and isinstance(x.value, Private) and x.value.value is not None:
        return replace(x.value, value=np.zeros(x.value.shape, x.value.dtype))
    return x.value


def _blank(share: Arith | Bool) -> Arith | Bool:
    return replace(share, words=_zero_words(share.shape))


@functools.cache
def _zero_words(shape: tuple[int, ...]) -> np.ndarray:
    """Return one array of zeros for all stand-ins of a shape: these are many."""
    words = np.zeros(shape, np.uint64)
    words.setflags(write=False)
    return words


def _key(values: Sequence[Value], *step: Hashable) -> Hashable:
    """Return what a step's result depends on beside secrets; None when it may be more than
    forms.
    """
    if any(isinstance(v, Stateful) for v in values):
        return None
    return (*step, *map(_form, values))


def _form(value: Value) -> Hashable:
    form = type(value), value.shape, value.dtype.str
    if isinstance(value, Public):
        return *form, value.digest
    if isinstance(value, Private):
        return *form, value.owner
    return *form, value.frac_bits, value.bits
