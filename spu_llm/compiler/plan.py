"""From a JAX function to a plan: who computes what, in which order.

The flat jaxpr is cut twice. Ops end a run, and so does a change of owner: what depends on one
party's inputs (and public values) alone is that party's plaintext work. What depends on both runs
on shares: linear equations at each party by itself, the rest as SPU segments. Printing a plan shows
the program.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spu_llm.compiler.linear import Equations, is_local
from spu_llm.core._jax import (
    ClosedJaxpr,
    Environment,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    digest_of,
    expanded,
    flat_jaxpr,
    scope_of,
    sub_jaxprs,
    walk,
)
from spu_llm.core.approx import form_on_shares, reference_of
from spu_llm.core.op import ProtocolOp, op_of
from spu_llm.core.settings import OWN
from spu_llm.core.values import Owner


@dataclass(frozen=True)
class Run:
    """Consecutive equations of one owner: plaintext work, or, when JOINT, work on shares. `local`:
    no message is needed, since it is plaintext or linear; all else is an SPU segment.
    """

    owner: Owner
    jaxpr: ClosedJaxpr
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    local: bool = True

    @functools.cached_property
    def digest(self) -> str:
        """Return the digest of what the run computes, whoever the owners are."""
        return digest_of(self.jaxpr)

    @functools.cached_property
    def equations(self) -> Equations:
        """Return the equations of local work on shares, ready to be evaluated."""
        return Equations(self.jaxpr)

    def __str__(self) -> str:
        kind = f"local {self.owner.value}" if self.local else "segment"
        shapes = ", ".join(v.aval.str_short() for v in self.outputs)
        return f"{kind}: {len(self.jaxpr.jaxpr.eqns)} equations -> {shapes}"


@dataclass(frozen=True)
class OpCall:
    """One call of a protocol op. Literal inputs stay literals; `scope` is the name scope
    (`jax.named_scope`) it was written in. The calls of one parallel `group` stand one after the
    other and do not depend on each other.
    """

    op: ProtocolOp
    static: dict[str, Any]
    inputs: tuple[Var | Literal, ...]
    outputs: tuple[Var, ...]
    scope: str = ""
    group: int = 0

    def __str__(self) -> str:
        shapes = ", ".join(v.aval.str_short() for v in self.outputs)
        return f"op {self.op.name} {self.static} -> {shapes}"


Step = Run | OpCall


@dataclass(frozen=True)
class Plan:
    """A secure program: inputs with their owners, steps in order, outputs with their owners."""

    inputs: tuple[Var, ...]
    input_owners: tuple[Owner, ...]
    outputs: tuple[Var | Literal, ...]
    output_owners: tuple[Owner, ...]
    steps: tuple[Step, ...]
    owner_of: dict[Var, Owner]
    consts: dict[Var, np.ndarray]
    digest: str

    def __str__(self) -> str:
        return "\n".join(f"{i:3d} {step}" for i, step in enumerate(self.steps))


def make_plan(
    fn: Callable[..., Sequence[Any]],
    shapes: Sequence[jax.ShapeDtypeStruct],
    owners: Sequence[Owner],
    *,
    backend: str = OWN,
    only_segments: bool = False,
) -> Plan:
    """Make the plan of the flat function `fn(*arrays) -> arrays` whose i-th argument belongs to
    owners[i]. `backend`: what computes a model's forward (`spu_llm.core.settings`).
    `only_segments`: all work on shares in SPU, linear equations too.

    Raise NotImplementedError when a protocol op stands inside a loop or branch (unroll it), or when
    a segment would use a JAX primitive that SPU is not known to compute without opening anything.
    """
    closed = flat_jaxpr(fn, shapes)
    closed = _on_shares(closed, owners) if backend == OWN else _for_spu(closed)
    _refuse_nested_ops(closed.jaxpr)
    owned = _assign_owners(closed, owners)
    _refuse_unvetted(closed.jaxpr, owned)
    steps = tuple(_cut(closed, owned, only_segments))
    outputs = tuple(closed.jaxpr.outvars)
    output_owners = tuple(owned.read(outputs))
    content = f"{digest_of(closed)}|{owners}|{output_owners}|{only_segments}"
    return Plan(
        tuple(closed.jaxpr.invars),
        tuple(owners),
        outputs,
        output_owners,
        steps,
        owned.values,
        {v: np.asarray(c) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)},
        hashlib.sha256(content.encode()).hexdigest(),
    )


def _on_shares(closed: ClosedJaxpr, owners: Sequence[Owner]) -> ClosedJaxpr:
    """Return `closed` with every approximation that works on shares in its form on shares."""
    owned = _assign_owners(closed, owners)

    def form(eqn: JaxprEqn) -> ClosedJaxpr | None:
        return form_on_shares(eqn) if join(owned.read(eqn.invars)) is Owner.JOINT else None

    spelt_out = expanded(closed, form)
    return closed if spelt_out is closed else _on_shares(spelt_out, owners)


def _for_spu(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return `closed` with the exact functions of a model's forward, which SPU is to compile."""
    spelt_out = expanded(closed, reference_of)
    return closed if spelt_out is closed else _for_spu(spelt_out)


def _refuse_nested_ops(jaxpr: Jaxpr) -> None:
    def holds_op(eqn: JaxprEqn) -> bool:
        inside = [e for inner in sub_jaxprs(eqn) for e in inner.eqns]
        return any(op_of(e.primitive) is not None or holds_op(e) for e in inside)

    for eqn in jaxpr.eqns:
        if holds_op(eqn):
            raise NotImplementedError(f"protocol op inside `{eqn.primitive.name}`: unroll it")


# Arithmetic and layout that SPU's Cheetah expands into data-oblivious kernels; the models' own were
# measured with other secrets (`experiments.completions.transcript`). `top_k` is not here: its
# quick-select opens comparisons. Secret indices and predicates are refused below.
_OBLIVIOUS = set(
    "abs add add_any and argmax argmin broadcast_in_dim ceil clamp concatenate "
    "convert_element_type copy copy_p cos cumlogsumexp cummax cummin cumprod cumsum div "
    "dot_general eq erf exp exp2 expand_dims expm1 floor ge gt integer_pow iota le log log1p "
    "logistic lt max min mul ne neg not or pad pow reduce_and reduce_max reduce_min reduce_or "
    "reduce_precision reduce_prod reduce_sum reshape rev round rsqrt select_n sign sin slice sort "
    "split sqrt square squeeze stop_gradient sub tanh transpose xor".split()
)
# Primitives with index or amount operands, from this position on; those must be public.
_PUBLIC_FROM = {
    "dynamic_slice": 1,
    "dynamic_update_slice": 2,
    "gather": 1,
    "shift_right_arithmetic": 1,
}


def _refuse_unvetted(jaxpr: Jaxpr, owned: Environment[Owner]) -> None:
    for eqn in jaxpr.eqns:
        owners = owned.read(eqn.invars)
        name = eqn.primitive.name
        if join(owners) is not Owner.JOINT or op_of(eqn.primitive) is not None:
            continue
        if name in _PUBLIC_FROM:
            if any(o is not Owner.PUBLIC for o in owners[_PUBLIC_FROM[name] :]):
                raise NotImplementedError(
                    f"`{name}` with a secret index or amount; use a one-hot product"
                )
        elif name not in _OBLIVIOUS:
            raise NotImplementedError(
                f"`{name}` on shared values: SPU may open something inside it; write it with "
                "other operations"
            )


def join(owners: Iterable[Owner]) -> Owner:
    """Return the owner of a value computed from values of `owners`."""
    secret = {o for o in owners if o is not Owner.PUBLIC}
    if not secret:
        return Owner.PUBLIC
    return secret.pop() if len(secret) == 1 else Owner.JOINT


def _assign_owners(closed: ClosedJaxpr, owners: Sequence[Owner]) -> Environment[Owner]:
    """Find the owner of every variable."""

    def results(eqn: JaxprEqn, inputs: list[Owner]) -> Sequence[Owner]:
        op = op_of(eqn.primitive)
        return op.owners(*inputs, **eqn.params) if op else [join(inputs)] * len(eqn.outvars)

    return walk(closed, owners, lambda _: Owner.PUBLIC, results)


# Plaintext work first, then each party's own work on shares, so that a segment sees all that it can
# use; ops when nothing else is ready.
_ORDER = (
    (Owner.PUBLIC, True),
    (Owner.CLIENT, True),
    (Owner.PROVIDER, True),
    (Owner.JOINT, True),
    (Owner.JOINT, False),
)


def _cut(closed: ClosedJaxpr, owned: Environment[Owner], only_segments: bool) -> Iterable[Step]:
    """Group equations into steps: at each point everything that is ready for one owner runs."""
    jaxpr = closed.jaxpr
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    kinds = _kinds(closed, owned, consts, only_segments)
    queue = _Ready(jaxpr, kinds)
    group = 0
    while queue.left:
        for owner, local in _ORDER:
            # A segment takes local work, too.
            if chosen := queue.take_all((owner, local), (owner, True)):
                yield _as_run(chosen, owner, local, consts, queue.needed)
                break
        else:
            group += 1
            for e, op in queue.take_ops():
                inputs, outputs = tuple(e.invars), tuple(e.outvars)
                yield OpCall(op, dict(e.params), inputs, outputs, scope_of(e), group)


_Kind = tuple[Owner, bool]


class _Ready:
    """The equations left to schedule, in order, and of each kind (None: ops) those whose inputs are
    known.
    """

    def __init__(self, jaxpr: Jaxpr, kinds: Sequence[_Kind | None]) -> None:
        self._eqns, self._kinds = jaxpr.eqns, kinds
        self.left = len(jaxpr.eqns)
        self._ready: dict[_Kind | None, list[int]] = {kind: [] for kind in kinds}  # heaps
        self._waits = []  # for so many inputs
        self._users: dict[Var, list[int]] = {}
        self._reads = Counter(v for v in jaxpr.outvars if isinstance(v, Var))  # still to come
        known = {*jaxpr.invars, *jaxpr.constvars}
        for i, eqn in enumerate(jaxpr.eqns):
            inputs = {v for v in eqn.invars if isinstance(v, Var)}
            self._reads.update(inputs)
            for v in inputs - known:
                self._users.setdefault(v, []).append(i)
            self._waits.append(len(inputs - known))
            if not self._waits[i]:
                heapq.heappush(self._ready[kinds[i]], i)

    def take_all(self, *kinds: _Kind) -> list[JaxprEqn]:
        """Take all equations of these kinds that can run now, one after the other."""
        heaps = [self._ready[kind] for kind in dict.fromkeys(kinds) if kind in self._ready]
        taken = []
        while heap := min(filter(None, heaps), key=lambda heap: heap[0], default=None):
            taken.append(self._take(heapq.heappop(heap)))
        return taken

    def take_ops(self) -> list[tuple[JaxprEqn, ProtocolOp]]:
        """Take the ops that can run now, which do not depend on each other; ops without messages
        first.
        """
        ready, ops = sorted(self._ready[None]), []
        for i in ready:
            op = op_of(self._eqns[i].primitive)
            assert op is not None
            ops.append((i, op))
        ops = [(i, op) for i, op in ops if op.non_interactive] or ops
        taken = {i for i, _ in ops}
        self._ready[None] = [i for i in ready if i not in taken]
        return [(self._take(i), op) for i, op in ops]

    def needed(self, v: Var) -> bool:
        """Return whether something that is left, or the result, reads `v`."""
        return self._reads[v] > 0

    def _take(self, i: int) -> JaxprEqn:
        eqn = self._eqns[i]
        self.left -= 1
        self._reads.subtract({v for v in eqn.invars if isinstance(v, Var)})
        for v in eqn.outvars:
            for user in self._users.pop(v, ()):
                self._waits[user] -= 1
                if not self._waits[user]:
                    heapq.heappush(self._ready[self._kinds[user]], user)
        return eqn


def _kinds(
    closed: ClosedJaxpr, owned: Environment[Owner], consts: dict[Var, Any], only_segments: bool
) -> list[_Kind | None]:
    """Return for each equation who computes it, and whether it needs no message, as plaintext work
    and linear work on shares; None for an op.
    """

    def is_public(atom: Var | Literal) -> bool:
        return owned.read([atom]) == [Owner.PUBLIC]

    kinds: list[_Kind | None] = []
    for eqn in closed.jaxpr.eqns:
        if op_of(eqn.primitive) is not None:
            kinds.append(None)
            continue
        worker = join(owned.read(eqn.invars))
        local = worker is not Owner.JOINT or (
            not only_segments and is_local(eqn, is_public, consts)
        )
        kinds.append((worker, local))
    return kinds


def _as_run(
    eqns: list[JaxprEqn],
    owner: Owner,
    local: bool,
    consts: dict[Var, Any],
    needed: Callable[[Var], bool],
) -> Run:
    """Make a run of equations. `needed`: whether a variable is read after the run."""
    made = {v for e in eqns for v in e.outvars}
    used = dict.fromkeys(v for e in eqns for v in e.invars if isinstance(v, Var) and v not in made)
    inputs = tuple(v for v in used if v not in consts)
    constvars = [v for v in used if v in consts]
    outputs = tuple(v for e in eqns for v in e.outvars if needed(v))
    jaxpr = Jaxpr(constvars, inputs, outputs, eqns)
    closed_run = ClosedJaxpr(jaxpr, [consts[v] for v in constvars])
    return Run(owner, closed_run, inputs, outputs, local)
