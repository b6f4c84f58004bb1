"""What a call of a secure function takes from the pool, and what its ops cost, without running it.

A dry run goes through the plan at one party with a peer that says nothing: shares and messages are
zeros, of the sizes that the real ones have. Every op runs its own two-party code on them, so there
is no second bookkeeping to keep in step. The pool hands out zeros and records what is asked of it.

Nothing here depends on a secret: sizes follow from the plan, public values, and what shared values
say about themselves beyond their words (a cache's rows). The client's inputs are left out, and the
provider's are looked at only where material is bound to them. Both parties find the same.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spu_llm.compiler.demand import Call, Demand, Need, by_name
from spu_llm.compiler.linear import has_numbers_in_bits
from spu_llm.compiler.plan import OpCall, Plan, Run
from spu_llm.core._jax import Literal, shape_of
from spu_llm.core.correlation import Correlation, Material
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
    Value,
    frac_bits_of,
)


class _Source:
    """A pool that hands out zeros and records what is taken."""

    def __init__(self) -> None:
        self.taken: list[Need] = []

    def take(
        self, correlation: Correlation, units: int, fixed: np.ndarray | None = None
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

    def close(self) -> None:
        """Nothing to release."""


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
class _Result:
    """Of a step on values of some form; `step` keeps the key's identity taken. `arrays` are the
    provider's that material is bound to: the result holds for no others.
    """

    step: Any
    values: list[Value]
    taken: list[Need] = field(default_factory=list)
    cost: Cost = Cost()
    messages: tuple[tuple[bool, int], ...] = ()
    arrays: tuple[weakref.ref[np.ndarray], ...] = ()

    def holds_for(self, values: Sequence[Value]) -> bool:
        if not self.arrays:
            return True
        here = _arrays(values)
        return all(ref() is array for ref, array in zip(self.arrays, here, strict=True))


class DryRun:
    """Dry runs of one party's session. What it has found of an op is kept: forms and shapes decide.

    run_local(run, values): equations that need no message, on this party's values, as in the
    session.
    """

    def __init__(
        self, rank: int, frac_bits: int, run_local: Callable[[Run, Sequence[Value]], list[Value]]
    ) -> None:
        self._rank, self._frac_bits, self._run_local = rank, frac_bits, run_local
        self._known: dict[Any, _Result] = {}

    def run(self, plan: Plan, inputs: Sequence[Any]) -> tuple[Demand, list[Value]]:
        """Needs of one call, and stand-ins for its results: inputs of the next dry run.

        inputs: values, or shapes with a dtype. They stay as they are.
        """
        env: dict[Any, Value] = {v: Public(c) for v, c in plan.consts.items()}
        env.update(zip(plan.inputs, self._stand_ins(plan, inputs), strict=True))
        given = (v for v, x in zip(plan.inputs, inputs, strict=True) if _is_known(x))
        certain = {*plan.consts, *given}  # what holds its real content
        taken: list[Need] = []
        calls: list[Call] = []

        def read(atom: Any) -> Value:
            return Public(np.asarray(atom.val)) if isinstance(atom, Literal) else env[atom]

        for step in plan.steps:
            values = [read(v) for v in step.inputs]
            sure = tuple(isinstance(v, Literal) or v in certain for v in step.inputs)
            if isinstance(step, OpCall):
                result = self._op(step, values, sure)
                taken += result.taken
                names = _names(result.taken)
                if any(map(_keeps_books, values)):
                    names = self.names(step, values)
                made = tuple(result.taken), names, result.messages
                calls.append(Call(step.op.name, step.scope, result.cost, *made))
            else:
                result = self._work(step, values, all(sure))
                if all(sure) and _is_plaintext(step):
                    certain |= set(step.outputs)
            env.update(zip(step.outputs, result.values, strict=True))
        return Demand(by_name(taken), tuple(calls)), [read(v) for v in plan.outputs]

    def names(self, call: OpCall, values: Sequence[Value]) -> frozenset[str]:
        """The correlations of one call, by name: for a cache, those that it takes units of at some
        time, so that no other call with it runs beside this one.
        """
        plain = [
            Arith(v.words, v.dtype, v.frac_bits, v.bits)
            if isinstance(v, Arith) and _keeps_books(v)
            else v
            for v in values
        ]
        return _names(self._op(call, plain, (True,) * len(plain)).taken)

    def takes(self, call: OpCall, values: Sequence[Value]) -> list[Need]:
        """What one call with these values takes, as their books are now."""
        alone = [copy.deepcopy(v) if _keeps_books(v) else v for v in values]
        return self._op(call, alone, (True,) * len(alone)).taken

    def _stand_ins(self, plan: Plan, inputs: Sequence[Any]) -> list[Value]:
        """Inputs without the client's content, and with bookkeeping of their own to change."""
        books = copy.deepcopy([x for x in inputs if _keeps_books(x)])
        made: list[Value] = []
        for var, owner, x in zip(plan.inputs, plan.input_owners, inputs, strict=True):
            if _keeps_books(x):
                made.append(books.pop(0))
            elif isinstance(x, Arith | Bool):
                made.append(_blank(x))
            elif _is_known(x) or (isinstance(x, Private) and x.owner != self._rank):
                made.append(x)
            else:
                made.append(self._zeros(owner, shape_of(var).shape, shape_of(var).dtype))
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
        mine = owner.rank == self._rank
        return Private(owner.rank, shape, dtype, np.zeros(shape, dtype) if mine else None)

    def _op(self, call: OpCall, values: list[Value], sure: tuple[bool, ...]) -> _Result:
        key = _key(call.op, call.static, values, sure)
        found = self._known.get(key)
        if found is not None and found.holds_for(values):
            return found
        cost = call.op.cost(*values, **call.static)
        source, channel = _Source(), _Silence()
        party = _Alone(
            self._rank, channel, Prg(bytes(KEY_BYTES)), self._frac_bits, source,
            Prg(bytes(KEY_BYTES)), Ledger(),
        )  # fmt: skip
        guesses = [_is_guess(v, known) for v, known in zip(values, sure, strict=True)]
        # What is kept for an array goes with it: not for the weights of a whole model.
        inputs = [
            replace(v, value=np.zeros(v.shape, v.dtype))
            if guess and isinstance(v, Private) and v.value is not None
            else v
            for v, guess in zip(values, guesses, strict=True)
        ]
        results = call.op.run(party, inputs, call.static)
        taken, arrays = source.taken, _arrays(values)
        if any(guesses):
            # Material is never made for an array that only stands in for the provider's.
            taken = [Need(need.correlation, need.units) for need in taken]
        if all(need.fixed is None for need in taken):
            arrays = []
        refs = tuple(map(weakref.ref, arrays))
        messages = tuple(channel.heard)
        return self._keep(key, _Result(call.op, results, taken, cost, messages, refs))

    def _work(self, run: Run, values: list[Value], certain: bool) -> _Result:
        """Plaintext work of one party, of both, or work on shares: no op."""
        plain = _is_plaintext(run)
        if plain and (run.owner is Owner.PUBLIC or (certain and run.owner.rank == self._rank)):
            return _Result(run, self._run_local(run, values))
        key = _key(run, {}, values, ())
        if (found := self._known.get(key)) is not None:
            return found
        if run.local and not plain and not has_numbers_in_bits(values):
            results = self._run_local(run, values)
        else:
            # SPU's results are shares; numbers come as additive ones.
            shapes = map(shape_of, run.outputs)
            results = [self._zeros(run.owner, s.shape, s.dtype) for s in shapes]
        return self._keep(key, _Result(run, results))

    def _keep(self, key: Any, result: _Result) -> _Result:
        if key is None or any(_keeps_books(v) for v in result.values):
            return result
        blank = [_blank(v) if isinstance(v, Arith | Bool) else v for v in result.values]
        self._known[key] = replace(result, values=blank)
        return self._known[key]


def _arrays(values: Sequence[Value]) -> list[np.ndarray]:
    """What the provider alone knows, at the provider."""
    return [
        v.value
        for v in values
        if isinstance(v, Private) and v.owner == PROVIDER and v.value is not None
    ]


def _names(taken: Iterable[Need]) -> frozenset[str]:
    return frozenset(need.correlation.name for need in taken)


def _is_guess(value: Value, known: bool) -> bool:
    """Whether a value stands in for what the provider alone knows."""
    return isinstance(value, Private) and value.owner == PROVIDER and not known


def _is_plaintext(run: Run) -> bool:
    return run.owner is not Owner.JOINT


def _is_known(x: Any) -> bool:
    """Public values, and what the provider has of its own."""
    if isinstance(x, Private):
        return x.owner == PROVIDER and x.value is not None
    return isinstance(x, Public)


def _keeps_books(x: Any) -> bool:
    """Shared values that say more of themselves than their form."""
    return isinstance(x, Arith | Bool) and type(x) not in (Arith, Bool)


def _blank(share: Arith | Bool) -> Arith | Bool:
    return type(share)(np.zeros(share.shape, np.uint64), share.dtype, share.frac_bits, share.bits)


def _key(what: Any, static: dict[str, Any], values: Sequence[Value], certain: Any) -> Any:
    """What a step's result depends on beside secrets; None when it may be more than forms."""
    forms: list[Any] = []
    for value in values:
        form: tuple[Any, ...] = (type(value), value.shape, value.dtype.str)
        if isinstance(value, Public):
            form += (value.value.tobytes(),)
        elif isinstance(value, Private):
            form += (value.owner,)
        elif _keeps_books(value):
            return None
        else:
            form += (value.frac_bits, value.bits)
        forms.append(form)
    key = (id(what), tuple(sorted(static.items())), tuple(forms), certain)
    try:
        hash(key)
    except TypeError:  # a parameter that cannot be a key
        return None
    return key
