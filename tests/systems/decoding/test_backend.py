"""A model's forward as SPU segments: the same text, and nothing else in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.family import ModelConfig, Params
from models.family import logits as whole_logits
from models.tokenizer import Tokenizer
from spu_llm.compiler.plan import OpCall, Run
from spu_llm.core.settings import OWN, SPU, SpuConfig
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import SecureModel, build, lengthen, pack, share_weights
from spu_llm.systems.program import SystemPromptShape
from tests.kit.models import LLAMA, PRIVATE, tiny_params
from tests.systems.decoding.requests import (
    PARAMS,
    PROMPT,
    client_side,
    provider_stream,
    request_for,
    run_plaintext,
)

SYSTEM, PREFIX = [50, 51, 52, 53, 54], (30, 31, 32)
NEAR = 0.05  # of a logit: what SPU's functions may be off by, here


@pytest.fixture(scope="module")
def on_spu() -> Iterator[Simulation]:
    with Simulation(SpuConfig().computing(SPU)) as running:
        yield running


def complete(
    simulation: Simulation,
    tokenizer: Tokenizer,
    request: Request,
    config: ModelConfig = PRIVATE,
    held: Params = PARAMS,
    before: SystemPromptShape = SystemPromptShape(),
    system: Sequence[int] = (),
) -> list[Any]:
    """Return, per party, the client's side, the report, the ledger and the session's entries."""

    def program(session: PartySession) -> Any:
        session.ledger.openings.clear()
        session.meter.entries.clear()
        completion = Completion.of(config, request, before, SPU)
        client = session.local(CLIENT, client_side, tokenizer, completion)
        provider = session.local(PROVIDER, provider_stream)
        params = None if session.rank == CLIENT else held
        weights = share_weights(session, config, params)
        text = completion.text(session, () if session.rank == CLIENT else system)
        decoder = completion.decoder(session, weights, text)
        report = generate(session, completion, decoder, client, provider)
        openings = list(session.ledger.openings)
        return client, report, openings, list(session.meter.entries), session.ledger.learned()

    return simulation.run(program)


def segments_and_ops(function: Any, *args: Any) -> tuple[list[Run], list[OpCall]]:
    plan, _ = function.plan(*args)
    segments = [s for s in plan.steps if isinstance(s, Run) and not s.local]
    return segments, [s for s in plan.steps if isinstance(s, OpCall)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [
        request_for(6, 2, 0.8),
        pytest.param(request_for(4, 0, 0.8), marks=pytest.mark.slow),
        pytest.param(request_for(6, 3, 0.0, show_progress=True), marks=pytest.mark.slow),
        pytest.param(request_for(4, 2, 0.8, "race"), marks=pytest.mark.slow),
        pytest.param(request_for(4, 2, 0.8, "post", top_k=40, top_p=0.95), marks=pytest.mark.slow),
    ],
    ids=lambda r: f"{r.verify} {r.draft_length} at {r.temperature}",
)
def test_the_text_is_that_of_plaintext(
    tokenizer: Tokenizer, on_spu: Simulation, small_blocks: None, request_: Request
) -> None:
    """Drafted and standard, sampled and greedy; blocks are lengthened and packed on the way. What
    is opened is what the variant opens, and no bit about ranges, which SPU's functions lack.
    """
    plain, plain_report = run_plaintext(tokenizer, request_)
    (client, report, openings, entries, learned), provider = complete(on_spu, tokenizer, request_)
    assert client.tokens == plain.tokens
    assert report.emitted == plain_report.emitted
    assert openings == provider[2]
    assert not any("ranges" in opened.label for opened in openings)
    assert not any("left their ranges" in line for lines in learned.values() for line in lines)
    if request_.hide_progress:
        assert {o.label for o in openings if o.learner == "provider"} == {"end of text"}
    segments = [e for e in entries if e.kind == "segment" and e.function in ("prefill", "decode")]
    if request_.verify != "post":  # which has segments of its own
        assert len(segments) == 1 + report.steps
    assert not any(e.kind == "hint" for e in entries)


@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
def test_a_forward_is_one_segment(hidden: bool) -> None:
    """All ops of its plan are of the verification; with the own backend most are of the forward."""
    request = request_for(6, 2, 0.8, show_progress=not hidden)
    programs: dict[str, SecureModel] = {}
    for backend in (OWN, SPU):
        completion = Completion.of(PRIVATE, request, backend=backend)
        programs[backend] = build(completion.layout, completion.judge)
    layout, judge = completion.layout, completion.judge
    weights = layout.part.shapes(PRIVATE)
    inputs = [
        jax.tree.map(lambda s: jax.ShapeDtypeStruct((layout.judged, *s.shape), s.dtype), part)
        for part in (
            judge.client_shapes(0, PRIVATE.vocab_size),
            judge.provider_shapes(0, PRIVATE.vocab_size),
        )
    ]
    args = weights, layout.rows_in(len(PROMPT)), *inputs, None, None
    segments, ops = segments_and_ops(programs[SPU].prefill, *args)
    assert len(segments) == 1 and segments[0].owner is Owner.JOINT
    own_segments, own_ops = segments_and_ops(programs[OWN].prefill, *args)
    assert not own_segments
    assert ops and all(op.scope == "verification" for op in ops)
    of_verification = [op for op in own_ops if op.scope == "verification"]
    assert 0 < len(of_verification) < len(own_ops) / 2
    assert Counter(op.op.name for op in ops) == Counter(op.op.name for op in of_verification)
    cache = programs[SPU].prefill.results(*args)[2]
    for function, more in (
        (lengthen(40, SPU), ()),
        (pack(24, 0, SPU), (np.zeros((1, 5), np.int32),)),
    ):
        assert not segments_and_ops(function, *more, cache)[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_text_goes_on_after_the_providers_own(
    tokenizer: Tokenizer, on_spu: Simulation, family: str
) -> None:
    """Public words, a padded text of the provider's, grouped queries and rotary positions: each
    token is the likeliest one, as far as SPU's functions can tell.
    """
    config: ModelConfig = PRIVATE if family == "gpt2" else LLAMA
    held = PARAMS if family == "gpt2" else tiny_params(LLAMA, 5)
    request = replace(request_for(8, 2, 0.0), public_prefix=PREFIX)
    before = SystemPromptShape(8, 7)
    client, _ = complete(on_spu, tokenizer, request, config, held, before, SYSTEM)
    text = [*PREFIX, *SYSTEM, *PROMPT]
    assert len(client[0].tokens) == 8
    for token in client[0].tokens:
        row = np.asarray(whole_logits(held, config, jnp.asarray(text))[-1])
        assert row[token] > row.max() - NEAR
        text.append(token)
