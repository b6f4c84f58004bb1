"""A split model whose middle runs on shares: rows and texts are the whole model's, and the provider
sees of a text how long its blocks are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from experiments.common.replay import dry_parties
from experiments.cost_model.workload import of_steps
from models.draft import Drafter
from models.ends import Ends
from models.family import ModelConfig, logits
from models.gpt2 import GPT2Config
from models.hf import save_model
from models.llama import LlamaConfig
from models.split import Split
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.plain import Plain
from spu_llm.compiler.demand import Demand
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession, Session
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding import request
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.preparation import demand_of
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.program import Job, SystemPromptShape
from spu_llm.systems.split import secure
from spu_llm.systems.split.middle import Middle, OpenRows
from spu_llm.systems.split.secure import ends_of
from spu_llm.systems.split.secure_records import MiddleInputs, MiddleRequest
from tests.kit.models import PUBLIC, VOCAB, endless, save_tokenizer, tiny_params
from tests.systems.decoding.watching import Watched

GPT2 = GPT2Config(VOCAB, n_positions=64, n_embd=16, n_layer=3, n_head=2)
LLAMA = LlamaConfig(
    VOCAB,
    max_position_embeddings=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
PARAMS = {GPT2: endless(tiny_params(GPT2, 1)), LLAMA: tiny_params(LLAMA, 6)}
PARAMS[LLAMA]["head"][:, 0] = 0.0  # greedy decoding does not end by chance
DRAFT_PARAMS = endless(tiny_params(PUBLIC, 2))
PROMPT = [40, 41, 42, 43]
ROWS = 24
LOGITS_OFF = 0.05  # at most, by the issue
FALSE_ALARM = 1e-3
ONE_ONE = Split(1, 1)
Between = Callable[[ModelConfig, Split], Simulation]


@pytest.fixture(scope="module")
def between() -> Iterator[Callable[[ModelConfig, Split], Simulation]]:
    """Yield the two parties of one middle: a session has correlated randomness for one."""
    with ExitStack() as stack:

        @functools.cache
        def session_of(config: ModelConfig, split: Split) -> Simulation:
            return stack.enter_context(Simulation())

        yield session_of


# ---- rows: what the client gets of a forward on shares, against the whole model


def forced(
    session: Session,
    config: ModelConfig,
    split: Split,
    steps: Sequence[tuple[list[int], int]],
    hidden: bool,
) -> list[np.ndarray] | None:
    """Return the client's logits of the prompt and of every step, whose tokens are given, with how
    many of them stay; None at the provider.
    """
    layout = SessionShape(
        config, (len(PROMPT),), (ROWS,), live_rows=ROWS, hidden=hidden, part=Middle(split)
    )
    ends = session.local(CLIENT, lambda: Ends(config, PARAMS[config], split, ROWS))
    params = session.local(PROVIDER, lambda: PARAMS[config])
    weights = share_weights(session, config, params, Middle(split))
    decoder = Decoder(session, layout, OpenRows(hidden), weights)

    def up(tokens: list[int], at: int) -> Any:
        given = layout.rows_in(len(tokens))

        def rows() -> Any:
            assert ends is not None
            return ends.up(tokens, at)[None]

        return session.private(CLIENT, rows, given.shape, given.dtype)

    collected: list[np.ndarray] = []

    def down(outcome: Any, end: int, last: int) -> None:
        rows = session.get(outcome)
        if ends is not None:
            assert rows is not None
            collected.append(ends.down(rows[0], end - rows.shape[1], last))

    text, nothing = len(PROMPT), JudgeInputs(None, None)
    down(decoder.prefill(up(PROMPT, 0), nothing).outcome, text, 1)
    retained = None
    for tokens, stay in steps:
        n = len(tokens)
        down(decoder.step(up(tokens, text), nothing, retained).outcome, text + n, n)
        known = ends is not None or not hidden
        retained = np.arange(n)[None] < stay if known else None
        text += stay
    return collected if ends is not None else None


STEPS = [([50, 51, 52], 1), ([60, 61, 62], 3), ([70, 71, 72], 2)]
SPLITS = [
    (LLAMA, ONE_ONE, True),
    *(
        pytest.param(*c, marks=pytest.mark.slow)
        for c in (
            (GPT2, ONE_ONE, False),
            (GPT2, Split(0, 2), True),
            (GPT2, Split(1, 0), True),
            (GPT2, ONE_ONE, True),
            (LLAMA, Split(2, 0), False),
        )
    ),
]


@pytest.mark.parametrize("config,split,hidden", SPLITS)
def test_logits_are_the_whole_models(
    between: Between, config: ModelConfig, split: Split, hidden: bool
) -> None:
    """Also after rejected drafts, whose rows both caches write over, or hide."""
    actual, nobody = between(config, split).run(
        lambda session: forced(session, config, split, STEPS, hidden)
    )
    assert nobody is None and actual is not None
    text = list(PROMPT)
    wanted = [logits(PARAMS[config], config, jnp.asarray(text))[-1:]]
    for tokens, stay in STEPS:
        whole = logits(PARAMS[config], config, jnp.asarray(text + tokens))
        wanted.append(whole[len(text) :])
        text += tokens[:stay]
    for a, b in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=LOGITS_OFF)
    # Far less than what one block changes.
    assert np.ptp(np.asarray(wanted[0])) > 20 * LOGITS_OFF


def test_two_party_rows_draw_the_whole_models_tokens(between: Between) -> None:
    """Tokens that the plain rule draws of rows opened between two parties, after drafts: chi-square
    against the whole model, for the token after the prompt.
    """
    draft = 50
    tokens = [PROMPT[-1], draft]

    def program(session: PartySession) -> Any:
        return forced(session, GPT2, ONE_ONE, [(tokens, 1)], True)

    (_, rows), _ = between(GPT2, ONE_ONE).run(program)
    sampling, count = Sampling(0.8), 4000
    text = [*PROMPT, PROMPT[-1]]
    p = sampling.distribution(np.asarray(logits(PARAMS[GPT2], GPT2, jnp.asarray(text)))[-1])
    stream = Prg.from_seed(5, "tokens")
    streams, rule = Streams(stream, stream), Plain(sampling)
    flat = np.zeros(VOCAB)
    flat[np.argsort(-p)[:8]] = 2.0
    drawn = np.zeros(VOCAB)
    for _ in range(count):
        token, q = rule.propose(flat, 0, streams)
        # The row after the draft is of another draft than was proposed: it is not looked at.
        k, after = rule.resolve(rows, [token], q[None], lambda: float(stream.uniform(())))
        drawn[token if k else after] += 1
    assert of_one_distribution(drawn, p)


def of_one_distribution(drawn: np.ndarray, p: np.ndarray) -> bool:
    """Chi-square: counts drawn from p; outcomes about as likely are taken together, until 10 are
    expected of each group.
    """
    order = np.argsort(-p, kind="stable")
    groups = np.floor(np.cumsum(p[order]) * drawn.sum() / 10).astype(int)
    groups = np.unique(groups, return_inverse=True)[1]
    total, wanted = (np.bincount(groups, v[order]) for v in (drawn, p * drawn.sum() / p.sum()))
    assert len(total) > 8
    return bool(chisquare(total, wanted).pvalue > FALSE_ALARM)


# ---- the driver


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


class Told:
    """Drafts that somebody chose: the text after the prompt, or tokens that no text has."""

    def __init__(self, text: list[int], right: bool) -> None:
        self._text, self._right = text, right

    def propose(self, context: list[int], count: int, pick: Any) -> Any:
        at = len(context) - len(PROMPT)
        drafts = [*self._text, *[1] * count][at : at + count]
        if not self._right:
            drafts = [(d + 7) % VOCAB for d in drafts]
        q = np.zeros((count, VOCAB))
        q[np.arange(count), drafts] = 1.0
        return drafts, q


def asked(new: int, drafts: int, split: Split = ONE_ONE, **more: Any) -> MiddleRequest:
    return MiddleRequest(
        len(PROMPT), new, drafts, front=split.front, back=split.back, ends="", **more
    )


def client_side(
    tokenizer: Tokenizer,
    completion: Completion,
    temperature: float,
    drafter: Any = None,
    seed: int = 8,
    ends: Ends | None = None,
) -> ClientSide:
    config = completion.layout.config
    if drafter is None and completion.request.draft_length:
        drafter = Drafter(PUBLIC, DRAFT_PARAMS, 60)
    streams = Streams(Prg.from_seed(seed, "drafts"), Prg.from_seed(seed, "sampling"))
    return ClientSide(
        list(PROMPT),
        tokenizer,
        drafter,
        Plain(Sampling(temperature)),
        streams,
        around=ends or ends_of(PARAMS[config], completion),
    )


def greedy(config: ModelConfig, count: int) -> list[int]:
    text = list(PROMPT)
    for _ in range(count):
        text.append(int(np.argmax(logits(PARAMS[config], config, jnp.asarray(text))[-1])))
    return text[len(PROMPT) :]


def run_plaintext(
    tokenizer: Tokenizer, config: ModelConfig, request: MiddleRequest, temperature: float
) -> ClientSide:
    session, completion = PlaintextSession(), Completion.of(config, request)
    client = client_side(tokenizer, completion, temperature)
    weights = share_weights(session, config, PARAMS[config], request.part)
    generate(session, completion, completion.decoder(session, weights), client, None)
    return client


def run_two_parties(
    between: Between,
    tokenizer: Tokenizer,
    config: ModelConfig,
    request: MiddleRequest,
    temperature: float,
    drafter: Any = None,
) -> Any:
    """Return, per party, the client's side (None at the provider), report, openings, and what
    passed during every call. Every step finds all that it takes made ahead, as `prepare` would make
    it.
    """

    def program(session: PartySession) -> Any:
        session.ledger.openings.clear()
        completion = Completion.of(config, request)
        client = session.local(CLIENT, client_side, tokenizer, completion, temperature, drafter)
        params = session.local(PROVIDER, lambda: PARAMS[config])
        weights = share_weights(session, config, params, request.part)
        watched: Any = Watched(session)
        decoder = completion.decoder(watched, weights)
        mark = len(session.meter.entries)
        report = generate(watched, completion, decoder, client, None)
        passed = [
            (e.function, e.name, e.traffic)
            for e in session.meter.entries[mark:]
            if e.phase in ("prefill", "decode") and e.kind == "op"
        ]
        course = demand_of(session.dry(), completion, weights, report.steps)
        for name, need in sum(course, Demand()).correlations.items():
            assert watched.units[name] == need.units, name
        return client, report, list(session.ledger.openings), passed

    return between(config, request.split).run(program)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that grow by few rows and, with hidden progress, are packed as soon as can be."""
    for name, rows in (("_SPARE_ROWS", 4), ("_LEAST_ROWS", 1), ("_ROWS_AT_ONCE", 8)):
        monkeypatch.setattr(request, name, rows)


COURSES = [
    (GPT2, asked(6, 2), 0.0),
    (GPT2, asked(4, 0), 0.0),
    (LLAMA, asked(8, 2), 0.0),
    (GPT2, asked(6, 2, show_progress=True), 0.0),
    (GPT2, asked(6, 2, Split(2, 0)), 0.9),
    (GPT2, asked(6, 2, Split(0, 1)), 0.9),
]


@pytest.mark.slow  # one of them in the test after this one
@pytest.mark.parametrize("config,request_,temperature", COURSES)
def test_two_parties_write_the_plaintext_text(
    tokenizer: Tokenizer,
    between: Between,
    small_blocks: None,
    config: ModelConfig,
    request_: MiddleRequest,
    temperature: float,
) -> None:
    plain = run_plaintext(tokenizer, config, request_, temperature)
    (client, report, openings, _), (nobody, of_provider, same, _) = run_two_parties(
        between, tokenizer, config, request_, temperature
    )
    assert nobody is None and openings == same
    assert client.tokens == plain.tokens and len(client.tokens) == request_.max_new_tokens
    if not temperature:
        assert client.tokens == greedy(config, request_.max_new_tokens)
    assert of_provider.finish_reason == "ended by client"
    rows = [o for o in openings if o.label == "rows behind the provider's blocks"]
    assert {o.learner for o in rows} == {"client"}
    prefill = len(PROMPT) if request_.back else 1
    per_step = [prefill] + [request_.draft_length + 1] * report.steps
    assert [o.count for o in rows] == [n * config.width for n in per_step]
    labels = {o.label for o in openings if o.learner == "provider"} - {
        "whether activations left their ranges"
    }
    if request_.hide_progress:
        assert labels == {"end of text"} and of_provider.emitted == []
        if temperature == 0:
            assert report.accepted < report.drafted
    else:
        assert labels == {"accepted drafts and end of text"}
        assert of_provider.emitted == report.emitted


def test_what_the_provider_sees_does_not_say_what_stays(
    tokenizer: Tokenizer, between: Between, small_blocks: None
) -> None:
    """The same messages of the same sizes in the same order, and the same openings, whether all
    drafts of every step stay or none does.
    """
    text, steps, seen = greedy(GPT2, 7), 2, []
    for right in (True, False):
        (client, report, _, _), (_, _, openings, passed) = run_two_parties(
            between, tokenizer, GPT2, asked(7, 2), 0.0, Told(text, right)
        )
        assert client.tokens == text
        assert report.steps == (steps if right else 6)
        assert report.accepted == (2 * steps if right else 0)
        told = [o for o in openings if o.learner == "provider"]
        ends = [i for i, (function, *_) in enumerate(passed) if function == "announce end"]
        # The prefill's and that of every step up to where the shorter run ends.
        assert len(ends) == report.steps + 1
        seen.append((told[: 2 * (steps + 1)], passed[: ends[steps] + 1]))
        # It is what a dry run says, whichever drafts stay.
        works = of_steps(GPT2, asked(7, 2), [], [0] * report.steps)
        for name, field in (("client_to_provider", "received"), ("provider_to_client", "sent")):
            total = sum(getattr(traffic, f"{field}_bytes") for *_, traffic in passed)
            assert total == sum(work.counts[name] for work in works)
    assert seen[0] == seen[1]
    assert len(seen[0][1]) > 50


@pytest.mark.slow
def test_drafted_texts_have_the_whole_models_distribution(tokenizer: Tokenizer) -> None:
    """The driver with ends and middle in the clear, two tokens each: chi-square of 700 texts."""
    temperature, count = 0.5, 700
    completion = Completion.of(GPT2, asked(2, 2, show_progress=True))
    session = PlaintextSession()
    weights = share_weights(session, GPT2, PARAMS[GPT2], Middle(ONE_ONE))
    ends, drafter = ends_of(PARAMS[GPT2], completion), Drafter(PUBLIC, DRAFT_PARAMS, 60)
    texts: dict[tuple[int, ...], int] = {}
    for seed in range(count):
        client = client_side(tokenizer, completion, temperature, drafter, seed, ends)
        generate(session, completion, completion.decoder(session, weights), client, None)
        texts[tuple(client.tokens)] = texts.get(tuple(client.tokens), 0) + 1
    sampling, params = Sampling(temperature), PARAMS[GPT2]
    first = sampling.distribution(np.asarray(logits(params, GPT2, jnp.asarray(PROMPT)))[-1])
    heads = [int(t) for t in np.flatnonzero(first > 1e-4)]
    after = jax.vmap(lambda t: logits(params, GPT2, jnp.append(jnp.asarray(PROMPT), t))[-1])
    second = {
        t: first[t] * sampling.distribution(row)
        for t, row in zip(heads, np.asarray(after(jnp.asarray(heads))), strict=True)
    }
    pairs = [(t, u) for t in heads for u in range(VOCAB)]
    p = np.array([second[t][u] for t, u in pairs])
    drawn = np.array([texts.get(pair, 0) for pair in pairs], float)
    rest = 1.0 - p.sum()
    assert rest < 0.02
    assert of_one_distribution(np.append(drawn, count - drawn.sum()), np.append(p, rest))


def test_the_ends_take_one_program_and_are_in_the_rehearsal(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stays, front and back run a step in one compiled shape, and the cadence is of both
    and of the drafts.
    """
    rehearsed: list[tuple[int, int]] = []
    rehearse = Ends.rehearse

    def heard(ends: Ends, count: int, at: int) -> None:
        caches = list(ends._caches)
        rehearse(ends, count, at)
        rehearsed.append((count, at))
        assert all(a is b for a, b in zip(ends._caches, caches, strict=True))

    monkeypatch.setattr(Ends, "rehearse", heard)
    client = run_plaintext(tokenizer, GPT2, asked(12, 2), 0.8)
    assert client.around is not None and client.cadence is not None
    # When it was made, and six times for the cadence.
    assert rehearsed == [(3, len(PROMPT)), *[(3, len(PROMPT) - 1)] * 6]
    assert client.around._up._cache_size() == client.around._down._cache_size() == 2  # type: ignore[attr-defined]


# ---- what is sent and taken


def test_the_first_product_is_one_masked_message() -> None:
    """The first norm sees the client's rows alone: it is her own work, and of no comparison."""
    parties = dry_parties()
    completion = Completion.of(GPT2, asked(4, 2))
    decoder = completion.decoder(parties[0], Middle(ONE_ONE).shapes(GPT2))
    given = completion.layout.rows_in(len(PROMPT))
    decoder.prefill(given, decoder.judge_shapes(1))
    (noted,) = parties[0].taken()
    first = next(call for call in noted.demand.calls if call.messages)
    assert first.op == "linear" and first.scope.startswith("attention")
    # It goes up; the others are of the product's truncation.
    assert first.messages[0] == (True, 8 * given.size) and len(first.messages) == 2 + 1
    norms = {c.scope.split("/")[0] for c in noted.demand.calls if c.scope.endswith("rms_norm")}
    assert norms == {"mlp"}


@pytest.mark.parametrize("stated", [replace(GPT2, n_head=4), replace(GPT2, n_layer=4), LLAMA])
def test_a_client_with_a_model_of_another_shape_is_told(
    tmp_path: Path, stated: ModelConfig
) -> None:
    """Before anything is sent: the session is never looked at."""
    session: Any = SimpleNamespace(rank=CLIENT)
    save_model(tmp_path, GPT2, PARAMS[GPT2])
    inputs = MiddleInputs(PROMPT, str(tmp_path), str(tmp_path), 0.0)
    with pytest.raises(InputError, match="models of different shapes"):
        secure.run(session, Job(asked(4, 2), stated, inputs), lambda *_, **fields: None)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="leaves no middle"):
        Completion.of(GPT2, asked(4, 2, Split(2, 1)))
    with pytest.raises(InputError, match="leave --public-prefix out"):
        Completion.of(GPT2, asked(4, 2, public_prefix=(1, 2)))
    with pytest.raises(InputError, match="text of its own"):
        Completion.of(GPT2, asked(4, 2), SystemPromptShape(8, 0))
