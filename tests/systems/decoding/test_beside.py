"""A completion whose correlated randomness is made in the background of its steps is the one whose
correlated randomness is made before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling
from protocols.verification.variants import verifier
from spu_llm.compiler.demand import Demand
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.dry_session import DrySession
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.decoder import Decoder
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.decoding.session_shape import SessionShape
from tests.kit.models import PRIVATE, save_tokenizer
from tests.systems.decoding.requests import PARAMS, client_side, provider_stream, request_for


class _Foresees(DrySession):
    """Notes what its calls take, and what they were expected to take when they were not yet
    made.
    """

    def __init__(self, session: DrySession) -> None:
        super().__init__(session._dry_run)
        self.expected: list[Demand] = []

    def prefetch(self, course: Any) -> None:
        dry = DrySession(self._dry_run)
        course(dry)
        now, *later = dry.taken()
        self.expected.append(sum((call.demand for call in later), Demand()))


@pytest.mark.parametrize("hidden", [True, False])
def test_the_next_step_is_foreseen(simulation: Simulation, hidden: bool) -> None:
    """Over a block that grows, and one that is packed where progress is hidden: what is made in the
    background a forward is what the next one takes, whichever drafts stay then.
    """
    judge = verifier("token", Sampling(0.8), hide_progress=hidden)
    layout = SessionShape(
        PRIVATE, prompts=(4,), sizes=(8, 12), live_rows=9, hidden=hidden, packs=hidden
    )
    shape = jax.ShapeDtypeStruct

    def program(session: PartySession) -> Any:
        weights = share_weights(session, PRIVATE, None if session.rank == CLIENT else PARAMS)
        dry = _Foresees(session.dry())
        decoder, steps = Decoder(dry, layout, judge, weights), []
        decoder.prefill(shape((1, 4), np.int32), decoder.judge_shapes(1), 3)
        dry.taken()
        for _ in range(4):
            retained = np.arange(3)[None] < 1
            decoder.step(shape((1, 3), np.int32), decoder.judge_shapes(3), retained, 3)
            steps.append(dry.demand())
        units = [
            [{name: n.units for name, n in demand.correlations.items()} for demand in demands]
            for demands in (dry.expected, steps)
        ]
        return units, [len(step.calls) for step in steps]

    client, provider = simulation.run(program)
    assert client == provider
    (expected, steps), _ = client
    assert expected[: len(steps)] == steps
    # A block that is longer, or packed before.
    assert len({tuple(sorted(step.items())) for step in steps}) > 1


def following(request: Request) -> Any:
    """Return what was told of the step after each forward, and how many steps there were; in
    plaintext.
    """
    told: list[int | None] = []

    class Noting(Decoder):
        def prefill(self, prompts: Any, inputs: Any, then: int | None = None) -> Any:
            told.append(then)
            return super().prefill(prompts, inputs, then)

        def step(self, tokens: Any, inputs: Any, retained: Any, then: int | None = None) -> Any:
            told.append(then)
            return super().step(tokens, inputs, retained, then)

    completion = Completion.of(PRIVATE, request)
    session = PlaintextSession()
    decoder = Noting(
        session, completion.layout, completion.verifier, share_weights(session, PRIVATE, PARAMS)
    )
    return told, completion, session, decoder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


@pytest.mark.parametrize(
    ("drafts", "shown", "new"), [(0, False, 3), (0, False, 1), (2, True, 5), (2, False, 5)]
)
def test_none_is_told_to_follow_where_none_can(
    tokenizer: Tokenizer, drafts: int, shown: bool, new: int
) -> None:
    """By what both parties know: with hidden progress the steps alone, however many tokens the
    client has.
    """
    told, completion, session, decoder = following(
        request_for(new, drafts, 0.8, show_progress=shown)
    )
    client = client_side(tokenizer, completion)
    report = generate(session, completion, decoder, client, provider_stream())
    assert len(told) == report.steps + 1
    if not drafts:
        assert told == [1] * (new - 1) + [None]
    elif shown:
        written = np.cumsum([0, *report.emitted[:-1]])
        assert told == [3 if w + 1 < new else None for w in written]
    else:
        assert told == [3 if forward + 1 < new else None for forward in range(len(told))]


@pytest.mark.parametrize("shown", [True, False])
def test_a_client_drafts_alone_where_its_time_is_a_secret(
    tokenizer: Tokenizer, shown: bool
) -> None:
    """What is made in the background of would tell the provider how long drafting takes, and make
    it late.
    """
    _, completion, session, decoder = following(request_for(5, 2, 0.8, show_progress=shown))
    alone: list[Any] = []
    local = session.local

    def noted(owner: int, work: Any, *args: Any) -> Any:
        alone.append((owner, work))
        return local(owner, work, *args)

    session.alone = noted  # type: ignore[method-assign]
    client = client_side(tokenizer, completion)
    report = generate(session, completion, decoder, client, provider_stream())
    assert alone == ([] if shown else [(CLIENT, ClientSide.settle)] * (report.steps + 1))


@pytest.mark.slow
def test_a_completion_with_all_made_beside(tokenizer: Tokenizer) -> None:
    """The same text, messages and bytes of ours, and nothing of it made for nothing, since the
    number of steps is known.
    """
    asked = request_for(50, 0, 0.0)  # more than first batches last for

    def program(session: PartySession) -> Any:
        completion = Completion.of(PRIVATE, asked)
        client = session.local(CLIENT, client_side, tokenizer, completion)
        provider = session.local(PROVIDER, provider_stream)
        params = None if session.rank == CLIENT else PARAMS
        decoder = completion.decoder(session, share_weights(session, PRIVATE, params))
        report = generate(session, completion, decoder, client, provider)
        kinds: dict[Any, Any] = {}
        for e in session.meter.entries:
            exact = e.kind == "op" or "packed" in e.name or "masked" in e.name
            row = kinds.setdefault((e.phase, e.kind, e.name), [0, 0, 0])
            for i, n in enumerate((1, e.traffic.messages, e.traffic.bytes if exact else 0)):
                row[i] += n
        kinds.pop(("offline", "wait", "material"), None)
        beside = sum(e.beside for e in session.meter.entries)
        return client and client.tokens, report.steps, kinds, beside

    collected = []
    for beside in (False, True):
        with Simulation(prefetches=beside) as simulation:
            collected.append(simulation.run(program))
    before, after = collected
    for a, b in zip(before, after, strict=True):
        assert a[:3] == b[:3] and a[3] == 0 and b[3] > 0
    assert before[CLIENT][1] == 49
