"""The front door: one secure function, three ways to run it.

    step = SecureFunction(fn, owners)          # an ordinary JAX function and who owns its inputs
    PlaintextSession().call(step, *args)       # plain JAX: the reference
    Simulation().run(lambda s: s.call(step))   # two parties as two threads of this process
    PartySession(...)                          # one of two processes, inside a worker

A driver (decoding, a benchmark) is a function of a session, the same at both parties; `local`
marks what only one of them does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from spu_llm.compiler.demand import Demand
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.ledger import Ledger
from spu_llm.core.meter import Meter
from spu_llm.core.values import Private, Public, Value

T = TypeVar("T")


class Session(Protocol):
    """The runtime that a driver calls secure functions through."""

    meter: Meter
    ledger: Ledger

    def call(self, function: SecureFunction, *args: Any) -> Any:
        """Run a secure function; its results stay values of the session."""

    def prepare(self, function: SecureFunction, *args: Any) -> None:
        """Compile for arguments of these shapes and agree with the peer on the program."""

    def preprocess(self, function: SecureFunction, *args: Any) -> Demand:
        """Make ahead what `call` with these arguments takes and is not there; return all it
        takes.
        """

    def prefetch(self, course: Callable[[Session], None]) -> None:
        """Make what a later call takes while the next one runs, where that pays. `course` goes
        through both calls in a dry session; both parties find the same demand.
        """

    def stop_prefetching(self) -> None:
        """End what is made in the background, since no later call comes; what there is of it
        stays.
        """

    def local(self, owner: int, work: Callable[..., T], *args: Any) -> T | None:
        """Run `work(*args)` at `owner` and return its result; None at the other party, which does
        not run it: a method of the owner's half may be given with None for a half that is not here.
        """

    def alone(self, owner: int, work: Callable[..., T], *args: Any) -> T | None:
        """Run `work(*args)` at `owner` as `local` does, with nothing made in the background there:
        for work whose duration is a secret.
        """

    def private(
        self, owner: int, work: Callable[..., Any], shape: tuple[int, ...], dtype: Any, *args: Any
    ) -> Private:
        """Run `work(*args)` at `owner`; its result is a private array of a shape that both know."""

    def get(self, value: Value) -> np.ndarray | None:
        """Return the plaintext of a public value, or of a private one at its owner; None
        elsewhere.
        """


class PlaintextSession:
    """Both parties' inputs in one place, no cryptography: the reference for everything else."""

    def __init__(self) -> None:
        self.meter, self.ledger = Meter(), Ledger()
        self._jitted: dict[SecureFunction, Any] = {}

    def call(self, function: SecureFunction, *args: Any) -> Any:
        plain = jax.tree.map(_plain, args)
        jitted = self._jitted.setdefault(function, jax.jit(function.fn))
        return jax.tree.map(lambda x: Public(np.asarray(x)), jitted(*plain))

    def prepare(self, function: SecureFunction, *args: Any) -> None:
        """Do nothing: there is no peer to agree with."""

    def preprocess(self, function: SecureFunction, *args: Any) -> Demand:
        return Demand()

    def prefetch(self, course: Callable[[Session], None]) -> None:
        """Do nothing: plaintext takes no correlated randomness."""

    def stop_prefetching(self) -> None:
        """Do nothing: plaintext takes no correlated randomness."""

    def local(self, owner: int, work: Callable[..., T], *args: Any) -> T | None:
        return work(*args)

    def alone(self, owner: int, work: Callable[..., T], *args: Any) -> T | None:
        return self.local(owner, work, *args)

    def private(
        self, owner: int, work: Callable[..., Any], shape: tuple[int, ...], dtype: Any, *args: Any
    ) -> Private:
        return private_array(owner, work(*args), shape, dtype)

    def get(self, value: Value) -> np.ndarray | None:
        return _plain(value)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Public | Private) else value


def private_array(owner: int, plain: Any, shape: tuple[int, ...], dtype: Any) -> Private:
    """Return `plain` as a private array of `owner`; ValueError when it has another shape."""
    array = np.asarray(plain, dtype)
    if array.shape != tuple(shape):
        raise ValueError(f"expected shape {tuple(shape)}, found {array.shape}")
    return Private(owner, tuple(shape), np.dtype(dtype), array)


def private_tree(
    session: Session, owner: int, work: Callable[..., Any], shapes: Any, *args: Any
) -> Any:
    """Run `work(*args)` at `owner`; return its tree of arrays of these shapes as private values."""
    leaves, tree = jax.tree.flatten(shapes)
    if not leaves:
        return shapes
    made = session.local(owner, lambda: jax.tree.leaves(work(*args))) or [None] * len(leaves)
    values = [
        session.private(owner, np.asarray, s.shape, s.dtype, x)
        for x, s in zip(made, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, values)
