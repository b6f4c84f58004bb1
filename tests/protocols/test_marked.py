"""The race under the provider's noise: the winner, its distribution, and who knows what."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from protocols.verification import race
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.marked import Marked
from protocols.verification.race import ClientInput
from protocols.verification.variants import functionality, verifier
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.runtime.simulation import Simulation
from tests.protocols.races import expected
from tests.protocols.verifying import follows, two_parties
from tests.systems.watermark.chains import FALSE_ALARM, NEXT, START, Chain, p_value

RNG = np.random.default_rng(5)
STREAMS = Streams(Prg.from_seed(0, "unused"), Prg.from_seed(0, "unused"))
Noise = Callable[[np.ndarray], np.ndarray]


@pytest.mark.parametrize("name", ["marked", "marked hidden"])
def test_two_parties_find_the_winner_under_the_providers_noise(
    simulation: Simulation, name: str
) -> None:
    """As plaintext does; what is opened follows from the emitted tokens and from nothing else, the
    noise included, and the provider reads no more than of a race.
    """
    seen = set()
    for i in range(8):
        rows, noise = (np.round(RNG.normal(0, 3, (4, 5)) * 2**10) / 2**10 for _ in range(2))
        drafts = (rows + noise).argmax(axis=-1)[:3]
        if i % 4 < 3:
            drafts[i % 4] = (drafts[i % 4] + 1 + i // 4) % 5
        brought = ClientInput(drafts, None)
        client, provider = two_parties(simulation, name, rows, brought, noise.astype(np.float32))
        k, token = expected(rows + noise, drafts)
        assert (int(client.outcome.accepted), int(client.outcome.token)) == (k, token)
        assert provider.outcome.token is None
        hidden = name == "marked hidden"
        assert provider.accepted == (None if hidden else k)
        said = [("where drafts stop", follows(k, 3)), ("token", [token])]
        assert client.opened == said and provider.opened == ([] if hidden else said[:1])
        seen.add(k)
    assert seen == {0, 1, 2, 3}


def test_the_client_brings_drafts_alone() -> None:
    """The likeliest token, whatever its randomness; the noise is the provider's stream, row by row,
    each once.
    """
    rule, logits = Marked(Sampling(0.8)), RNG.normal(0, 2, 9)
    for seed in range(3):
        streams = Streams(Prg.from_seed(seed, "drafts"), Prg.from_seed(seed, "sampling"))
        draft, q = rule.propose(logits, 7, streams)
        assert draft == logits.argmax() and abs(q.sum() - 1) < 1e-12
    brought = rule.client_input([4, 1], np.zeros((2, 9)), 7, STREAMS)
    assert brought.noise is None and brought.drafts.tolist() == [4, 1]
    stream, whole = Prg.from_seed(1, "noise"), Prg.from_seed(1, "noise")
    made = [rule.provider_input(drafts, 9, stream) for drafts in (0, 2, 2)]
    assert [rows.shape for rows in made] == [(1, 9), (3, 9), (3, 9)]
    uniform = whole.uniform((63,))
    np.testing.assert_array_equal(
        np.concatenate(made).reshape(-1), (-np.log(-np.log(uniform))).astype(np.float32)
    )
    assert rule.provider_shapes(2, 9).shape == (3, 9)
    assert "provider's" in functionality("marked").client
    with pytest.raises(InputError, match="no greedy"):
        verifier("marked", Sampling(0.0))


# ---- the distribution


def texts(count: int, noise: Noise = lambda rows: rows, tokens: int = 4) -> list[tuple[int, ...]]:
    """Texts of a chain whose public model has other rows, two drafts a step. noise: what becomes of
    the provider's.
    """
    rule, stream = Marked(Sampling()), Prg.from_seed(3, "noise")
    start, chain = np.log(START), np.log(NEXT)
    likeliest = NEXT[::-1].argmax(axis=1)
    collected = []
    for _ in range(count):
        text: list[int] = []
        while len(text) < tokens:
            drafts = [int(likeliest[text[-1]])] if text else []
            drafts += [int(likeliest[drafts[0]])] if text else []
            rows = np.stack([chain[t] for t in (text[-1], *drafts)]) if text else start[None]
            rows = rows + noise(rule.provider_input(len(drafts), 3, stream))
            k, token = expected(rows, np.array(drafts))
            text += [*drafts[:k], token]
        collected.append(tuple(text[:tokens]))
    return collected


WANTED = Chain(Prg.from_seed(0, "unused")).text_distribution(4)


def test_texts_have_the_models_distribution() -> None:
    """4,000 texts of four tokens against all 81 by enumeration, false-alarm rate 1e-6. A twin that
    uses a row of noise for two rows fails it, and so does one that adds none to the last rows.
    """
    assert p_value(texts(4000), WANTED) > FALSE_ALARM
    assert p_value(texts(4000, lambda rows: np.repeat(rows[:1], len(rows), axis=0)), WANTED) < 1e-6
    some = np.array([[1], [0], [0]])
    assert p_value(texts(4000, lambda rows: rows * some[: len(rows)]), WANTED) < 1e-6


def test_the_rule_on_shares_is_the_plaintext_rule() -> None:
    """What the distribution is tested with is what runs on shares."""
    rule, stream = Marked(Sampling()), Prg.from_seed(4, "noise")
    for drafts in ([0, 2], [1, 1], [2, 0]):
        rows, noise = RNG.normal(0, 1, (3, 3)).astype(np.float32), rule.provider_input(2, 3, stream)
        brought = rule.client_input(drafts, np.zeros((2, 3)), 1, STREAMS)
        outcome, _ = rule.verify(rows[None], ClientInput(brought.drafts[None], None), noise[None])
        lane = race.RaceOutcome(outcome.accepted[0], outcome.token[0])
        assert rule.resolve(lane, drafts, np.zeros((2, 3)), float) == expected(
            rows + noise, np.array(drafts)
        )
