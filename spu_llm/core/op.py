"""Protocol ops: JAX primitives with a plaintext meaning and a hand-written two-party protocol.

An op is one frozen record. In plaintext and under `jax.jit` it is its `reference`; in a secure
program the compiler cuts the jaxpr at it and both parties run `two_party` on their shares. What it
costs and what each party learns stand next to the code and are checked by one contract test
(`spu_llm.testing.OpContract`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from spu_llm.core._jax import Shapes, make_primitive
from spu_llm.core.ledger import Opening
from spu_llm.core.party import Party
from spu_llm.core.values import Owner, Value


@dataclass(frozen=True)
class Cost:
    """Exact price of one call of an op.

    `messages`: sends of both parties; `rounds`: longest chain of dependent messages; payload bytes
    by direction.
    """

    messages: int = 0
    rounds: int = 0
    client_to_provider: int = 0
    provider_to_client: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Return the price of two calls, one after the other."""
        return Cost(**{k: n + getattr(other, k) for k, n in vars(self).items()})


@dataclass(frozen=True)
class Functionality:
    """The outputs of an op to either party, in words for a reviewer. Empty: none."""

    client: str = ""
    provider: str = ""


@dataclass(frozen=True)
class View:
    """The view of a party in one call beyond its inputs: own random words, and messages as they
    come.

    `outgoing`, what it sends, follows from these; a simulator may give it to sharpen the test.
    """

    own: Sequence[np.ndarray]
    incoming: Sequence[np.ndarray]
    outgoing: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class ProtocolOp:
    """An op, defined by its record.

    reference(*arrays, **static) -> arrays: the plaintext meaning, in JAX.
    shapes(*shapes, **static) -> shapes and dtypes (`jax.ShapeDtypeStruct`) of the results; by
        default the reference is traced for them, which takes longer.
    two_party(party, *values, **static) -> values: this party's half; accepts every `Value` form.
    cost(*values, **static) -> Cost, from forms and shapes alone.
    simulate(rank, prg, common, inputs, outputs, **static) -> View: from a party's own input values
        and its own declared outputs (and the stream that both parties share), a view that nobody
        can tell from the real one. Messages are given as they are sent.
    owners(*input_owners, **static) -> owner of each result; one shared result by default.
    opens(*values, **static) -> what one call must enter into the ledger; nothing by default.
    model(inputs of both parties, common stream, **static) -> exact integer results, where they
        depend on how the inputs are shared; by default the reference is exact.
    non_interactive: on additive shares it sends nothing, so it runs as soon as its operands are
        there instead of waiting for a parallel group.
    of_forward: it computes a part of a model's forward, which a program may leave to SPU
        (`spu_llm.core.approx.reference_of`).
    """

    name: str
    _: KW_ONLY
    reference: Callable[..., Any]
    two_party: Callable[..., Any]
    cost: Callable[..., Cost]
    simulate: Callable[..., View]
    owners: Callable[..., Sequence[Owner]] = lambda *owners, **static: [Owner.JOINT]
    functionality: Functionality = Functionality()
    opens: Callable[..., Sequence[Opening]] = lambda *values, **static: ()
    model: Callable[..., Sequence[np.ndarray]] | None = None
    shapes: Shapes | None = None
    non_interactive: bool = False
    of_forward: bool = False

    @functools.cached_property
    def primitive(self) -> Any:
        """Return the JAX primitive that stands for the op in a jaxpr."""
        primitive = make_primitive(self.name, self.reference, self.shapes)
        _BY_PRIMITIVE[primitive] = self
        return primitive

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        out = self.primitive.bind(*arrays, **static)
        return out[0] if len(out) == 1 else tuple(out)

    def run(self, party: Party, values: Sequence[Value], static: dict[str, Any]) -> list[Value]:
        """Run this party's half of the protocol."""
        out = self.two_party(party, *values, **static)
        return list(out) if isinstance(out, tuple | list) else [out]


# As a definition reads: `relu = protocol_op("relu", reference=..., ...)`.
protocol_op = ProtocolOp
_BY_PRIMITIVE: dict[Any, ProtocolOp] = {}


def op_of(primitive: Any) -> ProtocolOp | None:
    """Return the op behind a JAX primitive, or None for JAX's own."""
    return _BY_PRIMITIVE.get(primitive)
