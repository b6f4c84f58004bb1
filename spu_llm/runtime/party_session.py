"""One party of two: secure functions run with the peer, correlated randomness is made offline."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from spu_llm.compiler.demand import Demand
from spu_llm.compiler.dry_run import DryRun
from spu_llm.compiler.plan import Plan, Run
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.channel import (
    Channel,
    CountingChannel,
    LinkChannel,
    SealedChannel,
    Traffic,
    agree_on_key,
    round_trip_s,
    say_goodbye,
)
from spu_llm.core.errors import ManifestMismatch, WireError
from spu_llm.core.ledger import Ledger
from spu_llm.core.meter import Meter
from spu_llm.core.party import Party, Source
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import CLIENT, PROVIDER, Private, Public, Value
from spu_llm.offline import peer_directories
from spu_llm.offline.background_producer import ROUND_TRIP_S
from spu_llm.offline.batch_maker import BatchMaker
from spu_llm.offline.ot.transfers import RandomTransfers
from spu_llm.offline.packed.products import PackedProducts
from spu_llm.offline.pool import Pool
from spu_llm.offline.preprocessing import Preprocessing
from spu_llm.offline.sealed_objects import ObjectStore
from spu_llm.offline.silent.products import Receiving, SilentProducts
from spu_llm.offline.slots.products import SlotProducts
from spu_llm.offline.stock import Budget, room_in
from spu_llm.runtime.dry_session import DrySession
from spu_llm.runtime.executor import Executor, check_owner
from spu_llm.runtime.session import Session, private_array
from spu_llm.runtime.spu_runtime import SpuRuntime, compile_segment

T = TypeVar("T")

_NONE = 2**64 - 1  # no number, in `tell`


@dataclass(frozen=True)
class SessionOptions:
    """Options of a session besides its link; all have a default."""

    pool_dir: Path | None = None
    """Where correlated randomness outlives the session, if the peer has such a directory, too; in
    memory by default. With `met` the peer's folder alone.
    """
    inbox_dir: Path | None = None
    """In place of `pool_dir`: the peer's folder, whose pool another session may have, and whose
    inbox gets what is made here.
    """
    budgets: Sequence[Budget] = ()
    """What the pool's files, and those beside them, may take; what is made beyond stays in memory.
    """
    objects: ObjectStore | None = None
    """Object storage, which has results of the pool's batches beside the disk."""
    outside: bool = False
    """Whether what is made here goes there, too: it is for later sessions."""
    hints_dir: Path | None = None
    """Where hints of silent products outlive the session, whatever the peer has."""
    receiving: Receiving = lambda wanted: nullcontext(False)
    """At the client, makes room for hints (`SilentProducts`)."""
    jobs: int = 1
    """Cores that make correlated randomness, the same number at the peer."""
    session: str = ""
    """The session's id, which both supervisors told their workers: who has another one understands
    nothing.
    """
    met: tuple[bytes, bytes] | None = None
    """Both parties' ids, this one's first, where supervisors have told them."""
    prefetches: bool | None = None
    """Whether correlated randomness of a later call is made while one runs, the same at the peer;
    None: where messages take so long that it pays. SPU counts what passes on its link meanwhile as
    its own: channels are then better elsewhere.
    """
    on_batch: Callable[[int, int], None] = lambda made, total: None
    """Hears of batches that a call waits for."""
    on_hint: Callable[[int, int], None] = lambda done, total: None
    """Hears of bytes of hints that have come, and of all."""


class PartySession:
    """One party of two, with SPU on a link; `close` it in the end when it has a pool on disk."""

    def __init__(
        self,
        link: Any,
        config: SpuConfig,
        options: SessionOptions = SessionOptions(),
        *,
        own: Prg | None = None,
        profile: bool = True,
        open_channel: Callable[[], Channel] | None = None,
    ) -> None:
        """Set up SPU, and agree with the peer on keys and on the pool. `own`: this party's secret
        stream, fresh by default. `open_channel`: each call makes one further channel to the peer,
        on any thread, so long as both parties make them in the same order; on SPU's link by
        default.
        """
        self.rank: int = link.rank
        self.meter, self.ledger = Meter(), Ledger()
        own = own or Prg.from_os()
        self._open_channel = open_channel or (lambda: LinkChannel(link.spawn()))
        wire, apart = self._open_channel(), self._open_channel()
        key = hashlib.sha256(agree_on_key(wire) + options.session.encode()).digest()
        self._channel = CountingChannel(SealedChannel(wire, key, self.rank))
        # Apart: some is made while a call runs, which knows nothing of these messages.
        self._correlations = CountingChannel(
            SealedChannel(apart, _derived(b"material", key), self.rank)
        )
        since = self._channel.traffic
        self.pool_folder, self.inbox_folder = self._met(options), options.inbox_dir
        self.objects = options.objects
        self._spu = self._maker = SpuRuntime(link, config, profile=profile)
        if options.jobs > 1:  # more cores, and messages: not for what others wait for
            several = dataclasses.replace(config, max_concurrency=options.jobs)
            self._maker = SpuRuntime(link.spawn(), several, profile=profile)
        self.preprocessing = self._preprocessing(options, key, own.child("material"), since)
        self.party = Party(
            self.rank,
            self._channel,
            own,
            config.frac_bits,
            self.preprocessing,
            Prg(_derived(b"common", key)),
            self.ledger,
        )
        self._agreed: set[str] = set()
        self._ready: list[Any] = []  # plan and arguments of a call that was made ready
        self._dry_run = DryRun(self.rank, config.frac_bits)
        self.executor = Executor(
            self.party, self._channel, self._spu, self.meter, self._dry_run, self.preprocessing
        )
        self.prefetches = self._pays() if options.prefetches is None else options.prefetches

    def _met(self, options: SessionOptions) -> Path | None:
        """Return the folder of this peer's correlated randomness; None unless both keep any."""
        if options.met is None:
            return peer_directories.agree(self._channel, options.pool_dir)
        peer_directories.check_met(self._channel, *options.met)
        return options.pool_dir

    def _preprocessing(
        self, options: SessionOptions, key: bytes, own: Prg, since: Traffic
    ) -> Preprocessing:
        """Return where correlated randomness comes from, with what both parties have kept. `own`: a
        stream that one thread at a time draws from. since: agreeing on it has cost what was sent.
        """
        packed = PackedProducts(
            self.rank, own, _derived(b"packed", key), self._correlations, options.jobs
        )
        transfers = RandomTransfers(
            self.rank,
            own.child("transfers"),
            Prg(_derived(b"transfers", key)),
            self._correlations,
            self._maker.make,
        )
        slots = SlotProducts(
            self.rank, own.child("slots"), _derived(b"slots", key), self._correlations
        )
        maker = BatchMaker(
            packed, transfers, slots, self._correlations, self._maker.make, self.meter
        )
        pool = Pool(
            self.rank,
            own,
            maker,
            session=_derived(b"pool", key),
            directory=self.pool_folder,
            room=lambda: room_in(options.budgets),
            objects=options.objects,
            outside=options.outside,
        )
        try:
            self._agree_on_pool(pool, since)
            products = SilentProducts(
                self.rank,
                own,
                self._correlations,
                self.meter,
                directory=options.hints_dir,
                receiving=options.receiving,
                on_hint=options.on_hint,
                jobs=options.jobs,
            )
        except BaseException:
            pool.close()
            raise
        return Preprocessing(pool, products, maker, self.meter, options.on_batch)

    @property
    def finished(self) -> int:
        """Return how many messages and pieces of work are done: the number stands still when this
        party does.
        """
        messages = self._channel.traffic.messages + self._correlations.traffic.messages
        return messages + len(self.meter.entries)

    def close(self) -> None:
        """Put unused correlated randomness back on disk and wait until the peer has come to the
        end, too: it has then got all that this party sent. Only after success.
        """
        self.stop_prefetching()
        self.preprocessing.pool.close()
        say_goodbye(self._channel)

    def warm_up(self) -> None:
        """Set up oblivious transfer and encryption contexts, before any secret is used."""
        started = time.perf_counter()
        traffic = self._maker.warm_up()
        self.meter.record("segment", "warm-up", "warm-up", time.perf_counter() - started, traffic)

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
        ready = list(map(id, self._ready)) == list(map(id, [plan, *leaves]))
        self._ready = []
        results = self.executor.run(function.name, plan, leaves, ready)
        return jax.tree.unflatten(out_tree, results)

    def demand(self, function: SecureFunction, *args: Any) -> tuple[Demand, Any]:
        """Return what a call would take and cost, and stand-ins for its results; both parties find
        the same demand. args: values, or shapes with a dtype; the provider's weights must be values
        where correlated randomness that is bound to them is to be made.
        """
        plan, out_tree = function.plan(*args)
        demand, results = self._dry_run.run(plan, jax.tree.leaves(args))
        return demand, jax.tree.unflatten(out_tree, results)

    def dry(self) -> DrySession:
        """Return a session that finds, without the peer, what this party's course would take."""
        return DrySession(self._dry_run)

    def set_up(self, demand: Demand) -> None:
        """Bring what products with weights take once: hints, which outlive the session."""
        self.preprocessing.set_up(demand)

    def make(self, demand: Demand) -> None:
        """Make what is lacking of `demand`, in phase "offline"."""
        with self.meter.in_phase("offline"):
            self._take_in(demand)
            self.preprocessing.make(demand)

    def make_batches(self, demand: Demand, most: int) -> None:
        """Make up to `most` batches of what is lacking of `demand`, while nobody waits for it."""
        with self.meter.beside("offline"):
            self._take_in(demand)
            self.preprocessing.make_batches(demand, most)

    @contextmanager
    def supplied_by(self, source: Source) -> Iterator[None]:
        """Take correlated randomness from a study's source during the block: nothing is made."""
        self.party.supply = source
        try:
            yield
        finally:
            self.party.supply = self.preprocessing

    @property
    def _makes(self) -> bool:
        """Return whether correlated randomness is made here, and no study has its own source."""
        return self.party.supply is self.preprocessing

    def preprocess(self, function: SecureFunction, *args: Any) -> Demand:
        with self.meter.in_phase("offline"):
            demand, _ = self.demand(function, *args)
            if self._makes:
                self.make(demand)
                self.preprocessing.lease(demand)
        self._ready = [function.plan(*args)[0], *jax.tree.leaves(args)]
        return demand

    def prefetch(self, course: Callable[[Session], None]) -> None:
        """Make in the background what `course` takes and is not there. `course` goes in a dry
        session through the call that is ready, whose correlated randomness is there, and a later
        one. Nothing is made in the background of a call that has SPU at work itself.
        """
        if not (self.prefetches and self._makes):
            return
        with self.meter.in_phase("offline"):
            dry = self.dry()
            course(dry)
            now, *later = dry.taken()
            if later and not any(isinstance(s, Run) and not s.local for s in now.plan.steps):
                demand = sum([call.demand for call in (now, *later)], Demand())
                self._take_in(demand)
                self.preprocessing.start(demand)

    def stop_prefetching(self) -> None:
        """End what is made in the background after the batches that either party has begun: a
        message each way, if there is any.
        """
        if not self.preprocessing.running:
            return
        before = self._channel.traffic

        def agree(begun: int) -> int:
            self.party.send(np.array([begun], np.uint64))
            return int(self.party.recv((1,))[0])

        with self.meter.in_phase("offline"):
            self.preprocessing.stop(agree)
            traffic = self._channel.traffic.since(before)
            self.meter.record("control", "end of correlated randomness", "", 0.0, traffic)

    def _pays(self) -> bool:
        """Return whether messages take so long that a call leaves time to make correlated
        randomness beside it; the client measures, and both know.
        """
        before = self._channel.traffic
        round_trip = round_trip_s(self._channel, asks=self.rank == CLIENT)
        traffic = self._channel.traffic.since(before)
        self.meter.record("control", "round trip", "", 0.0, traffic)
        told = self.tell(CLIENT, None if round_trip is None else round(1e6 * round_trip))
        if told is None:
            raise WireError("the client told no round trip")
        return told >= 1e6 * ROUND_TRIP_S

    def tell(self, teller: int, number: int | None) -> int | None:
        """Send `teller`'s number, from 0 on, or None, to the other party; return it at both."""
        before = self._channel.traffic
        if self.rank == teller:
            self.party.send(np.array([_NONE if number is None else number], np.uint64))
            told = number
        else:
            received = int(self.party.recv((1,))[0])
            told = None if received == _NONE else received
        self.meter.record("control", "tell", "", 0.0, self._channel.traffic.since(before))
        return told

    def local(self, owner: int, work: Callable[..., T], *args: Any) -> T | None:
        return work(*args) if owner == self.rank else None

    def alone(self, owner: int, work: Callable[..., T], *args: Any) -> T | None:
        if owner != self.rank:
            return None
        with self.preprocessing.paused():
            return work(*args)

    def private(
        self, owner: int, work: Callable[..., Any], shape: tuple[int, ...], dtype: Any, *args: Any
    ) -> Private:
        if owner == self.rank:
            return private_array(owner, work(*args), shape, dtype)
        return Private(owner, tuple(shape), np.dtype(dtype), None)

    def get(self, value: Value) -> np.ndarray | None:
        if isinstance(value, Public | Private):
            return value.value
        raise TypeError(f"{value} is shared; only `reveal` opens it")

    def _agree_on_pool(self, pool: Pool, since: Traffic) -> None:
        """Agree with the peer to use what both have kept, from the same unit on."""
        self._channel.send(pool.inventory())
        pool.resume(self._channel.recv())
        if self.pool_folder is not None or self.inbox_folder is not None:
            for learner in (CLIENT, PROVIDER):
                self.ledger.declare(learner, "which sessions had the other one's pool directory")
        traffic = self._channel.traffic.since(since)
        self.meter.record("control", "agree on pool", "", 0.0, traffic)

    def _take_in(self, demand: Demand) -> None:
        """Take in what others have made for the pool on disk since it was opened, at the same time
        as the peer, where `demand` asks for more than there is.
        """
        self.preprocessing.settle()
        if self.pool_folder is None or not self.preprocessing.lacking(demand.unbound):
            return
        before, pool = self._channel.traffic, self.preprocessing.pool
        self._channel.send(pool.arrived())
        pool.take_in(self._channel.recv())
        self.meter.record("control", "take in", "", 0.0, self._channel.traffic.since(before))

    def _agree(self, name: str, plan: Plan) -> None:
        """Check that both parties run the same plan and executables; else neither sends a share."""
        if plan.digest in self._agreed:
            return
        before = self._channel.traffic
        content = hashlib.sha256(plan.digest.encode())
        for step in plan.steps:
            if isinstance(step, Run) and not step.local:
                content.update(compile_segment(step, plan.owner_of).executable.code)
        own = content.digest()
        self._channel.send(own)
        peer = self._channel.recv()
        traffic = self._channel.traffic.since(before)
        self.meter.record("control", "agree on plan", name, 0.0, traffic)
        if peer != own:
            raise ManifestMismatch(
                f"the parties' programs differ: {name}: {own.hex()[:12]} here, "
                f"{peer.hex()[:12]} at the peer"
            )
        self._agreed.add(plan.digest)


def _derived(label: bytes, key: bytes) -> bytes:
    """Return a key of its own for one purpose."""
    return hashlib.sha256(label + key).digest()
