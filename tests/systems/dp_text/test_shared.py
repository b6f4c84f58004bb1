"""Private text where both parties have the model: each with references and noise of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError, WireError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.dp_text.lanes import Lanes, folded
from spu_llm.systems.dp_text.methods import token_weights
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.prompts import Prompts
from spu_llm.systems.dp_text.secure_corpus import SecureCorpusRequest, write_corpus
from spu_llm.systems.dp_text.secure_records import PrivacyBudget, SharedRequest
from spu_llm.systems.dp_text.shared import OwnHalf, SharedText, declare
from spu_llm.systems.dp_text.shared_run import check_budget, provider_prompts
from tests.kit.models import PRIVATE, endless, save_tokenizer, tiny_params
from tests.protocols.verifying import chi_square_p

WEIGHTS = folded(PRIVATE, endless(tiny_params(PRIVATE, 1)))
REQUEST = SharedRequest(
    query=(40, 41, 42),
    room=6,
    batch=3,
    clip=0.8,
    temperature=0.2,
    max_new_tokens=4,
    top_k=5,
    places=16,
    of_provider=1,
    after=(41, 42),
)
CHOICE = REQUEST.choice(PRIVATE, noises=2)
OF_CLIENT = [[60, 61, 62, 40, 41, 42], []]
OF_PROVIDER = [[90, 91, 92, 40, 41, 42]]


def half(prompts: list[list[int]], stream: Prg | None = None) -> OwnHalf:
    """Return a party's half, with noise of this stream or without any."""

    def noise() -> np.ndarray:
        return np.zeros(16, np.int32) if stream is None else CHOICE.draw_noise(stream, 16)

    new = REQUEST.max_new_tokens
    public, private = (Lanes(PRIVATE, WEIGHTS, n, m, new) for n, m in ((1, 3), (len(prompts), 6)))
    return OwnHalf(public, private, prompts, noise)


def session_text(session: Any) -> list[int]:
    drawn = SharedText(session, REQUEST, CHOICE)
    drawn.prepare()
    declare(session, REQUEST)
    client: Any = half(OF_CLIENT)
    provider: Any = half(OF_PROVIDER)
    if hasattr(session, "rank"):
        client, provider = (client, None) if session.rank == CLIENT else (None, provider)
    return drawn.text(client, provider, lambda token: token == 0)


def distribution() -> tuple[np.ndarray, np.ndarray]:
    """Return the distribution of the plaintext generator's first token, all references in one
    place.
    """
    public, private = Lanes(PRIVATE, WEIGHTS, 1, 3, 1), Lanes(PRIVATE, WEIGHTS, 3, 6, 1)
    rows = [OF_CLIENT[0], [0] * 6, OF_PROVIDER[0]]
    of_public, of_private = public.begin([REQUEST.query]), private.begin(rows)
    present = np.array([True, False, True])
    tokens, weights = token_weights(REQUEST.parameters, of_public[0], of_private, present)
    return tokens, weights / weights.sum()


def test_without_noise_it_is_the_likeliest_text() -> None:
    tokens, p = distribution()
    assert session_text(PlaintextSession())[0] == tokens[p.argmax()]


@pytest.mark.slow
def test_two_parties_write_the_same_text(simulation: Simulation) -> None:
    """Nothing is opened but what is public, and the place of the token."""
    wanted = session_text(PlaintextSession())

    def program(session: Any) -> Any:
        session.ledger.openings.clear()
        return session_text(session), {(o.learner, o.label) for o in session.ledger.openings}

    (of_client, seen), (of_provider, same) = simulation.run(program)
    assert of_client == of_provider == wanted and seen == same
    place, table = "place of the token", "candidates of the public model, their logits"
    assert seen == {("client", table), ("client", place), ("provider", place)}


def test_the_distribution_with_both_noises() -> None:
    """Chi-square of 1,000 first tokens in plaintext against the distribution by enumeration of the
    two noises' sum: a false alarm for one seed in a million. With one noise it is softmax, which is
    another distribution here.
    """
    session = PlaintextSession()
    drawn = SharedText(session, REQUEST, CHOICE)
    streams = (Prg.from_seed(1, f"noise of {name}") for name in ("client", "provider"))
    client, provider = map(half, (OF_CLIENT, OF_PROVIDER), streams)
    collected = [drawn.draw_token(client, provider, []) for _ in range(1_000)]
    tokens, p = distribution()
    # The distribution of a winner under the sum of two Gumbels, by a fine sample of its own.
    rng = np.random.default_rng(0)
    noise = rng.gumbel(size=(2, 400_000, len(p))).sum(axis=0)
    flat = np.bincount(np.argmax(np.log(p) + noise, axis=1), minlength=len(p)) / 400_000
    counts = np.array([collected.count(int(t)) for t in tokens], float)
    assert chi_square_p(counts, flat) > 1e-6
    assert chi_square_p(counts, p) < 1e-6


def test_other_candidates_than_the_models_are_refused() -> None:
    own = half(OF_CLIENT)
    own.follow(REQUEST, [])
    table = own.offer(REQUEST, CHOICE)
    own.check(table, CHOICE)
    for row, change in ((0, 1), (1, 1 << 17), (2, 5)):
        wrong = table.copy()
        wrong[row, 0] += change
        with pytest.raises(WireError, match="provider's"):
            own.check(wrong, CHOICE)


@pytest.mark.parametrize("place", [-1, 16])
def test_a_place_that_is_none_is_refused(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a wrong share would open it."""
    session = PlaintextSession()
    drawn, call = SharedText(session, REQUEST, CHOICE), session.call
    monkeypatch.setattr(
        session, "call", lambda f, *a: np.int32(place) if f is drawn.draw else call(f, *a)
    )
    with pytest.raises(WireError, match="no candidate"):
        drawn.draw_token(half(OF_CLIENT), half(OF_PROVIDER), [])


def asked(directory: Path, of_provider: int) -> SecureCorpusRequest:
    save_tokenizer(directory)
    prompts = Prompts.of_query(Tokenizer.load(directory), "def ", 3)
    parameters = Parameters(2 + of_provider, 0.8, 0.9, 4, 5)
    return SecureCorpusRequest(parameters, 1e-6, 16, prompts, texts=2, of_provider=of_provider)


@pytest.mark.parametrize("of_provider, first, lost", [(0, [1, 1], 1), (1, [2], 2)])
def test_the_provider_s_references_are_read_in_one_session(
    of_provider: int, first: list[int], lost: int, tmp_path: Path
) -> None:
    """Every session reads them from the first on; texts of one that failed are lost together."""
    what, texts = asked(tmp_path, of_provider), ["alpha", "beta", "gamma", "delta"]
    parts = [texts[:2], texts[2:]]
    sessions: list[int] = []

    def make(number: int, of_texts: Sequence[Sequence[str]]) -> dict[str, Any]:
        assert list(of_texts) == parts[number : number + what.request.texts]
        sessions.append(len(of_texts))
        return {"texts": [[65]] * len(of_texts), "learned": {}}

    def fails(number: int, of_texts: Sequence[Sequence[str]]) -> dict[str, Any]:
        raise InputError("the peer has gone")

    write_corpus(tmp_path / "whole", what, texts, parts, make)
    assert sessions == first
    with pytest.raises(InputError):
        write_corpus(tmp_path / "some", what, texts, parts, fails)
    write_corpus(tmp_path / "some", what, texts, parts, make)
    lines = [json.loads(line) for line in (tmp_path / "some").read_text().splitlines()]
    assert [line.get("lost", False) for line in lines] == [i < lost for i in range(2)]


def test_the_provider_gives_no_more_than_it_says() -> None:
    """Its references are cut to one length, and a request that spends more is refused."""
    own = PrivacyBudget([[60], [], [70, 71, 72, 73, 74, 75, 76]], 1e3, 1e-6)
    (first,) = provider_prompts(own, REQUEST)
    assert first == [[40, 40, 40, 60, 41, 42]]
    assert [len(p) for p in first] == [6]
    other = SharedRequest(**vars(REQUEST) | {"texts": 3})
    _, null, long = provider_prompts(own, other)
    assert null == [[]] and long == [[40, 70, 71, 72, 41, 42]]
    with pytest.raises(InputError, match="has 3 references"):
        provider_prompts(own, SharedRequest(**vars(REQUEST) | {"texts": 4}))
    with pytest.raises(InputError, match="has 0 references"):
        provider_prompts(None, REQUEST)
    check_budget(own, REQUEST, CHOICE)
    with pytest.raises(InputError, match="who gives 0.5"):
        check_budget(PrivacyBudget([[60]], 0.5, 1e-6), REQUEST, CHOICE)
    for wrong in ({"of_provider": 3}, {"of_provider": 0}, {"room": 3}):
        with pytest.raises(InputError):
            SharedRequest(**vars(REQUEST) | wrong).check(PRIVATE)
