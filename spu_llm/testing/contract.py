"""The contract that every protocol op is under."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spu_llm.core.errors import WireError
from spu_llm.core.op import ProtocolOp
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, Owner, Value, as_words, owner_of
from spu_llm.testing.broken import MASK_TWINS, TAMPERINGS, HalfReusedMask, tampering
from spu_llm.testing.hiding import Replay, too_few, twice, uncaught, unhidden
from spu_llm.testing.run import (
    Case,
    common_stream,
    reconstruct_words,
    run_op,
    share_inputs,
    wrong_results,
)
from spu_llm.testing.views import ROWS, columns_of, differences, distinguish, ideal_share

_FEW, _MANY = 2, 64 + 5  # elements


class OpContract:
    """Inherit, set `op` and `cases`; see the module docstring.

    `masks` says whether some case makes a party mask what it sends; an op that only opens has none.
    `elementwise` ops treat every element alike; others have a leading axis of rows in every input
    but those at the positions `whole`, which all rows share. `uniform`: all that a party draws, is
    dealt and receives is uniform and independent of both parties' inputs; of other ops the
    simulator says what it looks like. `fresh` ops hand out a random sharing of their result: when
    views are compared, an ideal one takes its place, so that a share which the peer's masks do not
    hide is noticed. `hashes`: parties whose prepared masks are keys of a hash that is fresh in
    every call, so that a unit may serve in two. `nothing_to_compare`: why no party that gets
    messages sees the same kind of view of two secrets.
    """

    op: ProtocolOp
    cases: Sequence[Case]
    masks = True
    elementwise = True
    whole: Sequence[int] = ()
    uniform = True
    fresh = False
    hashes: Sequence[int] = ()
    nothing_to_compare = ""

    def hidden(self, own: list[Value], peer: list[Value], case: Case) -> list[np.ndarray]:
        """Return words [ROWS, ...] under the masks of the peer's messages, where they are not
        simply its inputs or shares that follow from the view. The distinguisher gets them.
        """
        return []

    def test_result_is_the_reference(self) -> None:
        assert self.cases
        for case in self.cases:
            outcome = run_op(self.op, case)
            expected: Any = outcome.modelled
            if expected is None:
                expected = self.op.reference(*case.inputs, **case.static)
            expected = expected if isinstance(expected, tuple | list) else [expected]
            self._check_shapes(case)
            for i, value in enumerate(expected):
                results = reconstruct_words([outputs[i] for outputs in outcome.outputs])
                np.testing.assert_array_equal(results, as_words(np.asarray(value)), str(case.forms))

    def test_result_belongs_to_whom_it_should(self) -> None:
        """Check that each result is held in a form of its declared owner; nothing is readable
        beyond that.
        """
        for case in self.cases:
            outcome = run_op(self.op, case)
            owners = self.op.owners(*map(owner_of, outcome.inputs[CLIENT]), **case.static)
            for outputs in outcome.outputs:
                assert [owner_of(v) for v in outputs] == list(owners), case.forms

    def test_cost_is_as_declared(self) -> None:
        for case in self.cases:
            outcome = run_op(self.op, case)
            cost = self.op.cost(*outcome.inputs[CLIENT], **case.static)
            client, provider = outcome.traffic
            assert client.sent_messages + provider.sent_messages == cost.messages, case.forms
            assert client.sent_bytes == cost.client_to_provider, case.forms
            assert provider.sent_bytes == cost.provider_to_client, case.forms
            assert outcome.rounds == cost.rounds, case.forms
            # Nothing is sent that nobody reads.
            assert client.received_bytes == provider.sent_bytes, case.forms
            assert provider.received_bytes == client.sent_bytes, case.forms

    def test_opens_what_is_declared(self) -> None:
        for case in self.cases:
            outcome = run_op(self.op, case)
            declared = self.op.opens(*outcome.inputs[CLIENT], **case.static)
            for ledger in outcome.ledgers:
                assert ledger.openings == list(declared), case.forms

    def test_tampered_messages_end_it(self) -> None:
        """Tamper with messages in either direction, on a sealed channel: the receiver ends with a
        clear error.
        """
        for case in self.cases:
            cost = self.op.cost(*share_inputs(case)[CLIENT], **case.static)
            sizes = cost.client_to_provider, cost.provider_to_client
            for rank in (r for r in (CLIENT, PROVIDER) if sizes[r]):
                for how in TAMPERINGS:
                    try:
                        run_op(self.op, case, wrap=tampering(rank, how))
                    except WireError as exc:
                        assert "session ends" in str(exc), (how, exc)
                    else:
                        raise AssertionError(f"{case.forms}: a message {how} goes unnoticed")

    def test_messages_are_masked(self) -> None:
        """Check that every bit that a party sends, in every column and round, has a fresh bit of
        its own; for elementwise ops, that there are enough fresh bits also past the first 64 rows.
        """
        sent = 0
        checks = [(case, unhidden) for case in self._small_cases()]
        checks += [(case, too_few) for case in self._long_cases()]
        for case, check in checks if self.masks else ():
            for rank in (CLIENT, PROVIDER):
                replay = Replay(self.op, case, rank)
                wrong = check(replay)
                assert not wrong, f"{case}, rank {rank}: {wrong}"
                sent += replay.total
        assert bool(sent) == self.masks

    def test_each_broken_correlation_is_caught(self) -> None:
        """Check that broken masks of each draw alone are noticed: dropped, or repeating the draw
        before, in one call and, once, across two. Check that wrong results of each correlation are,
        too.
        """
        tried = 0
        cases = [(self.op, case) for case in self._small_cases()]
        cases += [(twice(op), case) for op, case in cases[:1]]
        for (op, case), rank in itertools.product(cases if self.masks else (), (CLIENT, PROVIDER)):
            count, missed = uncaught(op, case, rank, rank not in self.hashes)
            assert not missed, f"{case}, rank {rank} may use {missed}"
            tried += count
        drawn = set()
        for case in self._small_cases():
            drawn |= {t.correlation.name for f in run_op(self.op, case).fresh for t in f.taken}
        assert bool(tried) >= bool(drawn)
        for name in drawn:
            with wrong_results(name):
                assert not self._is_the_reference(), f"results of {name!r} need not be right"

    def _check_shapes(self, case: Case) -> None:
        """Check the op's rule for shapes, where it has one, against its reference."""
        if self.op.shapes is None:
            return
        inputs = [np.asarray(x) for x in case.inputs]
        made = self.op.reference(*inputs, **case.static)
        expected = [np.asarray(x) for x in (made if isinstance(made, tuple | list) else [made])]
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
        actual = self.op.shapes(*given, **case.static)
        assert [(s.shape, s.dtype) for s in actual] == [(s.shape, s.dtype) for s in expected]

    def _is_the_reference(self) -> bool:
        """Return whether results are right 64 times: wrong results of a correlation are in half of
        the runs where wrong bits meet zeros, as they may in an upper gate of a few elements.
        """
        for _ in range(64):
            try:
                self.test_result_is_the_reference()
            except AssertionError:
                return False
        return True

    def test_simulator_reaches_its_output(self) -> None:
        """Check that, from a party's inputs and outputs (ideal outputs of a fresh op), the
        simulator makes a view of the real view's shape.
        """
        for case in self.cases:
            outcome = run_op(self.op, case)
            for rank in (CLIENT, PROVIDER):
                outputs = outcome.outputs[rank]
                if self.fresh:
                    outputs = [ideal_share(v) for v in outputs]
                simulated = self.op.simulate(
                    rank,
                    Prg.from_os(),
                    common_stream(),
                    outcome.inputs[rank],
                    outputs,
                    **case.static,
                )
                real = outcome.views[rank]
                assert [w.shape for w in simulated.own] == [w.shape for w in real.own]
                assert [m.nbytes for m in simulated.incoming] == [m.nbytes for m in real.incoming]

    def test_views_are_simulated(self) -> None:
        for case, rank in itertools.product(self._sampled_cases(), (CLIENT, PROVIDER)):
            differing = self._distinguish(case, rank)
            assert not differing, f"{case}, rank {rank}: {differing}"

    def test_views_do_not_depend_on_the_secret(self) -> None:
        """Check that, to a party that knows nothing of the inputs, the smallest and the largest
        element look the same, its shares of the results included. This needs no simulator.
        """
        compared = 0
        sends = any(v.incoming for c in self.cases for v in run_op(self.op, c).views)
        for smallest, largest in itertools.pairwise(self._sampled_cases()):
            outcomes = run_op(self.op, smallest), run_op(self.op, largest)
            kinds = [(c.forms, c.static, [x.shape for x in c.inputs]) for c in (smallest, largest)]
            same = all(map(np.array_equal, smallest.inputs, largest.inputs))
            if kinds[0] != kinds[1] or same:
                continue  # of two cases
            if any(owner_of(v) is not Owner.JOINT for v in outcomes[0].outputs[CLIENT]):
                continue
            for rank in (CLIENT, PROVIDER):
                held = [owner_of(v) for v in outcomes[0].inputs[rank]]
                own = [o for i, o in enumerate(held) if i not in self.whole]
                knows = Owner.of_rank(rank) in own or Owner.PUBLIC in own
                if knows or (rank == PROVIDER and "degenerate" in smallest.forms):
                    continue
                a, b = (
                    columns_of(o, rank, o.views[rank], outgoing=True, peer=False) for o in outcomes
                )
                differing = differences(a, b)
                assert not differing, f"{smallest}, rank {rank}: {differing}"
                compared += sum(name.startswith("incoming") for name in a)
        assert bool(compared) == (sends and not self.nothing_to_compare), (
            f"{compared} columns of messages compared; a case needs two inputs of one form that "
            "some party does not know"
        )

    def test_broken_twins_are_caught(self) -> None:
        tried = 0
        for case in self._sampled_cases(smallest=False):
            outcome = run_op(self.op, case)
            for rank in (CLIENT, PROVIDER):
                if not outcome.views[1 - rank].own or not outcome.views[rank].incoming:
                    continue  # the peer masks nothing in this case: no mask to break
                replay = Replay(self.op, self._of_rows(case, 2 * _FEW), 1 - rank)
                for name, twin in MASK_TWINS.items():
                    if 1 - rank not in self.hashes:
                        caught = unhidden(replay.by(twin))
                        assert caught, f"{case}: a {name} of {1 - rank} hides all"
                    # Which rows a mask reused once serves is up to its shape.
                    seen = twin is HalfReusedMask or self._distinguish(case, rank, twin)
                    assert seen, f"{case}: rank {rank} does not notice a {name}"
                    tried += 1
        assert bool(tried) == self.masks

    def _distinguish(self, case: Case, rank: int, twin: type[Party] | None = None) -> list[str]:
        return distinguish(
            self.op, case, rank, twin, fresh=self.fresh, uniform=self.uniform, hidden=self.hidden
        )

    def _small_cases(self) -> list[Case]:
        """Return the cases, elementwise ones cut to a few elements."""
        return [self._of_elements(case, _FEW) if self.elementwise else case for case in self.cases]

    def _long_cases(self) -> list[Case]:
        """Return elementwise cases with more elements than a word has bits."""
        cases = self.cases if self.elementwise else ()
        return [self._of_elements(case, _MANY) for case in cases if case.inputs[0].size]

    @staticmethod
    def _of_elements(case: Case, count: int) -> Case:
        flat = [np.asarray(x).reshape(-1) for x in case.inputs]
        count = count if count > _FEW else min(count, flat[0].size)
        return Case(tuple(np.resize(x, count) for x in flat), case.forms, case.static)

    def _of_rows(self, case: Case, count: int) -> Case:
        rows = (
            x if j in self.whole else np.repeat(x[:1], count, axis=0)
            for j, x in enumerate(case.inputs)
        )
        return Case(tuple(rows), case.forms, case.static)

    def _sampled_cases(self, smallest: bool = True) -> list[Case]:
        """Return, per case, its smallest (if asked for) and largest element in ROWS equal rows: one
        call, ROWS views.
        """
        sampled = []
        for case in self.cases:
            inputs = tuple(np.asarray(x) for x in case.inputs)
            if self.elementwise:
                inputs = tuple(x.reshape(-1) for x in inputs)
                order = np.argsort(inputs[0], kind="stable").tolist()
            else:
                order = list(range(len(inputs[0])))
            for i in {order[0 if smallest else -1], order[-1]} if order else ():
                one = tuple(x if j in self.whole else x[i : i + 1] for j, x in enumerate(inputs))
                sampled.append(self._of_rows(Case(one, case.forms, case.static), ROWS))
        return sampled
