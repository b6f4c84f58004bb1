"""Decoding: the same driver in plaintext and between two parties, drafted and standard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from models import secure_gpt2
from models.draft import Drafter
from models.generate import ClientSide, Programs, Report, generate, share_weights
from models.gpt2 import logits as whole_logits
from models.request import Request
from models.tokenizer import Tokenizer
from protocols import post
from spu_llm.errors import InputError
from spu_llm.prg import Prg
from spu_llm.secure import PartySession, PlaintextSession, Simulation, public
from spu_llm.values import CLIENT, Owner
from tests.tiny import PRIVATE, PUBLIC, save_tokenizer, tiny_params

PARAMS = tiny_params(PRIVATE, 1)
DRAFT_PARAMS = tiny_params(PUBLIC, 2)
PROMPT = [40, 41, 42, 43]
SEED = 8  # no draw near an edge: the tokens stay when every weight moves by 0.4 %


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


def client_side(tokenizer: Tokenizer, request: Request, seed: int = SEED) -> ClientSide:
    drafter = Drafter(PUBLIC, DRAFT_PARAMS, 80) if request.draft_length else None
    return ClientSide(
        list(PROMPT), tokenizer, drafter,
        Prg.from_seed(seed, "drafts"), Prg.from_seed(seed, "sampling"),
    )  # fmt: skip


def request_for(new: int, drafts: int, temperature: float) -> Request:
    return Request(len(PROMPT), new, drafts, temperature, greedy=temperature == 0)


def run_plaintext(tokenizer: Tokenizer, request: Request, seed: int = SEED) -> Any:
    client = client_side(tokenizer, request, seed)
    session = PlaintextSession()
    programs = Programs.build(PRIVATE, request)
    report = generate(session, programs, share_weights(session, PRIVATE, PARAMS), client)
    return client, report


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


def test_two_parties_write_the_plaintext_text(
    tokenizer: Tokenizer, simulation: Simulation
) -> None:
    """Greedy and sampled, drafted and standard: the driver gives both parties the same course."""
    for request in (request_for(6, 3, 0.0), request_for(4, 2, 0.8), request_for(3, 0, 0.8)):
        plain, plain_report = run_plaintext(tokenizer, request)

        def program(
            session: PartySession, request: Request = request
        ) -> tuple[ClientSide | None, Report]:
            client = session.local(CLIENT, lambda: client_side(tokenizer, request))
            programs = Programs.build(PRIVATE, request)
            params = None if session.rank == CLIENT else PARAMS
            weights = share_weights(session, PRIVATE, params)
            return client, generate(session, programs, weights, client)

        (client, report), (nobody, provider_report) = simulation.run(program)
        assert nobody is None and client is not None
        assert client.tokens == plain.tokens, request
        assert report.emitted == provider_report.emitted == plain_report.emitted
        assert provider_report.finish_reason == "ended by client"


def test_ledger_holds_what_post_declares(tokenizer: Tokenizer, simulation: Simulation) -> None:
    request = request_for(4, 2, 0.8)

    def program(session: PartySession) -> Any:
        session.ledger.openings.clear()
        client = session.local(CLIENT, lambda: client_side(tokenizer, request))
        params = None if session.rank == CLIENT else PARAMS
        weights = share_weights(session, PRIVATE, params)
        report = generate(session, Programs.build(PRIVATE, request), weights, client)
        return report, list(session.ledger.openings)

    (report, openings), (_, provider_openings) = simulation.run(program)
    assert openings == provider_openings
    per_step = [("client", "rejection bits", 2, 1), ("client", "row of the distribution", 288, 64),
                ("provider", "accepted drafts and end of text", 2, 64)]  # fmt: skip
    found = [(o.learner, o.label, o.count, o.bits) for o in openings]
    assert found == per_step[1:] + per_step * report.steps


def test_two_party_logits_after_rollback_and_prefix(simulation: Simulation) -> None:
    """Prefix block (provider's plaintext), prefill, a rejected draft, then another step:
    the opened rows equal a fresh forward over the accepted tokens.
    """
    programs = secure_gpt2.build(PRIVATE, 24, greedy=True)
    prefix, prompt = [10, 11, 12], [40, 41, 42]
    first, second = [43, 50, 51], [44, 60, 61]  # of the first step only token 43 is kept

    def program(session: PartySession) -> Any:
        params = None if session.rank == CLIENT else PARAMS
        weights = share_weights(session, PRIVATE, params)

        def tokens(ids: list[int]) -> Any:
            return session.private(CLIENT, lambda: ids, (len(ids),), np.int32)

        one = public(np.float32(1))
        block = session.call(programs.prefix, weights, public(np.asarray(prefix, np.int32)))
        row, shared = session.call(programs.prefill, weights, tokens(prompt), one, block)
        rows = [session.get(row)]
        length = len(prompt)
        for ids in (first, second):
            # Thresholds are unused when greedy; no real draft is the maximum here, so row 0 opens.
            none = session.private(CLIENT, lambda: np.zeros(2), (2,), np.float32)
            rejected, row, shared = session.call(
                programs.decode, weights, tokens(ids), none, shared,
                public(np.int32(length)), one, block,
            )  # fmt: skip
            rows.append((session.get(rejected), session.get(row)))
            length += 1
        return rows

    client, provider = simulation.run(program)
    assert provider[0] is None
    plan = programs.prefix.plan(PARAMS, np.zeros(3, np.int32))[0]
    assert {s.owner for s in plan.steps} <= {Owner.PROVIDER, Owner.PUBLIC}  # type: ignore[union-attr]
    tokens = prefix + prompt
    _close_row(client[0], tokens)
    for (rejected, row), ids in zip(client[1:], (first, second), strict=True):
        k = int(post.first_rejection(rejected))
        _close_row(row, tokens + ids[: k + 1])
        assert k == 0
        tokens = tokens + ids[:1]


def _close_row(row: np.ndarray, tokens: list[int]) -> None:
    expected = np.asarray(whole_logits(PARAMS, PRIVATE, jnp.asarray(tokens))[-1])
    np.testing.assert_allclose(row, expected - expected.max(), atol=0.05)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_tokens": 0}, "empty"),
        ({"prompt_tokens": 64}, "context is 64"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"draft_length": 17}, "--draft-length"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
    ],
)
def test_requests_that_cannot_be_served(change: dict[str, Any], words: str) -> None:
    fields = {"prompt_tokens": 4, "max_new_tokens": 8, "draft_length": 3, "temperature": 1.0,
              "greedy": False} | change  # fmt: skip
    with pytest.raises(InputError, match=words):
        Request(**fields).check(PRIVATE)


def test_context_limits_the_text(tokenizer: Tokenizer) -> None:
    client, report = run_plaintext(tokenizer, request_for(500, 4, 1.0))
    assert report.finish_reason in ("length", "eos")
    assert len(client.tokens) <= PRIVATE.n_positions - len(PROMPT)
