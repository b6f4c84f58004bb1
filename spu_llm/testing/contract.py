"""The contract that every protocol op is under."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from spu_llm.errors import WireError
from spu_llm.op import ProtocolOp
from spu_llm.testing.broken import MASK_TWINS, TAMPERINGS, tampering
from spu_llm.testing.run import Case, owner_of, reconstruct_words, run_op, share_inputs
from spu_llm.testing.views import ROWS, columns_of, differences, distinguish
from spu_llm.values import (
    CLIENT,
    PROVIDER,
    Owner,
    Value,
    as_words,
)


class OpContract:
    """Inherit, set `op` and `cases`; see the module docstring.

    `masks` says whether some case makes a party mask what it sends; an op that only opens has none.
    `elementwise` ops treat every element alike; others have a leading axis of rows in every input
    but those at the positions `whole`, which all rows share. `fresh` ops hand out a random sharing
    of their result: when views are compared, an ideal one takes its place, so that a share which
    the peer's masks do not hide is noticed.
    """

    op: ProtocolOp
    cases: Sequence[Case]
    masks = True
    elementwise = True
    whole: Sequence[int] = ()
    fresh = False

    def hidden(self, own: list[Value], peer: list[Value], case: Case) -> list[np.ndarray]:
        """Words [ROWS, ...] under the masks of the peer's messages, where they are not simply its
        inputs or shares that follow from the view. The distinguisher gets them.
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
            for i, value in enumerate(expected):
                found = reconstruct_words([outputs[i] for outputs in outcome.outputs])
                np.testing.assert_array_equal(found, as_words(np.asarray(value)), str(case.forms))

    def test_result_belongs_to_whom_it_should(self) -> None:
        """Each result is held in a form of its declared owner; nothing is readable beyond that."""
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
        """Either direction, on a sealed channel: the receiver ends with a clear error."""
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

    def test_views_are_simulated(self) -> None:
        for case in self._sampled_cases():
            for rank in (CLIENT, PROVIDER):
                found = distinguish(self.op, case, rank, fresh=self.fresh, hidden=self.hidden)
                assert not found, f"{case}, rank {rank}: {found}"

    def test_views_do_not_depend_on_the_secret(self) -> None:
        """To a party that knows nothing of the inputs, the smallest and the largest element look
        the same, its shares of the results included. This needs no simulator.
        """
        for smallest, largest in itertools.pairwise(self._sampled_cases()):
            kinds = [(c.forms, c.static, [x.shape for x in c.inputs]) for c in (smallest, largest)]
            if kinds[0] != kinds[1]:
                continue  # of two cases
            outcomes = run_op(self.op, smallest), run_op(self.op, largest)
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
                found = differences(a, b)
                assert not found, f"{smallest}, rank {rank}: {found}"

    def test_broken_twins_are_caught(self) -> None:
        tried = 0
        for case in self._sampled_cases():
            outcome = run_op(self.op, case)
            for rank in (CLIENT, PROVIDER):
                if not outcome.views[1 - rank].own or not outcome.views[rank].incoming:
                    continue  # the peer masks nothing in this case: no mask to break
                for name, twin in MASK_TWINS.items():
                    found = distinguish(
                        self.op, case, rank, twin, fresh=self.fresh, hidden=self.hidden
                    )
                    assert found, f"{case}: rank {rank} does not notice a {name}"
                    tried += 1
        assert bool(tried) == self.masks

    def _sampled_cases(self) -> list[Case]:
        """Per case, its smallest and largest element in ROWS equal rows: one call, ROWS views."""
        sampled = []
        for case in self.cases:
            inputs = [np.asarray(x) for x in case.inputs]
            if self.elementwise:
                inputs = [x.reshape(-1) for x in inputs]
                order = np.argsort(inputs[0], kind="stable").tolist()
            else:
                order = list(range(len(inputs[0])))
            for i in {order[0], order[-1]} if order else ():
                rows = tuple(
                    x if j in self.whole else np.repeat(x[i : i + 1], ROWS, axis=0)
                    for j, x in enumerate(inputs)
                )
                sampled.append(Case(rows, case.forms, case.static))
        return sampled
