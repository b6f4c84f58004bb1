"""Decoding: the same driver in plaintext and between two parties, drafted and standard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.calibration import calibrated
from models.family import Params
from models.family import logits as whole_logits
from models.gpt2 import GPT2Config, fold
from models.ngrams import Ngrams
from models.tokenizer import Tokenizer
from protocols.functions.aggregation import tile_for
from protocols.verification.distribution import Sampling
from protocols.verification.post import Post
from protocols.verification.variants import verifier
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.plan import OpCall, Run
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.preparation import demand_of
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import build, share_text, share_weights
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.program import SystemPromptShape
from tests.kit.models import PRIVATE, PUBLIC
from tests.systems.decoding.requests import (
    PARAMS,
    PROMPT,
    client_side,
    provider_stream,
    request_for,
    run_plaintext,
)
from tests.systems.decoding.watching import Watched


def run_two_parties(
    simulation: Simulation,
    tokenizer: Tokenizer,
    request: Request,
    before: SystemPromptShape = SystemPromptShape(),
    system: Sequence[int] = (),
    config: GPT2Config = PRIVATE,
    held: Params = PARAMS,
) -> Any:
    """Return, per party, the client's side (None at the provider), report, openings. Every step
    finds all that it takes made ahead, and all steps take what `prepare` would make for them.
    """

    def program(session: PartySession) -> Any:
        session.ledger.openings.clear()
        completion = Completion.of(config, request, before)
        client = session.local(CLIENT, client_side, tokenizer, completion)
        provider = session.local(PROVIDER, provider_stream)
        params = None if session.rank == CLIENT else held
        weights = share_weights(session, config, params)
        watched: Any = Watched(session)
        text = completion.text(session, () if session.rank == CLIENT else system)
        decoder = completion.decoder(watched, weights, text)
        report = generate(watched, completion, decoder, client, provider)
        course = demand_of(session.dry(), completion, weights, report.steps, text)
        for name, need in sum(course, Demand()).correlations.items():
            assert watched.units[name] == need.units, name
        return client, report, list(session.ledger.openings)

    return simulation.run(program)


@pytest.mark.slow
def test_greedy_drafts_do_not_change_the_text(tokenizer: Tokenizer) -> None:
    standard, _ = run_plaintext(tokenizer, request_for(12, 0, 0.0))
    expected = list(PROMPT)
    for _ in range(12):
        row = whole_logits(PARAMS, PRIVATE, jnp.asarray(expected))[-1]
        expected.append(int(np.argmax(row)))
    assert standard.tokens == expected[len(PROMPT) :]
    for drafts in (1, 3, 5):
        drafted, report = run_plaintext(tokenizer, request_for(12, drafts, 0.0))
        assert drafted.tokens == standard.tokens
        assert report.drafted == drafts * report.steps
        assert len(drafted.tokens) <= sum(report.emitted)


@pytest.mark.parametrize("model", [True, False])
def test_ngrams_of_the_text_do_not_change_it(tokenizer: Tokenizer, model: bool) -> None:
    """Greedy: all that they change is how many steps it takes."""
    standard, _ = run_plaintext(tokenizer, request_for(24, 0, 0.0))
    request = request_for(24, 3, 0.0)
    completion = Completion.of(PRIVATE, request)
    client = client_side(tokenizer, completion)
    client.drafter = Ngrams(PUBLIC.vocab_size, client.drafter if model else None)  # type: ignore[arg-type]
    session = PlaintextSession()
    decoder = completion.decoder(session, share_weights(session, PRIVATE, PARAMS))
    report = generate(session, completion, decoder, client, provider_stream())
    assert client.tokens == standard.tokens
    assert 0 < report.accepted < report.drafted == 3 * report.steps


COURSES = [
    request_for(4, 2, 0.8, show_progress=True),
    request_for(6, 2, 0.8),
    *(
        pytest.param(r, marks=pytest.mark.slow)
        for r in (
            request_for(4, 2, 0.8, "race", show_progress=True),
            request_for(3, 0, 0.8),
            request_for(6, 3, 0.0, show_progress=True),
            request_for(4, 2, 0.8, "post", top_k=40, top_p=0.95),
            request_for(8, 2, 0.0),
            request_for(4, 2, 0.8, "naive"),
            request_for(6, 2, 0.8, "race", candidates=2),
            request_for(6, 2, 0.0, candidates=3),
        )
    ),
]
ROW = ("client", "row of the distribution", 288, 21)
END = ("provider", "accepted drafts and end of text", 2, 64)
STOP = [(role, "where drafts stop", 2, 1) for role in ("client", "provider")]
IN_RANGE = [
    (learner, "whether activations left their ranges", 1, 1) for learner in ("client", "provider")
]
OPENED = {  # by a step with two drafts
    "token": [
        *STOP,
        ("client", "block of the token", 17, 1),
        ("client", "place of the token", 17, 1),
        END,
    ],
    "race": [*STOP, ("client", "token", 1, 24), END],
    "naive": [("client", "rejection bits", 2, 1), ROW, END],
    "post": [
        ("client", "rejection bits", 2, 1),
        ("client", "drafts outside top-k or top-p", 2, 1),
        ROW,
        END,
    ],
}


def course_name(r: Request) -> str:
    hidden = " hidden" if r.hide_progress else ""
    chains = f" in {r.candidates} chains" if r.candidates > 1 else ""
    return f"{r.verify} {r.draft_length} at {r.temperature}{hidden}{chains}"


@pytest.mark.parametrize("request_", COURSES, ids=course_name)
def test_two_parties_write_the_plaintext_text(
    tokenizer: Tokenizer, simulation: Simulation, small_blocks: None, request_: Request
) -> None:
    """Every variant, greedy and sampled, drafted and standard: the driver gives both parties the
    same course, and the ledger holds what the variant declares.
    """
    plain, plain_report = run_plaintext(tokenizer, request_)
    (client, report, openings), (nobody, provider_report, provider_openings) = run_two_parties(
        simulation, tokenizer, request_
    )
    assert nobody is None
    assert client.tokens == plain.tokens
    assert report.emitted == plain_report.emitted
    assert provider_report.emitted == ([] if request_.hide_progress else report.emitted)
    assert provider_report.finish_reason == "ended by client"
    assert openings == provider_openings
    if request_.hide_progress:
        to_provider = {(o.label, o.count) for o in openings if o.learner == "provider"}
        assert to_provider == {("end of text", 1), (IN_RANGE[0][1], 1)}
        assert report.accepted < report.drafted and provider_report.accepted == 0
    elif request_.draft_length == 2:
        collected = [(o.learner, o.label, o.count, o.bits) for o in openings]
        steps = (IN_RANGE + OPENED[request_.verify]) * report.steps
        assert collected[len(collected) - len(steps) :] == steps
        assert (
            collected[: len(IN_RANGE)] == IN_RANGE
            and collected.count(IN_RANGE[0]) == report.steps + 1
        )


@pytest.mark.parametrize("padded", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_two_party_rows_after_rollback_and_prefix(simulation: Simulation, padded: int) -> None:
    """Prefix block (provider's plaintext, of which two of seven rows hold no text where they may),
    prefill, a rejected draft, then another step: the weights that `post` opens are those of a fresh
    forward over the accepted tokens.
    """
    verifier = Post(Sampling())
    prefix, prompt = [10, 11, 12, 13, 14], [40, 41, 42]
    first, second = [43, 50, 51], [44, 60, 61]  # of the first step only token 43 is kept
    rows = len(prefix) + padded // 2
    layout = SessionShape(PRIVATE, (len(prompt),), (24,), prefix=rows, padded=padded)

    def program(session: PartySession) -> Any:
        params = None if session.rank == CLIENT else PARAMS
        weights = share_weights(session, PRIVATE, params)
        text = share_text(session, layout, [] if session.rank == CLIENT else prefix)
        decoder = Decoder(session, layout, verifier, weights, text)

        def tokens(ids: list[int]) -> Any:
            return session.private(CLIENT, np.array, (1, len(ids)), np.int32, [ids])

        def sure(drafts: list[int]) -> JudgeInputs:
            """Drafts of probability one and r next to one: whatever the model thinks, rejected."""
            own = np.array(drafts), np.full(len(drafts), 1 << 16), np.full(len(drafts), 2**16 - 1)
            return decoder.inputs(len(drafts) + 1, None, lambda: [own])

        actual = [decoder.prefill(tokens(prompt), sure([]))]
        retained = None
        for ids in (first, second):
            actual.append(decoder.step(tokens(ids), sure(ids[1:]), retained))
            retained = np.array([[True, False, False]])
        return [jax.tree.map(session.get, judged.outcome) for judged in actual]

    client, provider = simulation.run(program)
    assert provider[0].row is None
    function = build(layout, verifier).prefix
    hidden = np.zeros(padded, np.float32)
    plan = function.plan(fold(PARAMS, PRIVATE), np.zeros(rows, np.int32), hidden)[0]
    runs = [s for s in plan.steps if isinstance(s, Run)]
    assert {s.owner for s in runs} <= {Owner.PROVIDER, Owner.PUBLIC}
    assert {s.op.name for s in plan.steps if isinstance(s, OpCall)} == {"known_rows"}
    tokens = prefix + prompt
    _close_row(client[0].row[0], tokens)
    for outcome, ids in zip(client[1:], (first, second), strict=True):
        assert outcome.rejected.all()
        tokens = [*tokens, ids[0]]
        _close_row(outcome.row[0], tokens)


def _close_row(row: np.ndarray, tokens: list[int]) -> None:
    logits = np.asarray(whole_logits(PARAMS, PRIVATE, jnp.asarray(tokens))[-1])
    # Runs are off by 0.003 at most, with a deviation of 0.001.
    np.testing.assert_allclose(row, np.exp(logits - logits.max()), atol=0.02)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_tokens": 0}, "empty"),
        ({"prompt_tokens": 64}, "context is 64"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"draft_length": 33}, "--draft-length"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"verify": "trust"}, "--verify"),
        ({"verify": "post", "temperature": 0.0}, "greedy"),
        ({"top_k": 5}, "--verify post"),
        ({"top_p": 0.0, "verify": "post"}, "--top-p"),
        ({"top_k": -1, "verify": "post"}, "--top-k"),
    ],
)
def test_requests_that_cannot_be_served(change: dict[str, Any], words: str) -> None:
    fields = {
        "prompt_tokens": 4,
        "max_new_tokens": 8,
        "draft_length": 3,
        "temperature": 1.0,
        "verify": "token",
    } | change
    with pytest.raises(InputError, match=words):
        Request(**fields).check(PRIVATE)


@pytest.mark.slow
def test_hidden_rows_do_not_change_the_text(tokenizer: Tokenizer, small_blocks: None) -> None:
    """Stale rows that the client hides, and gives up when the block is full: the same tokens as
    with roll-back, over many steps.
    """
    assert request_for(20, 3, 0.0).may_pack(PRIVATE)
    for temperature in (0.0, 0.8):
        plain, _ = run_plaintext(tokenizer, request_for(20, 3, temperature, show_progress=True))
        hidden, report = run_plaintext(tokenizer, request_for(20, 3, temperature))
        assert hidden.tokens == plain.tokens
        assert report.accepted < report.drafted and (report.accepted > 0 or not temperature)


def test_blocks_grow_and_stay_bounded() -> None:
    """With hidden progress a block ends at the text's longest and 160 rows, however many steps."""
    for prompt, new, drafts in ((1, 1, 1), (6, 64, 7), (6, 240, 7), (30, 10, 16), (6, 240, 0)):
        for show in (True, False):
            asked = Request(prompt, new, drafts, 0.7, show_progress=show)
            config = GPT2Config(288, 256, 8, 1, 1)
            sizes = asked.sizes(config)
            assert list(sizes) == sorted(set(sizes)) and sizes[0] >= prompt + drafts + 1
            assert sizes[-1] <= prompt + new + (drafts + 1 if show else 160)
            assert all(tile_for(n) == tile_for(sizes[0]) for n in sizes)
            assert asked.hide_progress == (drafts > 0 and not show)
    with pytest.raises(InputError, match="shows progress"):
        verifier("post", Sampling(), hide_progress=True)
    assert not Request(4, 4, 4, 0.7, "post").hide_progress


def test_context_limits_the_text(tokenizer: Tokenizer) -> None:
    client, report = run_plaintext(tokenizer, request_for(500, 4, 1.0))
    assert report.finish_reason in ("length", "eos")
    assert len(client.tokens) <= PRIVATE.n_positions - len(PROMPT)


SYSTEM, PREFIX = [50, 51, 52, 53, 54], (30, 31, 32)


# What stands before the prompt, by name.
BEFORE: dict[str, tuple[list[int], SystemPromptShape, tuple[int, ...]]] = {
    "public": ([], SystemPromptShape(), PREFIX),
    "the provider's": (SYSTEM, SystemPromptShape(5, 0), ()),
    "padded, and public": (SYSTEM, SystemPromptShape(8, 7), PREFIX),
    "nearly empty": (SYSTEM[:1], SystemPromptShape(8, 7), ()),
}


@pytest.mark.parametrize(
    ("name", "show"),
    [
        ("the provider's", True),
        ("padded, and public", False),
        *(
            pytest.param(name, show, marks=pytest.mark.slow)
            for name, show in (
                ("public", True),
                ("public", False),
                ("the provider's", False),
                ("padded, and public", True),
                ("nearly empty", True),
                ("nearly empty", False),
            )
        ),
    ],
)
def test_text_before_the_prompt_is_part_of_the_text(
    tokenizer: Tokenizer, small_blocks: None, name: str, show: bool
) -> None:
    """Its keys and values are the provider's own; the tokens are those of one long prompt."""
    system, before, prefix = BEFORE[name]
    long = [*prefix, *system, *PROMPT]
    whole = Completion.of(PRIVATE, Request(len(long), 12, 3, 0.0, show_progress=show))
    parted = Completion.of(
        PRIVATE, replace(request_for(12, 3, 0.0), show_progress=show, public_prefix=prefix), before
    )
    texts = []
    for completion, own, public, prompt in (
        (whole, [], [], long),
        (parted, system, list(prefix), PROMPT),
    ):
        client = client_side(tokenizer, completion)
        client.prefix, client.prompt = public, list(prompt)
        session = PlaintextSession()
        weights = share_weights(session, PRIVATE, PARAMS)
        decoder = completion.decoder(session, weights, completion.text(session, own))
        generate(session, completion, decoder, client, provider_stream())
        texts.append(client.tokens)
    assert texts[0] == texts[1] and len(texts[0]) == 12


@pytest.mark.slow
def test_two_parties_go_on_after_the_providers_text(
    simulation: Simulation, tokenizer: Tokenizer
) -> None:
    """Progress hidden and the text padded: the table of positions is the provider's secret. The
    dry run takes what the steps do, those in which the prefix's rows move to other masks included.
    """
    request = replace(request_for(12, 3, 0.0), public_prefix=PREFIX)
    before = SystemPromptShape(8, 7)
    client, provider = run_two_parties(simulation, tokenizer, request, before, SYSTEM)
    text = [*PREFIX, *SYSTEM, *PROMPT]
    assert len(client[0].tokens) == 12
    for token in client[0].tokens:
        row = np.asarray(whole_logits(PARAMS, PRIVATE, jnp.asarray(text))[-1])
        assert row[token] > row.max() - 0.05
        text.append(token)


@pytest.mark.slow
def test_a_first_row_that_fits_no_range_is_public(
    own_simulation: Simulation, tokenizer: Tokenizer
) -> None:
    """After a token that both know the model answers as in float32."""
    held = PARAMS | {"wpe": np.array(PARAMS["wpe"])}  # type: ignore[operator]
    held["wpe"][0, 5] = 2.0**17
    config = calibrated(PRIVATE, held, [np.arange(60)], public=1)
    assert config.public_rows == 1
    request = request_for(3, 0, 0.0, public_prefix=(30,))
    client, _ = run_two_parties(own_simulation, tokenizer, request, config=config, held=held)
    text = [30, *PROMPT]
    for token in client[0].tokens:
        row = np.asarray(whole_logits(held, config, jnp.asarray(text))[-1])
        assert row[token] > row.max() - 0.05
        text.append(token)
    assert len(text) == 8


def test_text_before_the_prompt_takes_its_place_in_the_context() -> None:
    left = SystemPromptShape(PRIVATE.context - 6)
    assert Completion.of(PRIVATE, request_for(9, 0, 0.0), left).limit == 2
    with pytest.raises(InputError, match="context is 6"):
        Completion.of(PRIVATE, Request(6, 1, 0, 0.0), left)
    long = tuple(range(PRIVATE.context - 6))
    of_both = replace(request_for(9, 0, 0.0), public_prefix=long)
    assert Completion.of(PRIVATE, of_both).limit == 2
    with pytest.raises(InputError, match="58 of which the public prefix takes; shorten it to 5"):
        Completion.of(PRIVATE, replace(of_both, prompt_tokens=6))
    with pytest.raises(InputError, match="tokens that the model lacks"):
        Completion.of(PRIVATE, replace(request_for(1, 0, 0.0), public_prefix=(-1,)))


def test_rows_that_must_be_public_are() -> None:
    """The client's prefix, and what the provider's text has at least, count; a refusal is one
    line.
    """
    config, request = replace(PRIVATE, public_rows=3), request_for(4, 0, 0.0)
    for prefix, before in (
        ((30, 31, 32), SystemPromptShape()),
        ((30,), SystemPromptShape(5, 3)),
        ((), SystemPromptShape(3)),
    ):
        Completion.of(config, replace(request, public_prefix=prefix), before)
    for prefix, before in (  # type: ignore[assignment]
        ((30, 31), SystemPromptShape()),
        ((30,), SystemPromptShape(5, 4)),
        ((), SystemPromptShape(3, 2)),
    ):
        with pytest.raises(InputError, match="hold from token .* give --public-prefix") as caught:
            Completion.of(config, replace(request, public_prefix=prefix), before)
        assert "\n" not in str(caught.value)
