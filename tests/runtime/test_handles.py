"""What is made of weights is known by their content: a copy costs nothing, a change is seen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from protocols.arithmetic.product import linear
from spu_llm.compiler import dry_run, walker
from spu_llm.compiler.plan import Run, make_plan
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core import integers, values
from spu_llm.core.errors import PoolError
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Owner, Private, Public, Stateful, fork
from spu_llm.runtime import spu_runtime
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation, reconstruct
from spu_llm.testing import toy_reshare
from tests.offline.silent_pair import Two, correlation_of, fixed, matrix

C, P, J = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5)).astype(np.float32)
W = RNG.normal(size=(5, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def parties() -> Iterator[Simulation]:
    with Simulation() as running:
        yield running


def scaled_product() -> SecureFunction:
    """Return another function each time, of equal content; its matrix is the provider's own
    work.
    """

    def work(x: Any, w: Any) -> Any:
        return reveal(linear(x, w * 0.5, label="tests handles"), to=C, label="y")

    return SecureFunction(work, (C, P), "scaled product")


def segment() -> SecureFunction:
    """Return another function each time, of equal content, with a product by SPU."""
    return SecureFunction(lambda x, w: x @ w, (C, P), "segment")


def arguments(session: PartySession, w: np.ndarray) -> tuple[Private, Private]:
    return (
        session.private(CLIENT, lambda: X, X.shape, np.float32),
        session.private(PROVIDER, lambda: w, w.shape, np.float32),
    )


class Counted:
    """What is done to weights, in this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        patch.setattr(walker, "_plaintext_functions", {})  # of tests before this one
        self._count(patch, integers, "_encoded", lambda *_: True)
        self._count(patch, integers, "digest", lambda *_: True, "digest of a factor")
        self._count(patch, values, "digest", lambda array: array.shape == W.shape)
        self._count(patch, spu_runtime.frontend, "compile", lambda *_, **__: True)
        self._count(patch, walker, "as_function", lambda *_: True)
        self._count(patch, spu_runtime.ShareCodec, "to_spu", lambda _, v: v.shape == W.shape)

    def _count(
        self,
        patch: pytest.MonkeyPatch,
        where: Any,
        name: str,
        counts: Callable[..., bool],
        called: str | None = None,
    ) -> None:
        real = getattr(where, name)

        def counted(*args: Any, **options: Any) -> Any:
            if counts(*args, **options):
                self.calls.append(called or name)
            return real(*args, **options)

        patch.setattr(where, name, counted)

    def take(self) -> list[str]:
        actual, self.calls = sorted(self.calls), []
        return actual


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def made(session: PartySession, since: int) -> list[str]:
    """Hints and batches."""
    return [e.name for e in session.meter.entries[since:] if e.kind in ("hint", "pool")]


def test_a_copy_of_weights_is_prepared_no_second_time(
    parties: Simulation, counted: Counted
) -> None:
    def call(w: np.ndarray) -> Any:
        function = scaled_product()

        def program(session: PartySession) -> tuple[list[str], np.ndarray | None]:
            mark = len(session.meter.entries)
            actual = session.get(session.call(function, *arguments(session, w)))
            return made(session, mark), actual

        return parties.run(program)

    (first, y), _ = call(W)
    assert "masked product tests handles 5 3" in first and "hints of 1 matrices" in first
    done = counted.take()
    for once in ("_encoded", "digest of a factor", "as_function"):
        assert done.count(once) == 1, once
    for w in (W.copy(), np.asfortranarray(W)):
        (again, y_again), _ = call(w)
        assert again == []
        # The digest of what `w * 0.5` gives, to know it by; nothing else.
        assert counted.take() == ["digest"]
        np.testing.assert_allclose(y_again, y, atol=1e-4)
    np.testing.assert_allclose(y, X @ W / 2, atol=1e-4)


def test_other_weights_under_a_name_are_noticed(parties: Simulation) -> None:
    """Before anything is sent; a dry run finds them, too."""
    function = scaled_product()

    def program(session: PartySession) -> Any:
        for w in (W, W.copy()):
            session.set_up(session.demand(function, *arguments(session, w))[0])
        demand, _ = session.demand(function, *arguments(session, W + 1))
        before = session.finished
        if session.rank == PROVIDER:
            with pytest.raises(PoolError, match="other weights than before"):
                session.set_up(demand)
        assert session.finished == before
        return [session.demand(function, *arguments(session, w))[0] for w in (W, W + 1)]

    _, demands = parties.run(program)
    one, other = (d.correlations["masked product tests handles 5 3"].fixed for d in demands)
    assert one.digest != other.digest
    with pytest.raises(PoolError, match="other weights than before"):
        demands[0] + demands[1]
    np.testing.assert_array_equal(other.entries, np.round((W + 1) / 2 * 2.0**18))


@pytest.fixture
def runs_of_ops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Yield a list that has an entry for every op which a dry run has run."""
    runs: list[int] = []
    source = dry_run._Source

    def counted() -> Any:
        runs.append(1)
        return source()

    monkeypatch.setattr(dry_run, "_Source", counted)
    return runs


def test_a_dry_run_with_a_copy_looks_nothing_up_again(
    parties: Simulation, runs_of_ops: list[int]
) -> None:
    function = SecureFunction(lambda x, w: linear(x, w, label="tests handles, dry"), (C, P), "dry")

    def program(session: PartySession, w: np.ndarray) -> int:
        return session.demand(function, *arguments(session, w))[0].cost.messages

    collected = []
    for w in (W, W.copy(), W + 1, W.copy()):
        parties.run(lambda session, w=w: program(session, w))  # type: ignore[misc]
        collected.append(len(runs_of_ops))
    # The client finds all in its first run; the provider keeps one matrix for each name.
    assert collected == [2, 2, 3, 4]


def test_a_dry_run_keeps_so_many_results(
    runs_of_ops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a position that moves on, the last ones; what all steps have in common is found."""
    monkeypatch.setattr(dry_run, "_KEPT", 4)

    def work(x: Any, at: Any) -> Any:
        return reveal(jax.lax.dynamic_slice_in_dim(x, at, 2), to=C, label="y")

    function = SecureFunction(work, (J, Owner.PUBLIC), "moving")
    kept = dry_run.DryRun(CLIENT, 18)
    for at in range(20):
        args = jax.ShapeDtypeStruct((32,), np.float32), Public(np.asarray(at, np.int32))
        demand, _ = kept.run(function.plan(*args)[0], args)
        assert demand.cost.messages == 1
        assert len(kept._found) <= 4
    assert len(runs_of_ops) == 1


def test_what_a_call_takes_is_found_once(
    parties: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `preprocess`, or else when ops run side by side; again for the next call."""
    asked: list[int] = []
    takes = dry_run.DryRun.takes

    def counted(self: dry_run.DryRun, *call: Any) -> Any:
        asked.append(1)
        return takes(self, *call)

    monkeypatch.setattr(dry_run.DryRun, "takes", counted)
    function = SecureFunction(
        lambda x, y: (toy_reshare(x, rounds=1), toy_reshare(y, rounds=2)), (J, J), "two ops"
    )
    args = [Arith(np.zeros(3, np.uint64), np.dtype(np.float32), 18) for _ in range(2)]

    def program(session: PartySession, ready: bool) -> None:
        if ready:
            session.preprocess(function, *args)
        session.call(function, *args)

    for ready, actual in ((False, 4), (True, 4), (False, 8)):
        parties.run(lambda session, ready=ready: program(session, ready))  # type: ignore[misc]
        assert len(asked) == actual


def test_weights_inside_spu(parties: Simulation, counted: Counted) -> None:
    def product(w: np.ndarray) -> np.ndarray:
        function = segment()
        return reconstruct(
            parties.run(lambda session: session.call(function, *arguments(session, w)))
        )

    np.testing.assert_allclose(product(W), X @ W, atol=1e-3)
    assert counted.take() == ["compile", "digest", "to_spu", "to_spu"]
    np.testing.assert_allclose(product(W.copy()), X @ W, atol=1e-3)
    assert counted.take() == ["digest"]
    np.testing.assert_allclose(product(W + 1), X @ (W + 1), atol=1e-3)
    assert counted.take() == ["digest", "to_spu"]  # at the provider; the client has nothing to set


def test_weights_are_read_once(counted: Counted) -> None:
    """Whatever is asked of a value: its digest is computed when it is first needed."""
    value = Private(PROVIDER, W.shape, W.dtype, W)
    assert counted.take() == []
    for _ in range(3):
        integers.factor_of(value, 18)
        assert value.digest == Private(PROVIDER, W.shape, W.dtype, W).digest
    assert counted.take().count("digest") == 4
    assert Public(W).digest == value.digest != Public(W.T).digest != Public(W.T.copy() + 1).digest


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w + 1,
        lambda w: w.T,
        lambda w: w.reshape(3, 5),
        lambda w: w.astype(np.float64),
        lambda w: w.view(np.int32),
    ],
)
def test_digests_tell_contents_apart(other: Callable[[np.ndarray], np.ndarray]) -> None:
    assert values.digest(W) == values.digest(np.asfortranarray(W)) != values.digest(other(W))


def test_digests_stay_with_the_provider() -> None:
    """Neither printed nor sent: a hint is offered by the digest of the hint."""
    w = matrix(1, 3, 2)
    value = Private(PROVIDER, w.shape, w.dtype, w)
    assert value.digest not in repr(value) and "encodings" not in repr(value)
    two = Two()
    two.take(correlation_of(3, 2), 4, w)
    factor = fixed(PROVIDER, w)
    assert factor is not None
    sent = b"".join(two.wires[PROVIDER].sent)
    for digest in (value.digest, factor.digest):
        assert digest.encode() not in sent and bytes.fromhex(digest) not in sent
    with pytest.raises(AssertionError):
        _ = Private(PROVIDER, w.shape, w.dtype, None).digest


# ---- programs


def runs(fn: Callable[..., Any], *owners: Owner) -> list[Run]:
    shapes = [jax.ShapeDtypeStruct((3,), np.float32)] * len(owners)
    plan = make_plan(lambda *xs: [fn(*xs)], shapes, owners)
    return [step for step in plan.steps if isinstance(step, Run)]


def test_runs_of_equal_content_have_one_digest() -> None:
    table = np.arange(3, dtype=np.float32)
    same = [runs(lambda x: x * table.copy() + 1.0, C)[0].digest for _ in range(2)]
    others = [
        runs(lambda x: x * table + 2.0, C),
        runs(lambda x: x * -table + 1.0, C),
        runs(lambda x: x - table, C),
        runs(lambda x, y: x * table + y, C, C),
    ]
    assert same[0] == same[1]
    assert len({same[0], *(steps[0].digest for steps in others)}) == 5


def test_constants_inside_a_loop_are_content() -> None:
    def loop(table: np.ndarray) -> Callable[[Any], Any]:
        return lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * table, x)

    one, same, other = (runs(loop(np.full(3, v, np.float32)), C) for v in (1.5, 1.5, 2.5))
    assert [r.digest for r in one] == [r.digest for r in same] != [r.digest for r in other]


# ---- state


class Subclass(Arith):
    """Nothing but another class."""


def test_only_what_says_so_has_state() -> None:
    plain = Subclass(np.ones(2, np.uint64), np.dtype(np.float32), 18)
    assert not isinstance(plain, Stateful) and fork([plain, 3]) == [plain, 3]
    assert dry_run._key([plain], "op") == dry_run._key([copy.copy(plain)], "op") is not None
