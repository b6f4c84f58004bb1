"""The race: the winner under shared noise, exact whatever the drafts are; greedy without noise."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from protocols.verification import race
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.race import ClientInput, Race
from spu_llm.core.prg import Prg
from spu_llm.runtime.simulation import Simulation
from tests.protocols.races import expected
from tests.protocols.verifying import chi_square_p, follows, of_one_lane, two_parties

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("name", ["race", "race hidden"])
def test_two_parties_find_the_winner(simulation: Simulation, name: str) -> None:
    """The same k and token as plaintext; the declared openings and no others."""
    seen, steps = set(), []
    for i in range(12):
        rows = np.round(RNG.normal(0, 3, (4, 5)) * 2**10) / 2**10
        drafts = rows.argmax(axis=-1)[:3]
        if i % 4 < 3:
            drafts[i % 4] = (drafts[i % 4] + 1 + i // 4) % 5
        client, provider = two_parties(simulation, name, rows, ClientInput(drafts, None), None)
        k, token = expected(rows, drafts)
        assert (int(client.outcome.accepted), int(client.outcome.token)) == (k, token)
        assert provider.outcome.token is None
        hidden = name == "race hidden"
        assert provider.accepted == (None if hidden else k)
        said = [("where drafts stop", follows(k, 3)), ("token", [token])]
        assert client.opened == said and provider.opened == ([] if hidden else said[:1])
        learners = {("client", "where drafts stop", 3), ("client", "token", 1)}
        if not hidden:
            learners.add(("provider", "where drafts stop", 3))
        assert {(o.learner, o.label, o.count) for o in client.openings} == learners
        seen.add(k)
        steps.append((rows, drafts, k, token))
    assert seen == {0, 1, 2, 3}
    # All of them side by side.
    rows, drafts, stops, tokens = map(np.stack, zip(*steps, strict=True))
    client, provider = two_parties(simulation, name, rows, ClientInput(drafts, None), None)
    np.testing.assert_array_equal(client.outcome.accepted, stops)
    np.testing.assert_array_equal(client.outcome.token, tokens)
    assert client.opened == [
        ("where drafts stop", [bit for k in stops for bit in follows(k, 3)]),
        ("token", tokens.tolist()),
    ]
    assert provider.opened == ([] if hidden else client.opened[:1])


def streams(seed: int) -> Streams:
    return Streams(Prg.from_seed(seed, "drafts"), Prg.from_seed(seed, "sampling"))


def test_noise_belongs_to_the_position() -> None:
    """Asked for again, or by the draft, it is the same; another position's is another."""
    verifier, keys = Race(Sampling(0.8)), streams(1)
    logits = RNG.normal(0, 2, (1, 9))
    q = np.stack([Sampling(0.8).distribution(row) for row in logits])
    first = verifier.client_input([0], q, 7, keys)
    again = verifier.client_input([0], q, 6, keys)
    np.testing.assert_array_equal(first.noise[0], again.noise[1])
    assert not np.array_equal(first.noise[0], first.noise[1])
    draft, _ = verifier.propose(logits[0], 7, keys)
    assert draft == int(np.argmax(logits[0] / 0.8 + first.noise[0].astype(np.float64)))


@pytest.mark.parametrize("drafter", ["accurate", "useless", "certain"])
def test_distribution_does_not_depend_on_the_drafts(drafter: str) -> None:
    """Chi-square of the first token over 20,000 positions, false-alarm rate 1e-6, with drafts of a
    good and of a useless model, and one draft for all; noise of the wrong distribution must fail.
    """
    verifier, keys, vocab, draws = Race(Sampling()), streams(2), 5, 20_000
    logits = np.array([1.0, 0.5, 0.0, -1.0, -2.0])
    p = np.exp(logits) / np.exp(logits).sum()
    certain = np.where(np.arange(vocab) == 1, 0, -np.inf)
    drafting = {"accurate": logits, "useless": -logits, "certain": certain}[drafter]
    verify = jax.jit(of_one_lane(lambda rows, drafts: race.verify(rows, drafts, 27)[0]))
    rows = np.broadcast_to(logits, (2, vocab)).astype(np.float32)
    counts, broken, accepted = np.zeros(vocab), np.zeros(vocab), 0
    q = Sampling().distribution(drafting)[None]
    for position in range(draws):
        draft, _ = verifier.propose(drafting, position, keys)
        noise = verifier.client_input([draft], q, position, keys).noise
        if position < 200:  # `expected` is the same rule, faster
            outcome = verify(rows + noise, np.array([draft], np.int32))
            assert (int(outcome.accepted), int(outcome.token)) == expected(
                rows + noise, np.array([draft])
            )
        k, token = expected(rows + noise, np.array([draft]))
        counts[draft if k else token] += 1
        broken[int(np.argmax(rows[0] + 1.3 * noise[0]))] += 1
        accepted += k
    assert chi_square_p(counts, p) > 1e-6
    assert chi_square_p(broken, p) < 1e-6
    assert (accepted > 0.99 * draws) == (drafter == "accurate")
    if drafter == "certain":
        assert accepted == counts[1] and accepted == pytest.approx(p[1] * draws, rel=0.1)
