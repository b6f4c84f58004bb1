"""Private text between two parties: with a tiny model, against the plaintext generator."""

from __future__ import annotations

from typing import Any

import numpy as np

from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.dp_text.lanes import Lanes, folded
from spu_llm.systems.dp_text.methods import token_weights
from spu_llm.systems.dp_text.secure import ClientHalf, ProviderHalf, SecretText, declare
from spu_llm.systems.dp_text.secure_records import TextRequest
from tests.tiny import PRIVATE, endless, tiny_params

PARAMS = endless(tiny_params(PRIVATE, 1))
WEIGHTS = folded(PRIVATE, PARAMS)
REQUEST = TextRequest(
    query=(40, 41, 42), room=6, batch=3, clip=0.8, temperature=0.9, max_new_tokens=4, top_k=5,
    places=12,
)  # fmt: skip
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
    """The plaintext generator's likeliest token at every step, and how far ahead it is at least."""
    new = request.max_new_tokens
    public = Lanes(PRIVATE, WEIGHTS, 1, len(request.query), new)
    private = Lanes(PRIVATE, WEIGHTS, request.batch, request.room, new)
    rows = [p or [0] * request.room for p in PROMPTS]
    of_public, of_private = public.begin([request.query]), private.begin(rows)
    tokens: list[int] = []
    ahead = np.inf
    while True:
        present = np.array([bool(p) for p in PROMPTS])
        found, weights = token_weights(request.parameters, of_public[0], of_private, present)
        best = np.sort(np.log(weights))
        ahead = min(ahead, best[-1] - best[-2])
        tokens.append(int(found[weights.argmax()]))
        if tokens[-1] == 0 or len(tokens) == new:
            return tokens, float(ahead)
        of_public, of_private = public.step(tokens[-1]), private.step(tokens[-1])


def test_without_noise_it_is_the_likeliest_text(simulation: Simulation) -> None:
    """In plaintext, and between two parties, who learn what is declared."""
    wanted, ahead = likeliest_text(REQUEST)
    assert ahead > 0.03  # more than a secure forward is off by
    assert session_text(PlaintextSession()) == wanted

    def program(session: Any) -> Any:
        session.ledger.openings.clear()
        return session_text(session), [vars(o) for o in session.ledger.openings]

    (of_client, openings), (of_provider, same) = simulation.run(program)
    assert of_client == of_provider == wanted and openings == same
    seen = [(o["learner"], o["label"], o["count"]) for o in openings]
    place = ("provider", "place of the token among its candidates", 1)
    assert seen == [place, ("client", "token", 1)] * len(wanted)


