"""Marked completions: the provider finds what the client wrote, which is a race to both."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from models.draft import Drafter
from models.family import logits as whole_logits
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams, gumbel
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding import completion as program
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.program import ProviderInputs, Served
from spu_llm.systems.watermark.aligning import AlignmentPrior, detect
from spu_llm.systems.watermark.guessing import drafts_of
from spu_llm.systems.watermark.sessions import Session, Shape
from tests.kit.models import PRIVATE, PUBLIC, VOCAB, endless, tiny_params
from tests.systems.watermark.chains import key_of

PARAMS, DRAFT_PARAMS = endless(tiny_params(PRIVATE, 1)), endless(tiny_params(PUBLIC, 2))
LOGITS = jax.jit(lambda tokens: whole_logits(PARAMS, PRIVATE, tokens))
PROMPT = [40, 41, 42, 43]
NONCE = bytes(range(16))


def asked(new: int, drafts: int, verify: str = "marked", **more: Any) -> Completion:
    return Completion.of(PRIVATE, Request(len(PROMPT), new, drafts, 0.8, verify, **more))


def session_of(plan: Completion) -> Session:
    shape = Shape(VOCAB, plan.request.draft_length, 1 + plan.request.most_steps(PRIVATE))
    return Session(NONCE, "2026-01-31T12:00:00Z", shape)


def noise_of(number: int) -> Prg:
    """Return the noise as a worker has it."""
    served = Served(stream_key=key_of(number).of_session(NONCE).hex())
    return program.provider_stream(ProviderInputs("model", served=served))


def side_of(tokenizer: Tokenizer, plan: Completion, seed: int = 8) -> ClientSide:
    drafter = Drafter(PUBLIC, DRAFT_PARAMS, 80) if plan.request.draft_length else None
    streams = Streams(Prg.from_seed(seed, "drafts"), Prg.from_seed(seed, "sampling"))
    return ClientSide(list(PROMPT), tokenizer, drafter, plan.verifier, streams)


def in_the_clear(side: ClientSide, plan: Completion, number: int) -> Any:
    session = PlaintextSession()
    decoder = plan.decoder(session, share_weights(session, PRIVATE, PARAMS))
    return generate(session, plan, decoder, side, noise_of(number))


def expected_text(number: int, emitted: list[int], drafts: int) -> list[int]:
    """Token by token, by the rows that the provider drew for forwards that gave so many tokens."""
    rows, row = key_of(number).session(NONCE), np.zeros(PRIVATE.context, np.int32)
    row[: len(PROMPT)] = PROMPT
    at = len(PROMPT)
    for forward, count in enumerate(emitted):
        noise = gumbel(rows.uniform((1 + drafts if forward else 1, VOCAB)))
        for i in range(count):
            scaled = np.asarray(LOGITS(row))[at - 1] / 0.8
            row[at] = int(np.argmax(scaled + noise[i]))
            at += 1
    return row[len(PROMPT) : at].tolist()


@pytest.mark.parametrize("drafts", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_text_by_the_providers_rows_is_found_by_its_key(
    tokenizer: Tokenizer, drafts: int
) -> None:
    """16 tokens in the clear, whatever the client's randomness is; under another key or nonce there
    is no mark.
    """
    plan = asked(16, drafts)
    side = side_of(tokenizer, plan)
    report = in_the_clear(side, plan, 5)
    text = side.tokens
    assert len(text) == 16
    assert text == expected_text(5, report.emitted, drafts)[:16]
    other = side_of(tokenizer, plan, seed=9)
    assert in_the_clear(other, plan, 5).emitted == report.emitted and other.tokens == text
    session, guess = session_of(plan), drafts_of(PUBLIC, DRAFT_PARAMS, text)
    for distributions in (AlignmentPrior.unknown(16), AlignmentPrior.guessed(guess)):
        evidence = detect(key_of(5), [session], text, distributions)
        assert evidence.log_p < math.log(1e-6) and evidence.best == session
        assert detect(key_of(6), [session], text, distributions).log_p > math.log(1e-2)
        strange = Session(bytes(16), session.began, session.shape)
        assert detect(key_of(5), [strange], text, distributions).log_p > math.log(1e-2)
    excerpt = text[4:]
    assert detect(key_of(5), [session], excerpt, AlignmentPrior.unknown(12)).log_p < math.log(1e-2)


def test_what_was_drafted_is_told_by_the_text(tokenizer: Tokenizer) -> None:
    """By the public model, token by token; of a text longer than its context, by windows."""
    tokens = np.random.default_rng(3).integers(1, VOCAB, 150).tolist()
    greedy = jax.jit(lambda t: whole_logits(DRAFT_PARAMS, PUBLIC, t).argmax(axis=-1))
    for i in range(1, 150, 2):  # every second one as it would have drafted it
        first = max(0, (i // 32 - 1) * 32)
        window = np.zeros(64, np.int32)
        window[: i - first] = tokens[first:i]
        tokens[i] = int(greedy(window)[i - first - 1])
    actual = drafts_of(PUBLIC, DRAFT_PARAMS, tokens)
    assert actual[1::2].all() and not actual[0] and actual[::2].mean() < 0.2
    assert drafts_of(PUBLIC, DRAFT_PARAMS, tokens[:1]).tolist() == [False]


@pytest.mark.slow
def test_two_parties_write_marked_text_by_a_races_messages(
    tokenizer: Tokenizer, own_simulation: Simulation
) -> None:
    """The text of the clear; messages of a race in the same order and of the same sizes, and the
    same is learned but for whose the noise is.
    """

    def run(verify: str) -> Any:
        plan = asked(5, 2, verify)

        def party(session: PartySession) -> Any:
            session.ledger.openings.clear()
            began = len(session.meter.entries)
            client = session.local(CLIENT, side_of, tokenizer, plan)
            provider = session.local(PROVIDER, noise_of, 5)
            weights = share_weights(session, PRIVATE, PARAMS if session.rank == PROVIDER else None)
            report = generate(session, plan, plan.decoder(session, weights), client, provider)
            sent = [
                (e.kind, e.name, e.function, e.traffic)
                for e in session.meter.entries[began:]
                if e.phase in ("prefill", "decode") and e.name != "agree on plan"
            ]
            return client and client.tokens, report, sent, list(session.ledger.openings)

        return own_simulation.run(party)

    (tokens, report, sent, openings), (nobody, _, of_provider, _) = run("marked")
    assert nobody is None
    side = side_of(tokenizer, asked(5, 2))
    assert in_the_clear(side, asked(5, 2), 5).emitted == report.emitted and side.tokens == tokens
    assert tokens == expected_text(5, report.emitted, 2)[:5]
    (_, _, plain, plain_openings), (_, _, plain_provider, _) = run("race")
    for own, of_race in ((sent, plain), (of_provider, plain_provider)):
        both = min(len(own), len(of_race))  # texts differ in how many steps they take
        assert both > 20 and own[:both] == of_race[:both]
    told = {(o.learner, o.label, o.count, o.bits) for o in openings}
    assert told == {(o.learner, o.label, o.count, o.bits) for o in plain_openings}
