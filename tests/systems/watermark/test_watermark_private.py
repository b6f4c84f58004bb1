"""Marked noise in private completions: the text, its distribution, what is kept of it, and who sees
what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from models.draft import Drafter
from models.family import logits as whole_logits
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.race import ClientInput, Race, RaceOutcome
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from spu_llm.service import programs
from spu_llm.service.agreeing import job_of, of_client, of_provider, task_of
from spu_llm.service.task import Task
from spu_llm.systems.decoding import completion
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.records import ClientInputs, RulesModule
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.watermark.detecting import marks_of
from spu_llm.systems.watermark.detecting import uniforms as numbers_of
from spu_llm.systems.watermark.history import History, packed, unpacked
from spu_llm.systems.watermark.keys import KeyFile, Scheme, token_unit
from spu_llm.systems.watermark.marked_race import MarkedRace
from spu_llm.systems.watermark.private_text import USED, Mark
from spu_llm.systems.watermark.race_marks import (
    MarkedNoise,
    context_of,
    gumbel,
    race_text,
    uniforms,
)
from spu_llm.systems.watermark.scores import log_p
from spu_llm.systems.watermark.units import Unit
from tests.kit.models import PRIVATE, PUBLIC, VOCAB, endless, tiny_params
from tests.kit.pair import Pair
from tests.protocols.verifying import two_parties
from tests.systems.watermark.chains import FALSE_ALARM, NEXT, START, Chain, key_of, p_value
from tests.systems.watermark.winners import winners_of

PARAMS, DRAFT_PARAMS = endless(tiny_params(PRIVATE, 1)), endless(tiny_params(PUBLIC, 2))
LOGITS = jax.jit(lambda tokens: whole_logits(PARAMS, PRIVATE, tokens))
PROMPT = [40, 41, 42, 43]
RACE = Scheme(4, method="race")


def asked(new: int, drafts: int) -> Completion:
    return Completion.of(PRIVATE, Request(len(PROMPT), new, drafts, 0.8, "race"))


def noise_of(number: int, history: History, ngram: int = 4) -> MarkedNoise:
    return MarkedNoise(key_of(number), ngram, VOCAB, history, Prg.from_seed(number, "private"))


def side_of(
    tokenizer: Tokenizer,
    completion: Completion,
    noise: MarkedNoise | None,
    used: Callable[[bytes], None] = lambda names: None,
) -> ClientSide:
    """Return a client with marked noise, or without."""
    race = completion.verifier
    assert isinstance(race, Race)
    drafter = Drafter(PUBLIC, DRAFT_PARAMS, 80) if completion.request.draft_length else None
    rule = race if noise is None else MarkedRace(race, noise, len(PROMPT), used)
    streams = Streams(Prg.from_seed(8, "drafts"), Prg.from_seed(8, "sampling"))
    return ClientSide(list(PROMPT), tokenizer, drafter, rule, streams)


def in_the_clear(side: ClientSide, completion: Completion) -> Any:
    session = PlaintextSession()
    decoder = completion.decoder(session, share_weights(session, PRIVATE, PARAMS))
    return generate(session, completion, decoder, side, Prg.from_seed(8, "joint"))


def expected_text(noise: MarkedNoise, tokens: int) -> list[int]:
    """Return a race in the clear, token by token, with the private model's own distribution."""

    def distribution(text: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros(PRIVATE.context, np.int32)
        padded[: len(text)] = text
        return Sampling(0.8).distribution(np.asarray(LOGITS(padded))[len(text) - 1])

    return list(race_text(distribution, noise, tuple(PROMPT), tokens, frozenset())[0])


def test_no_context_marks_twice_in_a_second_text(tokenizer: Tokenizer) -> None:
    """60 tokens, drafts included: what a race with the same noise gives; the mark is found under
    its key alone. Then the same prompt once more, after the first text's history.
    """
    plan, history, marked = asked(60, 3), History(), []
    for turn in range(2):
        before, kept = History.of(history.packed()), History()
        side = side_of(
            tokenizer, plan, noise_of(5, before), lambda names, kept=kept: kept.add(unpacked(names))
        )
        report = in_the_clear(side, plan)
        noise = noise_of(5, before)
        assert side.tokens == expected_text(noise_of(5, before), 60), turn
        assert 0 < report.accepted < report.drafted
        for i in range(60):
            text = side.tokens[:i]
            row = gumbel(uniforms(key_of(5), context_of(text, 4), VOCAB))
            if np.array_equal(noise.row(text), row):
                marked.append(context_of(text, 4))
        # What was kept are the contexts of all tokens of whole steps.
        names = noise.names(side.tokens, 0, 60)
        assert names <= unpacked(kept.packed()) and len(kept) <= len(names) + 3
        history.add(unpacked(kept.packed()))
        if not turn:
            assert len(marked) > 40
            assert log_p_under(5, side.tokens) < math.log(1e-6) < log_p_under(6, side.tokens)
    assert len(marked) == len(set(marked)) > 60 and () in marked


def log_p_under(key: int, tokens: Sequence[int]) -> float:
    """Return log p of tokens under a key."""
    placed = [Unit(token_unit(token), i, i + 1) for i, token in enumerate(tokens)]
    numbers = numbers_of(marks_of(KeyFile(key_of(key), RACE), placed))
    return log_p(numbers, RACE.family, "fisher", 2, 1)


@pytest.mark.slow
def test_the_provider_sees_the_same_with_a_mark_and_without(
    tokenizer: Tokenizer, own_simulation: Simulation
) -> None:
    """Two parties write the marked text of the clear, by the messages of a race without a mark, of
    the same sizes in the same order; neither learns another thing.
    """
    plan = asked(5, 2)

    def run(marked: bool) -> Any:
        def program(session: PartySession) -> Any:
            session.ledger.openings.clear()
            began = len(session.meter.entries)
            noise = noise_of(5, History()) if marked else None
            client = session.local(CLIENT, side_of, tokenizer, plan, noise)
            provider = session.local(PROVIDER, Prg.from_seed, 8, "joint")
            weights = share_weights(session, PRIVATE, PARAMS if session.rank == PROVIDER else None)
            report = generate(session, plan, plan.decoder(session, weights), client, provider)
            sent = [  # the second run finds that both parties have agreed on its plans
                (e.phase, e.kind, e.name, e.function, e.traffic)
                for e in session.meter.entries[began:]
                if e.phase in ("prefill", "decode") and e.name != "agree on plan"
            ]
            return client and client.tokens, report.steps, sent, session.ledger.learned()

        return own_simulation.run(program)

    (tokens, steps, *of_client), (_, _, *of_provider) = run(True)
    assert tokens == expected_text(noise_of(5, History()), 5)
    (others, other_steps, *plain_client), (_, _, *plain_provider) = run(False)
    assert others != tokens and steps == other_steps
    assert of_client == plain_client and of_provider == plain_provider
    assert sum(traffic.messages for *_, traffic in of_provider[0]) > 20


# ---- the distribution


def played(
    rule: MarkedRace,
    tokens: int,
    drafts: int,
    race: Callable[[np.ndarray, np.ndarray], RaceOutcome] = winners_of,
) -> tuple[int, ...]:
    """Races of the chain, whose public model has other rows."""
    text, streams = [0], Streams(Prg.from_seed(0, "unused"), Prg.from_seed(0, "unused"))

    def row(model: np.ndarray, text: list[int]) -> np.ndarray:
        return np.log(model[text[-1]] if len(text) > 1 else START)

    while len(text) <= tokens:
        drafted: list[int] = []
        for _ in range(drafts):
            logits = row(NEXT[::-1], [*text, *drafted])
            drafted.append(rule.propose(logits, len(text) + len(drafted), streams)[0])
        noise = rule.client_input(drafted, np.zeros((drafts, 3)), len(text), streams).noise
        rows = np.stack([row(NEXT, [*text, *drafted[:i]]) for i in range(drafts + 1)])
        outcome = race(rows + noise, np.array(drafted))
        k, token = rule.resolve(outcome, drafted, np.zeros((1, 3)), lambda: 0.5)
        text += [*drafted[:k], token]
    return tuple(text[1 : tokens + 1])


@pytest.mark.parametrize("kept", [True, False])
def test_texts_of_a_key_together_have_the_models_distribution(kept: bool) -> None:
    """Two texts of two tokens under each of 1,500 keys, n-grams of two, one draft a step: all four
    tokens have the distribution of unmarked ones. False alarm: 1e-6. Where the second text does not
    know of the first, it does not pass.
    """
    row = lambda text: NEXT[text[-1]] if text else START  # noqa: E731
    distribution = {(a, b): float(row(())[a] * row((a,))[b]) for a in range(3) for b in range(3)}
    both = {
        (one, two): distribution[one] * distribution[two]
        for one in distribution
        for two in distribution
    }
    drawn = []
    for number in range(1500):
        history, texts = History(), []
        for _ in range(2):
            before = History.of(history.packed() if kept else b"")
            noise = MarkedNoise(key_of(number), 2, 3, before)
            rule = MarkedRace(
                Race(Sampling()), noise, 1, lambda names, h=history: h.add(unpacked(names))
            )
            texts.append(played(rule, 2, 1))
        drawn.append(tuple(texts))
    assert (p_value(drawn, both) > FALSE_ALARM) == kept


def test_two_parties_play_marked_races(simulation: Simulation) -> None:
    """Drafts, noise and rows on shares: the text of a race in the clear."""

    def race(rows: np.ndarray, drafts: np.ndarray) -> RaceOutcome:
        client, provider = two_parties(
            simulation, "race hidden", rows, ClientInput(drafts, None), None
        )
        assert provider.outcome.token is None and provider.accepted is None
        return client.outcome  # type: ignore[no-any-return]

    def noise() -> MarkedNoise:
        return MarkedNoise(key_of(3), 3, 3, History(), Prg.from_seed(3, "private"))

    told: list[bytes] = []
    text = played(MarkedRace(Race(Sampling()), noise(), 1, told.append), 20, 3, race)
    chain = Chain(Prg.from_seed(0, "unused"))
    assert text == race_text(chain.distribution, noise(), (0,), 20, frozenset())[0]
    assert 5 <= len(told) < 20


# ---- on its way


def mark_of(number: int) -> RulesModule:
    used = packed([b"12345678", b"abcdefgh"]).hex()
    return Mark([key_of(number).secret.hex()], 4, [used]).rules


def test_the_key_goes_to_the_clients_worker_alone() -> None:
    program, request = programs.find("completion"), Request(4, 9, 2, 0.8, "race")
    text: Any = type("Text", (), {"digest": "x"})
    agreed = of_provider(PRIVATE, text, "local", 1) | of_client(program, request, text, "local", 1)
    inputs = ClientInputs(list(PROMPT), "dir", mark=mark_of(3))
    task = Task.of_line(task_of("client", agreed, inputs, None).line().decode())
    assert job_of(program, task).client == inputs
    secret = key_of(3).secret.hex()
    said = repr(inputs) + repr(agreed)
    assert secret not in said and b"12345678".hex() not in said and secret in task.line().decode()


def test_contexts_are_told_before_their_text(pair: Pair) -> None:
    """As the worker makes its side of its inputs; text of several tokens a step."""
    events: list[tuple[str, dict[str, Any]]] = []
    plan = asked(12, 3)
    inputs = ClientInputs(
        list(PROMPT), str(pair.public), mark=mark_of(4), draft_dir=str(pair.public)
    )
    side = completion.client_side_of(inputs, plan, lambda event, **f: events.append((event, f)))
    in_the_clear(side, plan)
    told: set[bytes] = set()
    shown, decode, noise = "", side.tokenizer.decode, noise_of(4, History())
    for event, fields in events:
        if event == USED:
            told |= unpacked(bytes.fromhex(*fields["names"]))
        else:
            shown += fields["text"]
            # A text of n tokens begins with what is shown, and no shorter one does.
            count = next(n for n in range(13) if decode(side.tokens[:n]).startswith(shown))
            assert noise.names(side.tokens, 0, count) <= told
    assert shown == side.text and events[0][0] == USED and len(told) >= 12
    plain = replace(plan, judge=replace(plan.verifier, noise=False))  # type: ignore[type-var]
    with pytest.raises(InputError, match="--verify race"):
        completion.client_side_of(inputs, plain, lambda event, **fields: None)
