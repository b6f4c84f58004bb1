"""Private text between two parties: with a tiny model, against the plaintext generator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.dp_text.lanes import Lanes, folded
from spu_llm.systems.dp_text.methods import token_weights
from spu_llm.systems.dp_text.secure import ClientHalf, ProviderHalf, SecretText, declare
from spu_llm.systems.dp_text.secure_records import TextRequest
from tests.kit.models import PRIVATE, endless, tiny_params
from tests.protocols.verifying import chi_square_p

PARAMS = endless(tiny_params(PRIVATE, 1))
WEIGHTS = folded(PRIVATE, PARAMS)
REQUEST = TextRequest(
    query=(40, 41, 42),
    room=6,
    batch=3,
    clip=0.8,
    temperature=0.9,
    max_new_tokens=4,
    top_k=5,
    places=12,
)
PROMPTS = [[60, 61, 62, 40, 41, 42], [], [90, 91, 92, 40, 41, 42]]


def halves(request: TextRequest, noisy: bool = False, seed: int = 1) -> tuple[Any, Any]:
    choice, stream = request.choice(PRIVATE), Prg.from_seed(seed, "noise")

    def noise() -> np.ndarray:
        drawn = choice.draw_noise(stream, request.places)
        return drawn if noisy else np.zeros_like(drawn)

    public = Lanes(PRIVATE, WEIGHTS, 1, len(request.query), request.max_new_tokens)
    return ClientHalf(PROMPTS, noise), ProviderHalf(public, WEIGHTS, Prg.from_seed(seed, "order"))


def session_text(session: Any, request: TextRequest = REQUEST, noisy: bool = False) -> Any:
    params = PARAMS if getattr(session, "rank", 1) != CLIENT else None
    drawn = SecretText(session, PRIVATE, request, share_weights(session, PRIVATE, params))
    drawn.prepare()
    declare(session, request)
    client, provider = halves(request, noisy)
    if hasattr(session, "rank"):
        client, provider = (client, None) if session.rank == CLIENT else (None, provider)
    return drawn.text(client, provider, lambda token: token == 0)


def likeliest_text(request: TextRequest) -> tuple[list[int], float]:
    """Return the plaintext generator's likeliest token at every step, and how far ahead it is at
    least.
    """
    new = request.max_new_tokens
    public = Lanes(PRIVATE, WEIGHTS, 1, len(request.query), new)
    private = Lanes(PRIVATE, WEIGHTS, request.batch, request.room, new)
    rows = [p or [0] * request.room for p in PROMPTS]
    of_public, of_private = public.begin([request.query]), private.begin(rows)
    tokens: list[int] = []
    ahead = np.inf
    while True:
        present = np.array([bool(p) for p in PROMPTS])
        actual, weights = token_weights(request.parameters, of_public[0], of_private, present)
        best = np.sort(np.log(weights))
        ahead = min(ahead, best[-1] - best[-2])
        tokens.append(int(actual[weights.argmax()]))
        if tokens[-1] == 0 or len(tokens) == new:
            return tokens, float(ahead)
        of_public, of_private = public.step(tokens[-1]), private.step(tokens[-1])


def test_without_noise_it_is_the_likeliest_text() -> None:
    assert session_text(PlaintextSession()) == likeliest_text(REQUEST)[0]


@pytest.mark.slow
def test_two_parties_write_the_likeliest_text(own_simulation: Simulation) -> None:
    """Without noise; they learn what is declared."""
    wanted, ahead = likeliest_text(REQUEST)
    assert ahead > 0.03  # more than a secure forward is off by

    def program(session: Any) -> Any:
        session.ledger.openings.clear()
        return session_text(session), [vars(o) for o in session.ledger.openings]

    (of_client, openings), (of_provider, same) = own_simulation.run(program)
    assert of_client == of_provider == wanted and openings == same
    seen = [(o["learner"], o["label"], o["count"]) for o in openings]
    place = ("provider", "place of the token among its candidates", 1)
    assert seen == [place, ("client", "token", 1)] * len(wanted)


def drawn_in(session: Any, request: TextRequest, config: Any = PRIVATE) -> SecretText:
    params = PARAMS if session.rank != CLIENT else None
    drawn = SecretText(session, config, request, share_weights(session, config, params))
    drawn.prepare()
    return drawn


ONE = replace(REQUEST, clip=2.0, top_k=2, temperature=0.3, max_new_tokens=1, places=64)


@pytest.mark.slow
def test_a_token_has_the_generators_distribution(own_simulation: Simulation) -> None:
    """Chi-square of 200 first tokens, each of noise and an order of its own, on the rows of one
    forward, against the plaintext generator's distribution: false-alarm rate 1e-6. The distribution
    without references, and that of half the noise, fail.
    """

    def program(session: Any) -> list[int]:
        drawn = drawn_in(session, ONE)
        client, provider = halves(ONE, noisy=True, seed=7)
        if session.rank == CLIENT:
            provider = None
        else:
            client = None
        rows, live = drawn.begin(drawn.decoder(), client)
        return [drawn.draw(client, provider, rows, live, []) for _ in range(200)]

    client, provider = own_simulation.run(program)
    assert client == provider
    distributions = []
    of_public, of_private = first_logits(ONE)
    for present, temperature in (([1, 0, 1], 0.3), ([0, 0, 0], 0.3), ([1, 0, 1], 0.15)):
        parameters = replace(ONE.parameters, temperature=temperature)
        actual, weights = token_weights(
            parameters, of_public[0], of_private, np.array(present, bool)
        )
        distribution = np.zeros(PRIVATE.vocab_size)
        distribution[actual] = weights / weights.sum()
        distributions.append(distribution)
    assert p_of(client, distributions[0]) > 1e-6
    assert all(p_of(client, distribution) < 1e-6 for distribution in distributions[1:])


def first_logits(request: TextRequest) -> tuple[np.ndarray, np.ndarray]:
    """Return phi_pub [1, vocab] and phi_i [B, vocab] in plaintext."""
    public = Lanes(PRIVATE, WEIGHTS, 1, len(request.query), 1)
    private = Lanes(PRIVATE, WEIGHTS, request.batch, request.room, 1)
    rows = [p or [0] * request.room for p in PROMPTS]
    return public.begin([request.query]), private.begin(rows)


def p_of(tokens: list[int], distribution: np.ndarray) -> float:
    """Return the p-value of a chi-square test, the tokens of fewer than 5 expected ones in one
    bin.
    """
    counts = np.bincount(tokens, minlength=len(distribution)).astype(float)
    often = len(tokens) * distribution >= 5
    rest = 1 - distribution[often].sum()
    counts = np.append(counts[often], counts[~often].sum())
    p = np.append(distribution[often], rest)
    if rest * len(tokens) < 1e-3:
        return 0.0 if counts[-1] else chi_square_p(counts[:-1], p[:-1])
    return chi_square_p(counts, p)


@pytest.mark.slow
def test_what_is_sent_does_not_depend_on_the_references(own_simulation: Simulation) -> None:
    """As many messages and bytes whether references are null or not, and where activations leave
    their ranges, which ends a completion; nothing but the place and the token is opened.
    """
    # Ranges that no row keeps to.
    narrow = replace(PRIVATE, norm_low=(PRIVATE.norm_high[0] / 2,))

    def program(session: Any) -> Any:
        collected = []
        for config in (PRIVATE, narrow):
            drawn = drawn_in(session, ONE, config)
            for prompts in (PROMPTS, [[]] * 3, PROMPTS):
                before = session.meter.traffic("prefill", "draw")
                session.ledger.openings.clear()
                client, provider = halves(ONE, noisy=True)
                client.prompts = prompts
                own = (client, None) if session.rank == CLIENT else (None, provider)
                drawn.text(*own, lambda token: False)  # type: ignore[call-arg]
                sent = session.meter.traffic("prefill", "draw")
                labels = {o.label for o in session.ledger.openings}
                assert labels == {"place of the token among its candidates", "token"}
                collected.append((sent.messages - before.messages, sent.bytes - before.bytes))
        return collected

    client, provider = own_simulation.run(program)
    assert client == provider
    for of_config in (client[:3], client[3:]):
        # SPU's own messages differ by a few bytes from run to run.
        messages, sizes = zip(*of_config, strict=True)
        assert len(set(messages)) == 1
        assert max(sizes) - min(sizes) < 0.01 * max(sizes)
