"""T5 between two parties: the encoder once, cross-attention, positions by distance, drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.common.replay import dry_parties
from models.draft import Drafter
from models.encoder_decoder import source_logits
from models.family import family_of, weight_shapes
from models.text_format import TextFormat
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.plan import OpCall
from spu_llm.core.errors import InputError, PeerError
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SPU
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession, Session
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.branching import Chains
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.completion import client_side_of
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.preparation import demand_of
from spu_llm.systems.decoding.records import ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.program import SystemPromptShape
from tests.kit.models import PRIVATE, T5, make_t5_pair, save_tokenizer, tiny_params
from tests.models.opened import OPENED
from tests.systems.decoding.watching import Watched


def calm_params(seed: int) -> Any:
    """Weights whose texts differ, and whose scores stay small."""
    params: Any = jax.tree.map(lambda w: w / 4 if w.ndim == 2 else w, tiny_params(T5, seed))
    return params | {"bias": 4 * params["bias"], "encoder_bias": 4 * params["encoder_bias"]}


PARAMS = calm_params(5)
SOURCE = [40, 41, 42, 43, 60, 61, 1]
PROMPT = [*SOURCE, T5.decoder_start_token_id]
BIAS = "the decoder's relative position bias"
COUNT = 3  # rows of a step
STEPS = [[100, 101, 102], [140, 141, 142], [180, 181, 182], [220, 221, 222]]
RETAINED = [2, 1, 3, 1]  # rows that stay of each step
hidings = pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
# Shown is a slow test.
hidings_at_length = pytest.mark.parametrize(
    "hidden", [pytest.param(False, marks=pytest.mark.slow), True], ids=["shown", "hidden"]
)


def decode(session: Session, weights: Any, hidden: bool) -> list[Any]:
    """Return the opened rows of the prefill and of four steps. Some rows of each step are rejected;
    where that is hidden, the block is packed on the way.
    """
    live = 1 + sum(RETAINED)
    sizes = (4, live + COUNT) if hidden else (4, 1 + len(STEPS) * COUNT)
    layout = SessionShape(T5, (len(PROMPT),), sizes, live, hidden, packs=hidden)
    decoder, nothing = Decoder(session, layout, OPENED, weights), JudgeInputs(None, None)

    def given(rows: list[int]) -> Any:
        return session.private(CLIENT, np.array, (1, len(rows)), np.int32, [rows])

    outcomes = [decoder.prefill(given(PROMPT), nothing)]
    stay = np.ones((1, COUNT), bool)
    for rows, count in zip(STEPS, RETAINED, strict=True):
        outcomes.append(decoder.step(given(rows), nothing, stay))
        stay = np.arange(COUNT)[None] < count
    return [session.get(judged.outcome) for judged in outcomes]


def alone() -> list[np.ndarray]:
    """Return the same rows of the whole text, without a cache."""
    text = [T5.decoder_start_token_id]
    wanted = [whole(text)]
    for rows, count in zip(STEPS, RETAINED, strict=True):
        wanted.append(whole([*text, *rows])[-COUNT:])
        text += rows[:count]
    return wanted


def whole(text: list[int]) -> np.ndarray:
    return np.asarray(source_logits(PARAMS, T5, np.array(SOURCE), np.array(text)))


@hidings_at_length
def test_steps_equal_the_whole(hidden: bool) -> None:
    session = PlaintextSession()
    actual = decode(session, share_weights(session, T5, PARAMS), hidden)
    for of_step, wanted in zip(actual, alone(), strict=True):
        np.testing.assert_allclose(of_step[0], wanted, atol=2e-5)


@pytest.mark.slow
@hidings_at_length
def test_two_party_logits(own_simulation: Simulation, hidden: bool) -> None:
    """Of the weights the client learns the decoder's table of positions, once, where it alone knows
    which rows hold text, and nothing else.
    """

    def program(session: PartySession) -> Any:
        session.ledger.openings.clear()
        params = None if session.rank == CLIENT else PARAMS
        rows = decode(session, share_weights(session, T5, params), hidden)
        return rows, list(session.ledger.openings)

    (client, openings), (provider, _) = own_simulation.run(program)
    assert provider == [None] * (1 + len(STEPS))
    for of_step, wanted in zip(client, alone(), strict=True):
        np.testing.assert_allclose(of_step[0], wanted, atol=0.05)
    tables = [o for o in openings if o.label == BIAS]
    assert len(tables) == int(hidden)
    assert {o.label for o in openings} - {BIAS} == {
        "whether activations left their ranges",
        "logits (test)",
    }


@hidings
def test_a_forward_has_no_segment(hidden: bool) -> None:
    """All that is not one party's own work is an op, or linear work on shares."""
    party = dry_parties()[CLIENT]
    layout = SessionShape(T5, (len(PROMPT),), (4, 4 + COUNT), 4, hidden)
    decoder = Decoder(party, layout, OPENED, weight_shapes(T5))
    decoder.prefill(layout.rows_in(len(PROMPT)), decoder.judge_shapes(1))
    decoder.step(layout.rows_in(COUNT), decoder.judge_shapes(COUNT), None)
    calls = party.taken()
    names = [call.function.name for call in calls]
    begun = ["public weights", "prefill"] if hidden else ["prefill"]
    assert names[: len(begun)] == begun and "decode" in names
    for call in calls:
        assert all(isinstance(step, OpCall) or step.local for step in call.plan.steps)


# ---- drafted completions


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


def client_side(tokenizer: Tokenizer, completion: Completion) -> ClientSide:
    draws = jax.tree.map(lambda w, e: w + 0.15 * e if w.ndim == 2 else w, PARAMS, calm_params(105))
    drafter = Drafter(T5, draws, 80, SOURCE)
    streams = Streams(Prg.from_seed(8, "drafts"), Prg.from_seed(8, "sampling"))
    return ClientSide(list(PROMPT), tokenizer, drafter, completion.verifier, streams)


def provider_stream() -> Prg:
    return Prg.from_seed(8, "joint randomness")


def in_plaintext(tokenizer: Tokenizer, completion: Completion) -> Any:
    session, client = PlaintextSession(), client_side(tokenizer, completion)
    decoder = completion.decoder(session, share_weights(session, T5, PARAMS))
    return client, generate(session, completion, decoder, client, provider_stream())


@pytest.mark.slow
def test_greedy_drafts_do_not_change_the_text(tokenizer: Tokenizer) -> None:
    completion = Completion.of(T5, Request(len(PROMPT), 12, 3, 0.0))
    client, report = in_plaintext(tokenizer, completion)
    text = [T5.decoder_start_token_id]
    for _ in client.tokens:
        text.append(int(np.argmax(whole(text)[-1])))
    assert client.tokens == text[1:] and report.accepted > 0


@pytest.mark.parametrize(
    ("show", "verify", "temperature"),
    [
        (False, "token", 0.8),
        pytest.param(True, "token", 0.0, marks=pytest.mark.slow),
        pytest.param(False, "race", 0.8, marks=pytest.mark.slow),
    ],
)
def test_drafts_verified_by_two_parties(
    own_simulation: Simulation, tokenizer: Tokenizer, show: bool, verify: str, temperature: float
) -> None:
    """The plaintext text; every step finds all that it takes, and takes what is prepared."""
    request = Request(len(PROMPT), 6, 2, temperature, verify, show_progress=show)
    completion = Completion.of(T5, request)
    plain, _ = in_plaintext(tokenizer, completion)

    def program(session: PartySession) -> Any:
        client = session.local(CLIENT, client_side, tokenizer, completion)
        provider = session.local(PROVIDER, provider_stream)
        weights = share_weights(session, T5, None if session.rank == CLIENT else PARAMS)
        watched: Any = Watched(session)
        decoder = completion.decoder(watched, weights)
        completion.prepare(session, decoder)
        report = generate(watched, completion, decoder, client, provider)
        course = demand_of(session.dry(), completion, weights, report.steps)
        for name, need in sum(course, Demand()).correlations.items():
            assert watched.units[name] == need.units, name
        return client, report, session.ledger.learned()

    client, report, learned = own_simulation.run(program)[CLIENT]
    assert client.tokens == plain.tokens and report.drafted
    assert (BIAS in learned["client"]) == (not show)


@pytest.mark.slow
def test_the_compiler_s_forward_writes_the_same(
    own_simulation: Simulation, tokenizer: Tokenizer
) -> None:
    completion = Completion.of(T5, Request(len(PROMPT), 4, 2, 0.0), backend=SPU)
    plain, _ = in_plaintext(tokenizer, completion)

    def program(session: PartySession) -> Any:
        client = session.local(CLIENT, client_side, tokenizer, completion)
        provider = session.local(PROVIDER, provider_stream)
        weights = share_weights(session, T5, None if session.rank == CLIENT else PARAMS)
        decoder = completion.decoder(session, weights)
        generate(session, completion, decoder, client, provider)
        return client

    assert own_simulation.run(program)[CLIENT].tokens == plain.tokens


@pytest.mark.parametrize(
    ("request_", "before", "expected"),
    [
        (Request(66, 4, 0, 0.0), SystemPromptShape(), "has 65 tokens, but the model reads 1 to 64"),
        (Request(1, 4, 0, 0.0), SystemPromptShape(), "has 0 tokens, but the model reads"),
        (
            Request(5, 4, 0, 0.0, public_prefix=(3,)),
            SystemPromptShape(),
            "reads all of a prompt at once.*leave --public-prefix out",
        ),
        (Request(5, 4, 0, 0.0), SystemPromptShape(8, 4), "nothing comes before what a T5"),
    ],
    ids=["too long", "empty", "public prefix", "system prompt"],
)
def test_what_an_encoder_cannot_read(
    request_: Request, before: SystemPromptShape, expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        Completion.of(T5, request_, before)


def test_a_source_takes_no_room_of_the_text() -> None:
    completion = Completion.of(T5, Request(60, 63, 2, 0.0))
    assert completion.limit == 63 and completion.layout.live_rows == 64
    assert Completion.of(T5, Request(60, 100, 2, 0.0)).limit == 63


def test_a_table_beyond_the_stated_range_is_refused() -> None:
    """A provider that deviates could make the client fail by which rows hold text."""
    for wrong in (2.0 * max(T5.largest_score), float("nan")):
        params = PARAMS | {"bias": np.full_like(PARAMS["bias"], wrong)}
        session = PlaintextSession()
        weights = family_of(T5).fold(params, T5)
        with pytest.raises(PeerError, match="relative position bias has numbers beyond 511"):
            decode(session, weights, hidden=True)


def test_a_text_format_of_another_model_is_refused(tmp_path: Path) -> None:
    """Before the prompt goes in: without the start token the text would be another one."""
    private, public = make_t5_pair(tmp_path)
    text = TextFormat.of_model(public)
    own = replace(T5, vocab_size=text.tokenizer.vocab_size)
    other = replace(own, decoder_start_token_id=2)
    decoder_only = replace(PRIVATE, vocab_size=text.tokenizer.vocab_size)
    inputs = ClientInputs([4, 5, 1, 0], str(public), draft_dir=str(public))
    for config, fits in ((own, True), (other, False), (decoder_only, False)):
        completion = Completion.of(config, Request(4, 3, 2, 0.0))
        if fits:
            assert client_side_of(inputs, completion, lambda event, **fields: None).begins
            continue
        with pytest.raises(PeerError, match="ends prompts for another model"):
            client_side_of(inputs, completion, lambda event, **fields: None)


def test_a_rehearsal_shows_a_drafter_tokens_after_its_prompt(tokenizer: Tokenizer) -> None:
    completion = Completion.of(T5, Request(len(PROMPT), 8, 2, 0.8, "race", candidates=2))
    client = client_side(tokenizer, completion)
    client.branching = Chains(client.streams, 2)
    client = replace(client, begins=True)
    lengths: list[int] = []
    assert isinstance(client.drafter, Drafter)
    logits = client.drafter.logits
    client.drafter.logits = lambda tokens: lengths.append(len(tokens)) or logits(tokens)  # type: ignore
    client.keep_time(2, 8, len(client.prompt))
    assert min(lengths) >= len(PROMPT) + 3
