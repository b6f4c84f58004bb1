"""Token-only verification: exact by enumeration, two parties as the integer model, few openings."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest

from protocols.functions.exponential import hidden_weights
from protocols.verification import token
from protocols.verification.distribution import Sampling, Streams, quantised
from protocols.verification.sampling import Widths, locate, reject, residual
from protocols.verification.token import Token, TokenOutcome
from protocols.verification.variants import side_by_side
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.limits import MAX_DRAFTS
from tests.protocols.verifying import (
    UNIT,
    chi_square_p,
    follows,
    model,
    of_one_lane,
    place,
    random_step,
    token_inputs,
    two_parties,
)

VOCAB = 3
SMALL = Widths(total=9, draft=5, draw=9, most_accept=8)


# ---- the distribution, by enumeration


def chains(seed: int, certain: bool = False) -> tuple[Any, Any]:
    """Weights and draft integers after every prefix: fresh random ones each; all of a `certain`
    draft's are of one token.
    """
    rng = np.random.default_rng(seed)
    tables: dict[Any, Any] = {}

    def conditional(which: str, prefix: tuple[int, ...], total: int) -> np.ndarray:
        key = which, prefix
        if key not in tables:
            one = certain and which == "q"
            distribution = (
                np.eye(VOCAB)[rng.integers(VOCAB)] if one else rng.dirichlet(np.ones(VOCAB))
            )
            tables[key] = rng.multinomial(total, distribution)
        return tables[key]

    return (
        lambda prefix: conditional("w", prefix, 400),
        lambda prefix: conditional("q", prefix, 2**SMALL.draft),
    )


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_three_tokens_follow_the_private_model_by_enumeration(seed: int, certain: bool) -> None:
    """Joint distribution of the first three tokens of steps with two drafts, V = 3: all drafts, all
    r and u, by the plaintext of the ops. It is the chain's but for the rounding of r and u.
    """
    weights, q = chains(seed, certain)
    distribution: dict[tuple[int, ...], Fraction] = {}

    def grow(prefix: tuple[int, ...], mass: Fraction) -> None:
        if len(prefix) >= 3:
            distribution[prefix[:3]] = distribution.get(prefix[:3], Fraction(0)) + mass
            return
        for tokens, weight in step_outcomes(weights, q, prefix):
            grow(prefix + tokens, mass * weight)

    grow((), Fraction(1))
    assert sum(distribution.values()) == 1
    # Per token: r is rounded to 2^-9, and u twice (blocks of two) to 2^-9 at up to three edges.
    bound = 3 * (2.0**-9 + 3 * 2.0**-9)
    for tokens in itertools.product(range(VOCAB), repeat=3):
        chain = np.prod([weights(tokens[:i])[tokens[i]] / 400 for i in range(3)])
        assert abs(float(distribution.get(tokens, 0)) - chain) <= bound * max(chain, 0.05), tokens


def step_outcomes(weights: Any, q: Any, prefix: tuple[int, ...]) -> Any:
    """Yield (emitted tokens, probability) over everything that one step can do."""
    for drafted in itertools.product(range(VOCAB), repeat=2):
        before = [prefix + drafted[:i] for i in range(3)]
        drawn = Fraction(1)
        for b, d in zip(before, drafted, strict=False):
            drawn *= Fraction(int(q(b)[d]), 2**SMALL.draft)
        if not drawn:
            continue
        refused = [refusal(weights(b), q(b), d) for b, d in zip(before, drafted, strict=False)]
        for k in range(3):
            reached = drawn
            for i in range(k):
                reached *= 1 - refused[i]
            if k < 2:
                reached *= refused[k]
            if reached:
                taken = q(before[k]) if k < 2 else np.zeros(VOCAB, np.int64)
                for x, mass in enumerate(drawn_token(weights(before[k]), taken)):
                    yield (*drafted[:k], x), reached * mass


def refusal(w: np.ndarray, q: np.ndarray, d: int) -> Fraction:
    r = np.arange(2**SMALL.accept)
    same = np.ones_like(r)
    rejected = reject.reference(same * w[d], same * w.sum(), same * q[d], r, widths=SMALL)
    return Fraction(int(rejected.sum()), r.size)


def drawn_token(w: np.ndarray, q: np.ndarray) -> list[Fraction]:
    """Distribution of the two-level draw from the residual: blocks {0, 1} and {2}, then inside."""
    rest = residual.reference(w[None], q[None], widths=SMALL)[0]
    u = np.arange(2**SMALL.draw)

    def places(weights: np.ndarray) -> np.ndarray:
        spread = np.repeat(weights[None], u.size, axis=0)
        above = locate.reference(spread, u, draw=SMALL.draw, total=SMALL.total + SMALL.draft)
        return np.bincount((~above).sum(axis=1), minlength=len(weights) + 1)

    distribution = [Fraction(0)] * VOCAB
    blocks = places(np.array([rest[:2].sum(), rest[2]]))
    assert blocks[2] == 0  # a rejection leaves weight somewhere
    for b, inside in enumerate((rest[:2], np.array([rest[2], 0]))):
        if blocks[b]:
            counts = places(inside)
            for i, x in enumerate(range(2 * b, min(VOCAB, 2 * b + 2))):
                distribution[x] += Fraction(int(blocks[b]), u.size) * Fraction(
                    int(counts[i]), u.size
                )
    return distribution


# ---- two parties


@pytest.mark.parametrize("name", ["token", "hidden"])
def test_two_parties_follow_the_integer_model(simulation: Simulation, name: str) -> None:
    """Same drafts, r and u: the same k and token, every time."""
    rng = np.random.default_rng(4)
    accepted = []
    for _ in range(25):
        step = random_step(rng, drafts=2, vocab=6)
        expected = model(step, Widths.of_weights(6))
        of_client, of_provider = token_inputs(step, rng)
        client, provider = two_parties(
            simulation, name, step.weights * UNIT, of_client, of_provider
        )
        assert (int(client.outcome.accepted), int(client.outcome.token)) == expected
        assert provider.outcome.token is None
        assert provider.accepted == (expected[0] if name == "token" else None)
        assert client.opened == opened_of(*expected, vocab=6)
        assert provider.opened == (client.opened[:1] if name == "token" else [])
        accepted.append(expected[0])
    assert set(accepted) == {0, 1, 2}


@pytest.mark.parametrize("name", ["token", "hidden"])
def test_lanes_follow_the_integer_model(simulation: Simulation, name: str) -> None:
    """Twelve steps side by side: every one as if it were alone, with the openings that it has. Of
    six the drafts are certain.
    """
    rng = np.random.default_rng(4)
    steps = [random_step(rng, drafts=2, vocab=6, certain=i % 2 == 1) for i in range(12)]
    both = [token_inputs(step, rng) for step in steps]
    of_client, of_provider = (side_by_side([pair[i] for pair in both]) for i in range(2))
    rows = np.stack([step.weights for step in steps]) * UNIT
    client, provider = two_parties(simulation, name, rows, of_client, of_provider)
    expected = [model(step, Widths.of_weights(6)) for step in steps]
    assert {k for k, _ in expected} == {0, 1, 2}
    assert client.outcome.accepted.tolist() == [k for k, _ in expected]
    assert client.outcome.token.tolist() == [token for _, token in expected]
    assert provider.outcome.token is None
    alone = [dict(opened_of(*of_lane, vocab=6)) for of_lane in expected]
    assert client.opened == [
        (label, [bit for opened in alone for bit in opened[label]]) for label in alone[0]
    ]
    assert provider.opened == (client.opened[:1] if name == "token" else [])


def opened_of(k: int, x: int, vocab: int) -> list[tuple[str, list[bool]]]:
    """Return all that may be opened to the client: functions of the emitted tokens."""
    size = int(np.ceil(np.sqrt(vocab)))
    block, inside = divmod(x, size)
    return [
        ("where drafts stop", follows(k, 2)),
        ("block of the token", follows(block, -(-vocab // size))),
        ("place of the token", follows(inside, size)),
    ]


def test_without_drafts(simulation: Simulation) -> None:
    rng = np.random.default_rng(5)
    for _ in range(5):
        step = random_step(rng, drafts=0, vocab=7)
        of_client, of_provider = token_inputs(step, rng)
        client, _ = two_parties(simulation, "token", step.weights * UNIT, of_client, of_provider)
        assert (0, int(client.outcome.token)) == model(step, Widths.of_weights(7))


@pytest.mark.parametrize("name", ["token", "hidden"])
def test_as_many_drafts_as_a_step_has(simulation: Simulation, name: str) -> None:
    rng = np.random.default_rng(7)
    accepted = []
    for _ in range(8):
        step = random_step(rng, drafts=MAX_DRAFTS, vocab=6)
        of_client, of_provider = token_inputs(step, rng)
        client, _ = two_parties(simulation, name, step.weights * UNIT, of_client, of_provider)
        expected = model(step, Widths.of_weights(6))
        assert (int(client.outcome.accepted), int(client.outcome.token)) == expected
        accepted.append(expected[0])
    assert len(set(accepted)) > 2


@pytest.mark.parametrize("name", ["token", "hidden"])
def test_openings(simulation: Simulation, name: str) -> None:
    rng = np.random.default_rng(6)
    step = random_step(rng, drafts=2, vocab=6)
    client, provider = two_parties(simulation, name, step.weights * UNIT, *token_inputs(step, rng))
    assert client.openings == provider.openings
    to_both = {(o.learner, o.label, o.count, o.bits) for o in client.openings}
    tokens = {("client", "block of the token", 2, 1), ("client", "place of the token", 3, 1)}
    progress = {("client", "where drafts stop", 2, 1)}
    if name == "token":
        progress.add(("provider", "where drafts stop", 2, 1))
    assert to_both == tokens | progress


def test_each_party_brings_its_own_randomness() -> None:
    """Fresh words every time, from the party's own stream, none of them serving twice."""
    verifier, drafts = Token(Sampling()), [3, 1, 2]
    q = np.full((3, 4), 0.25)
    streams = Streams(Prg.from_seed(1, "drafts"), Prg.from_seed(1, "sampling"))
    made = [verifier.client_input(drafts, q, 0, streams).randomness for _ in range(2)]
    stream = Prg.from_seed(2, "provider")
    made += [verifier.provider_input(3, 4, stream) for _ in range(2)]
    made.append(verifier.provider_input(3, 4, Prg.from_seed(3, "provider")))
    words = np.concatenate([np.concatenate(r) for r in made])
    assert words.dtype == np.int32 and len(set(words.tolist())) == words.size == 25


def test_draws_with_both_randomness_follow_the_model() -> None:
    """Chi-square of the first token of 4,000 plaintext steps with everything that parties bring
    made by the verifier itself, false-alarm rate 1e-6; one word for both levels must fail.
    """
    verifier, vocab = Token(Sampling()), 4
    logits = np.array([[0.0, -0.4, 0.0, -0.4], [0.0, 1.0, 0.0, 1.0]])
    weights = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)
    public = np.array([0.0, 0.0, 0.0, 2.8])  # leaves something of tokens 0, 1 and 2
    p = weights[0] / weights[0].sum()
    streams = Streams(Prg.from_seed(4, "drafts"), Prg.from_seed(4, "sampling"))
    provider = Prg.from_seed(4, "provider")
    verify = jax.jit(of_one_lane(lambda *inputs: token.verify(*inputs)[0]))
    counts, broken = np.zeros(vocab), np.zeros(vocab)
    for _ in range(4_000):
        draft, q = verifier.propose(public, 0, streams)
        of_client = verifier.client_input([draft], q[None], 0, streams)
        of_provider = verifier.provider_input(1, vocab, provider)
        same = [r._replace(draw=r.draw[:1].repeat(2)) for r in (of_client.randomness, of_provider)]
        for tally, m, t in (
            (counts, of_client, of_provider),
            (broken, of_client._replace(randomness=same[0]), same[1]),
        ):
            k, x = verifier.resolve(verify(weights, m, t), [draft], q[None], float)
            tally[draft if k else x] += 1
    assert chi_square_p(counts, p) > 1e-6
    assert chi_square_p(broken, p) < 1e-6


def test_residual_that_rounds_to_zero_is_the_draft() -> None:
    """Without any weight no block is found; `resolve` then takes the draft."""
    assert place([0, 0], 7, 4) == 2
    outcome = TokenOutcome(np.int32(1), np.int32(-1))
    assert Token(Sampling()).resolve(outcome, [5, 8], np.zeros((2, 9)), float) == (1, 8)
    with pytest.raises(WireError, match="no weight"):
        outcome = TokenOutcome(np.int32(2), np.int32(-1))
        Token(Sampling()).resolve(outcome, [5, 8], np.zeros((2, 9)), float)


@pytest.mark.parametrize("token", [9, 2**31 - 1])
def test_a_token_beyond_the_vocabulary_ends_it(token: int) -> None:
    """A provider that opens another place than the drawn one: 9 is in the padding of 4 blocks."""
    outcome = TokenOutcome(np.int32(0), np.int32(token))
    assert Token(Sampling()).resolve(
        TokenOutcome(np.int32(0), np.int32(8)), [5], np.zeros((1, 9)), float
    ) == (0, 8)
    with pytest.raises(WireError, match=f"the token stands at {token}"):
        Token(Sampling()).resolve(outcome, [5], np.zeros((1, 9)), float)


# ---- how close to the exact distribution at a full vocabulary


def emitted_distribution(w: np.ndarray, q: np.ndarray, widths: Widths) -> np.ndarray:
    """Distribution float64 [vocab] of a step's first token by the integer model: weights w, one
    draft of integers q. The residual's random rounding is left out: it has no bias.
    """
    z = int(w.sum())
    steps = 2**widths.accept
    # r' is accepted while (2 r' + 1) q z < w 2^scale.
    with np.errstate(divide="ignore", invalid="ignore"):
        most = (w.astype(np.float64) * 2.0**widths.scale / (q * float(z)) - 1) / 2
    accept = np.where(q > 0, np.clip(np.ceil(most), 0, steps) / steps, 0.0)
    stays = q / q.sum() * accept
    rest = np.maximum((w << widths.draft) - q * z, 0)
    rest >>= widths.shift(widths.draft)
    size = int(np.ceil(np.sqrt(w.size)))
    table = np.zeros(size * -(-w.size // size), np.int64)
    table[: w.size] = rest
    table = table.reshape(-1, size)
    blocks = on_grid(table.sum(axis=1), widths.draw)
    inside = np.stack([on_grid(b, widths.draw) if b.any() else b * 0.0 for b in table])
    drawn = (blocks[:, None] * inside).reshape(-1)[: w.size]
    return stays + (1 - stays.sum()) * drawn


def on_grid(weights: np.ndarray, draw: int) -> np.ndarray:
    """Return how many of the 2^draw values of u fall on each weight, as a distribution."""
    prefix, total = np.cumsum(weights).astype(np.float64), float(weights.sum())
    below = np.ceil(prefix * 2.0**draw / total)  # of all u: those with u total < prefix 2^draw
    return np.diff(np.concatenate([[0.0], below])) / 2**draw


def rows_and_drafts(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of standard deviation 3, their softmax, and integers of a draft model's near it."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, vocab).astype(np.float32)
    p = np.exp(logits.astype(np.float64) - logits.max())
    near = np.exp(logits + rng.normal(0, 0.7, vocab))
    return logits, p / p.sum(), quantised(near / near.sum())


@pytest.mark.parametrize(("vocab", "bound"), [(32000, 0.005), (151936, 0.01)])
def test_distribution_from_exact_weights_at_a_full_vocabulary(vocab: int, bound: float) -> None:
    """Total variation from p, shares of 18 fraction bits (whose rounding is nearly all of it)."""
    logits, p, q = rows_and_drafts(vocab)
    w = np.rint(p / p.max() / UNIT).astype(np.int64)
    variation = np.abs(emitted_distribution(w, q, Widths.of_weights(vocab)) - p).sum() / 2
    assert variation <= bound, variation


def test_distribution_from_logits_at_a_full_vocabulary(simulation: Simulation) -> None:
    """Total variation from p at most 0.01, from two parties' shared logits at V = 32000."""
    logits, p, q = rows_and_drafts(32000)
    half = np.random.default_rng(1).normal(0, 5, logits.shape).astype(np.float32)
    function = SecureFunction(
        lambda a, b: reveal(hidden_weights((a + b)[None]), to=Owner.CLIENT, label="test"),
        (Owner.CLIENT, Owner.PROVIDER),
        "weights of a row",
    )

    def program(session: PartySession) -> Any:
        a = session.private(CLIENT, lambda: half, half.shape, np.float32)
        b = session.private(PROVIDER, lambda: logits - half, half.shape, np.float32)
        return session.get(session.call(function, a, b))

    row = simulation.run(program)[CLIENT]
    w = np.rint(row[0].astype(np.float64) / UNIT).astype(np.int64)
    assert w.min() >= 0 and w.sum() < 2**33
    variation = np.abs(emitted_distribution(w, q, Widths.of_weights(32000)) - p).sum() / 2
    assert variation <= 0.01, variation


def test_plaintext_agrees_with_the_integer_model() -> None:
    """Under `jax.jit` the ops' float meaning gives the same tokens, away from edges."""
    rng = np.random.default_rng(9)
    plain = jax.jit(of_one_lane(token.verify))
    same = 0
    for _ in range(40):
        step = random_step(rng, drafts=2, vocab=6)
        of_client, of_provider = token_inputs(step, rng)
        outcome, _ = plain((step.weights * UNIT).astype(np.float32), of_client, of_provider)
        same += (int(outcome.accepted), int(outcome.token)) == model(step, Widths.of_weights(6))
    assert same >= 39
