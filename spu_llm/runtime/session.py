"""The front door: one secure function, three ways to run it.

    step = SecureFunction(fn, owners)          # an ordinary JAX function and who owns its inputs
    PlaintextSession().call(step, *args)       # plain JAX: the reference
    simulate(lambda s: s.call(step, ...))      # two parties as two threads of this process
    PartySession(...)                          # one of two processes, inside a worker

A driver (decoding, a benchmark) is a function of a session, the same at both parties; `local`
marks what only one of them does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.ledger import Ledger
from spu_llm.core.meter import Meter
from spu_llm.core.values import Private, Public, Value

T = TypeVar("T")


class Session(Protocol):
    """Where a driver runs."""

    meter: Meter
    ledger: Ledger

    def call(self, function: SecureFunction, *args: Any) -> Any:
        """Run a secure function; its results stay values of the session."""

    def make_ready(self, function: SecureFunction, *args: Any) -> None:
        """Make ahead what `call` with such arguments takes and the pool lacks."""

    def local(self, owner: int, work: Callable[[], T]) -> T | None:
        """`work()` at `owner`; None at the other party, which does not run it."""

    def private(
        self, owner: int, work: Callable[[], Any], shape: tuple[int, ...], dtype: Any
    ) -> Private:
        """`work()` at `owner`, as a private array of a shape that both know."""

    def get(self, value: Value) -> np.ndarray | None:
        """The plaintext of a public value, or of a private one at its owner; None elsewhere."""


class PlaintextSession:
    """Both parties' inputs in one place, no cryptography: the reference for everything else."""

    def __init__(self) -> None:
        self.meter, self.ledger = Meter(), Ledger()
        self._jitted: dict[SecureFunction, Any] = {}

    def call(self, function: SecureFunction, *args: Any) -> Any:
        plain = jax.tree.map(_plain, args)
        jitted = self._jitted.setdefault(function, jax.jit(function.fn))
        return jax.tree.map(lambda x: Public(np.asarray(x)), jitted(*plain))

    def make_ready(self, function: SecureFunction, *args: Any) -> None:
        """Nothing is needed."""

    def local(self, owner: int, work: Callable[[], T]) -> T | None:
        return work()

    def private(
        self, owner: int, work: Callable[[], Any], shape: tuple[int, ...], dtype: Any
    ) -> Private:
        return private_array(owner, work(), shape, dtype)

    def get(self, value: Value) -> np.ndarray | None:
        return _plain(value)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Public | Private) else value


def private_array(owner: int, plain: Any, shape: tuple[int, ...], dtype: Any) -> Private:
    """`plain` as a private array of `owner`; ValueError when it has another shape."""
    array = np.asarray(plain, dtype)
    if array.shape != tuple(shape):
        raise ValueError(f"expected shape {tuple(shape)}, found {array.shape}")
    return Private(owner, tuple(shape), np.dtype(dtype), array)
