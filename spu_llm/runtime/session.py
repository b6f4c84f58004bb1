"""The front door: one secure function, three ways to run it.

    step = SecureFunction(fn, owners)          # an ordinary JAX function and who owns its inputs
    PlaintextSession().call(step, *args)       # plain JAX: the reference
    simulate(lambda s: s.call(step, ...))      # two parties as two threads of this process
    PartySession(...)                          # one of two processes, inside a worker

A driver (decoding, a benchmark) is a function of a session, the same at both parties; `local`
marks what only one of them does.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from spu_llm.compiler.demand import DryRun, Need, Needs, make, set_up
from spu_llm.compiler.plan import Plan, Run, make_plan
from spu_llm.core.channel import (
    CountingChannel,
    LinkChannel,
    SealedChannel,
    Traffic,
    agree_on_key,
)
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import ManifestMismatch
from spu_llm.core.ledger import Ledger
from spu_llm.core.meter import Meter
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Bool,
    Owner,
    Private,
    Public,
    Value,
    decode,
    low_bits,
)
from spu_llm.offline import peer_directories as pairing
from spu_llm.offline.pool import Pool
from spu_llm.offline.silent.products import SilentProducts
from spu_llm.offline.supply import Supply
from spu_llm.runtime.executor import Executor, check_owner, program_of, run_alone_at
from spu_llm.runtime.spu_runtime import SpuRuntime, create_memory_link

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SecureFunction:
    """`fn(*args)` with the owner of each argument (every leaf of a pytree has the same one)."""

    fn: Callable[..., Any]
    owners: tuple[Owner, ...]
    name: str
    _plans: dict[Any, tuple[Plan, Any]] = field(default_factory=dict, repr=False)

    def plan(self, *args: Any) -> tuple[Plan, Any]:
        """Plan and result structure for arguments of these shapes (arrays or values)."""
        leaves, tree = jax.tree.flatten(args)
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in leaves]
        key = (tree, tuple((s.shape, s.dtype) for s in shapes))
        if key not in self._plans:
            counts = [len(jax.tree.leaves(a)) for a in args]
            owners = [o for o, n in zip(self.owners, counts, strict=True) for _ in range(n)]
            out_tree = jax.tree.structure(jax.eval_shape(lambda xs: self._flat(tree, xs), shapes))

            def flat(*xs: Any) -> list[Any]:
                return jax.tree.leaves(self._flat(tree, xs))

            self._plans[key] = self._make_plan(flat, shapes, owners), out_tree
        return self._plans[key]

    def _make_plan(
        self, flat: Callable[..., list[Any]], shapes: Sequence[Any], owners: Sequence[Owner]
    ) -> Plan:
        return make_plan(flat, shapes, owners)

    def _flat(self, tree: Any, leaves: Sequence[Any]) -> Any:
        return self.fn(*jax.tree.unflatten(tree, leaves))


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


def public(value: Any) -> Public:
    """A value both parties know from the program's public course."""
    return Public(np.asarray(value))


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
        return _private(owner, work(), shape, dtype)

    def get(self, value: Value) -> np.ndarray | None:
        return _plain(value)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Public | Private) else value


def _private(owner: int, plain: Any, shape: tuple[int, ...], dtype: Any) -> Private:
    array = np.asarray(plain, dtype)
    if array.shape != tuple(shape):
        raise ValueError(f"expected shape {tuple(shape)}, found {array.shape}")
    return Private(owner, tuple(shape), np.dtype(dtype), array)


class PartySession:
    """One party of two, on an SPU link; `close` it in the end when it has a pool on disk."""

    def __init__(
        self,
        link: Any,
        config: SpuConfig,
        *,
        own: Prg | None = None,
        profile: bool = True,
        pool_dir: Path | None = None,
        hints_dir: Path | None = None,
    ) -> None:
        """`pool_dir`: where correlated randomness outlives the session, if the peer has such a
        directory, too; in memory by default. `hints_dir`: the same for hints of silent products,
        whatever the peer has.
        """
        self.rank: int = link.rank
        self.meter, self.ledger = Meter(), Ledger()
        wire = LinkChannel(link.spawn())
        key = agree_on_key(wire)
        self._channel = CountingChannel(SealedChannel(wire, key, self.rank))
        own = own or Prg.from_os()
        name = hashlib.sha256(b"pool" + key).digest()
        before = dataclasses.replace(self._channel.traffic)
        self.pool_folder = pairing.agree(self._channel, pool_dir)
        self.pool = Pool(self.rank, own, self._make, session=name, directory=self.pool_folder)
        try:
            self._agree_on_pool(before)
            self._spu = SpuRuntime(link, config, profile=profile)
            self.products = SilentProducts(
                self.rank, own, self._channel, self.meter, directory=hints_dir
            )
        except BaseException:
            self.pool.close()
            raise
        common = Prg(hashlib.sha256(b"common" + key).digest())
        self.supply = Supply(self.pool, self.products)
        self.party = Party(
            self.rank, self._channel, own, config.frac_bits, self.supply, common, self.ledger
        )
        self._agreed: set[str] = set()
        run_alone = functools.partial(run_alone_at, self.rank, config.frac_bits)
        self._dry_run = DryRun(self.rank, config.frac_bits, run_alone)
        self._executor = Executor(
            self.party, self._channel, self._spu, self.meter, self._dry_run, self._make_all
        )
        self.on_batch: Callable[[int, int], None] = lambda made, total: None

    @property
    def finished(self) -> int:
        """How many messages and pieces of work are done: it stands still when this party does."""
        return self._channel.traffic.messages + len(self.meter.entries)

    def close(self) -> None:
        """Put unused correlated randomness back on disk and wait until the peer has come to the
        end, too: it has then got all that this party sent. Only after success.
        """
        self.pool.close()
        self._channel.send(b"end")
        self._channel.recv()
        self._channel.close()

    def warm_up(self) -> None:
        """Oblivious transfer set-up and encryption contexts, before any secret is used."""
        started = time.perf_counter()
        traffic = self._spu.warm_up()
        self.meter.record(
            "segment", "warm-up", "warm-up", time.perf_counter() - started, traffic
        )

    def prepare(self, function: SecureFunction, *args: Any) -> None:
        """Compile for arguments of these shapes and agree with the peer on the program."""
        plan, _ = function.plan(*args)
        self._agree(function.name, plan)

    def call(self, function: SecureFunction, *args: Any) -> Any:
        plan, out_tree = function.plan(*args)
        self._agree(function.name, plan)
        leaves = jax.tree.leaves(args)
        for i, (value, owner) in enumerate(zip(leaves, plan.input_owners, strict=True)):
            check_owner(f"{function.name}, argument {i}", value, owner)
        return jax.tree.unflatten(out_tree, self._executor.run(function.name, plan, leaves))

    def needs(self, function: SecureFunction, *args: Any) -> tuple[Needs, Any]:
        """What a call would take and cost, and stand-ins for its results; both parties find the
        same. args: values, or shapes with a dtype; the provider's weights must be values where
        material that is bound to them is to be made.
        """
        plan, out_tree = function.plan(*args)
        needs, results = self._dry_run.run(plan, jax.tree.leaves(args))
        return needs, jax.tree.unflatten(out_tree, results)

    def set_up(self, needs: Needs) -> None:
        """Bring what products with weights take once: hints, which outlive the session."""
        set_up(self.supply, needs)

    def make(self, needs: Needs) -> None:
        """Make what the supply lacks of `needs`, in phase "offline"; `on_batch` hears of it."""
        with self.meter.in_phase("offline"):
            make(self.supply, needs, self.on_batch)

    def _make_all(self, wanted: Sequence[Need]) -> None:
        if self.party.supply is self.supply:  # and no study's own source
            self.make(Needs.of(wanted))

    def make_ready(self, function: SecureFunction, *args: Any) -> None:
        with self.meter.in_phase("offline"):
            self.make(self.needs(function, *args)[0])

    def local(self, owner: int, work: Callable[[], T]) -> T | None:
        return work() if owner == self.rank else None

    def private(
        self, owner: int, work: Callable[[], Any], shape: tuple[int, ...], dtype: Any
    ) -> Private:
        if owner == self.rank:
            return _private(owner, work(), shape, dtype)
        return Private(owner, tuple(shape), np.dtype(dtype), None)

    def get(self, value: Value) -> np.ndarray | None:
        if isinstance(value, Public | Private):
            return value.value
        raise TypeError(f"{value} is shared; only `reveal` opens it")

    def _make(self, correlation: Correlation, masks: list[np.ndarray]) -> list[np.ndarray]:
        """One chunk of correlated randomness from SPU, metered as offline wherever it falls."""
        with self.meter.in_phase("offline"):
            started = time.perf_counter()
            results, traffic = self._spu.make(correlation, masks)
            seconds = time.perf_counter() - started
            self.meter.record("pool", correlation.name, "", seconds, traffic)
        return results

    def _agree_on_pool(self, before: Traffic) -> None:
        """Both parties use what both have kept, from the same unit on."""
        self._channel.send(self.pool.inventory())
        self.pool.resume(self._channel.recv())
        if self.pool_folder is not None:
            for learner in (CLIENT, PROVIDER):
                self.ledger.declare(learner, "which sessions had the other one's pool directory")
        self.meter.record("control", "agree on pool", "", 0.0, self._channel.traffic.since(before))

    def _agree(self, name: str, plan: Plan) -> None:
        """Both parties run the same plan of the same executables, or neither sends a share."""
        if plan.digest in self._agreed:
            return
        before = dataclasses.replace(self._channel.traffic)
        content = hashlib.sha256(plan.digest.encode())
        for step in plan.steps:
            if isinstance(step, Run) and not step.local:
                content.update(program_of(step, plan).executable.code)
        mine = content.digest()
        self._channel.send(mine)
        theirs = self._channel.recv()
        traffic = self._channel.traffic.since(before)
        self.meter.record("control", "agree on plan", name, 0.0, traffic)
        if theirs != mine:
            raise ManifestMismatch(
                f"the parties' programs differ: {name}: {mine.hex()[:12]} here, "
                f"{theirs.hex()[:12]} at the peer"
            )
        self._agreed.add(plan.digest)

_simulations = itertools.count()


class Simulation:
    """Both parties as two threads of this process, on an in-memory link; for tests and notebooks.

    `seed` fixes the parties' own random streams (SPU's stay random).
    """

    def __init__(self, config: SpuConfig | None = None, *, seed: int | None = None) -> None:
        self._name = f"simulation-{next(_simulations)}"
        self._config = config or SpuConfig()
        self._seed = seed
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
                    session = PartySession(link, self._config, own=own, profile=rank == CLIENT)
                self._done.put((rank, program(session), None))
            except BaseException as exc:
                self._done.put((rank, None, exc))
        if session is not None:
            session.close()

    def run(self, program: Callable[[PartySession], T]) -> list[T]:
        """`program(session)` at both parties at once; [client's result, provider's result].

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
    """Plaintext of both parties' values; for tests, which hold both."""
    a, b = values
    if isinstance(a, Arith) and isinstance(b, Arith):
        return decode(a.words + b.words, a.dtype, a.frac_bits)
    if isinstance(a, Bool) and isinstance(b, Bool):
        return decode(low_bits(a.words ^ b.words, a.bits), a.dtype, a.frac_bits)
    for v in (a, b):
        if isinstance(v, Public | Private) and v.value is not None:
            return v.value
    raise TypeError(f"no common form: {a}, {b}")
