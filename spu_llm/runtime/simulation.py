"""Both parties as two threads of this process; for tests and notebooks."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from spu_llm.core.channel import LinkChannel
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Bool,
    Private,
    Public,
    Value,
    decode,
    joined_words,
)
from spu_llm.runtime.party_session import PartySession, SessionOptions
from spu_llm.runtime.spu_runtime import create_memory_link

T = TypeVar("T")

_simulations = itertools.count()


class Simulation:
    """Both parties as two threads of this process, on an in-memory link; for tests and notebooks.

    `seed` fixes the parties' own random streams (SPU's stay random). `prefetches`: whether
    correlated randomness is made while a call runs; a session asks the network, which there is none
    of here.
    """

    def __init__(
        self, config: SpuConfig | None = None, *, seed: int | None = None, prefetches: bool = False
    ) -> None:
        self._name = f"simulation-{next(_simulations)}"
        self._config = config or SpuConfig()
        self._seed, self._options = seed, SessionOptions(prefetches=prefetches)
        self._broken = False
        self._work: list[queue.Queue[Any]] = [queue.Queue(), queue.Queue()]
        self._done: queue.Queue[Any] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), daemon=True)
            for rank in (CLIENT, PROVIDER)
        ]
        for thread in self._threads:
            thread.start()
        self.run(lambda session: session.warm_up())

    def _serve(self, rank: int) -> None:
        session: PartySession | None = None
        while (program := self._work[rank].get()) is not None:
            try:
                if session is None:
                    own = None
                    if self._seed is not None:
                        own = Prg.from_seed(self._seed, f"party {rank}")
                    link = create_memory_link(rank, self._name)
                    # Only one of two threads may write SPU's profile: the log is the process's.
                    session = PartySession(
                        link,
                        self._config,
                        self._options,
                        own=own,
                        profile=rank == CLIENT,
                        open_channel=self._channels(rank),
                    )
                self._done.put((rank, program(session), None))
            except BaseException as exc:
                self._done.put((rank, None, exc))
        if session is not None:
            session.close()

    def _channels(self, rank: int) -> Callable[[], LinkChannel]:
        """Return a function that opens channels on links of their own, so that SPU counts its own
        messages only.
        """
        numbers = itertools.count()
        return lambda: LinkChannel(create_memory_link(rank, f"{self._name}, {next(numbers)}"))

    def run(self, program: Callable[[PartySession], T]) -> list[T]:
        """Run `program(session)` at both parties at once; return [client's, provider's result].

        After an error that only one party met, the other may wait for it forever: the simulation
        then cannot be used again.
        """
        if self._broken:
            raise RuntimeError("this simulation broke in an earlier run; make another one")
        for work in self._work:
            work.put(program)
        results: list[Any] = [None, None]
        errors: list[BaseException] = []
        for _ in range(2):
            try:
                rank, result, error = self._done.get(timeout=1.0 if errors else None)
            except queue.Empty:
                self._broken = True
                break
            results[rank] = result
            if error is not None:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def close(self) -> None:
        """End both threads; a party that waits for the other one for ever is left behind."""
        for work in self._work:
            work.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0 if self._broken else 30.0)

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def reconstruct(values: Sequence[Value]) -> np.ndarray:
    """Return the plaintext of both parties' values together; for tests, which hold both."""
    a, b = values
    if isinstance(a, Arith | Bool) and isinstance(b, type(a)):
        return decode(joined_words(a, b.words), a.dtype, a.frac_bits)
    for v in (a, b):
        if isinstance(v, Public | Private) and v.value is not None:
            return v.value
    raise TypeError(f"no common form: {a}, {b}")
