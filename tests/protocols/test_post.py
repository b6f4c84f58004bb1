"""POST verification, as published and naive: exact rules, two parties as the model, statistics."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.verification import post
from protocols.verification.distribution import Sampling, Streams, draw, quantised, residual
from protocols.verification.post import ClientInput, Post, PostOutcome
from protocols.verification.sampling import Widths
from protocols.verification.variants import side_by_side
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.session import PlaintextSession
from spu_llm.runtime.simulation import Simulation
from tests.protocols.verifying import (
    UNIT,
    Step,
    chi_square_p,
    of_one_lane,
    random_step,
    two_parties,
)

VOCAB = 3


# ---- the distribution, by enumeration


def chains(seed: int, sampling: Sampling = Sampling(), certain: bool = False) -> tuple[Any, Any]:
    """Return p(. | prefix) and q(. | prefix): a fresh random distribution for every prefix; all of
    a `certain` draft's is one token's.
    """
    rng = np.random.default_rng(seed)
    tables: dict[Any, Any] = {}

    def conditional(which: str, prefix: tuple[int, ...]) -> np.ndarray:
        key = which, prefix
        if key not in tables:
            one = certain and which == "q"
            distribution = (
                np.eye(VOCAB)[rng.integers(VOCAB)] if one else rng.dirichlet(np.ones(VOCAB))
            )
            tables[key] = distribution
        return tables[key]

    return (
        lambda prefix: conditional("p", prefix),
        lambda prefix: sampling.restricted(conditional("q", prefix)),
    )


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(1.0, 2), Sampling(1.0, 0, 0.6), Sampling(1.0, 2, 0.9)],
    ids=str,
)
def test_emitted_tokens_follow_the_private_model_by_enumeration(
    seed: int, sampling: Sampling, certain: bool
) -> None:
    """Joint distribution of the first three tokens of a two-draft step and the steps after, V = 3,
    top-k and top-p among the ways of sampling.

    Every draft, every accept or reject, and every token drawn in its place is enumerated with its
    probability; acceptance by p has probability min(1, p / q), a draft outside top-k or top-p ends
    the step, and `resolve` draws.
    """
    p, q = chains(seed, sampling, certain)
    distribution: dict[tuple[int, ...], float] = {}

    def grow(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) >= 3:
            distribution[prefix[:3]] = distribution.get(prefix[:3], 0.0) + mass
            return
        for tokens, weight in step_outcomes(p, q, prefix, sampling):
            grow(prefix + tokens, mass * weight)

    grow((), 1.0)
    for tokens in itertools.product(range(VOCAB), repeat=3):
        chain = np.prod([sampling.restricted(p(tokens[:i]))[tokens[i]] for i in range(3)])
        assert abs(distribution.get(tokens, 0.0) - chain) < 1e-12, tokens


def step_outcomes(p: Any, q: Any, prefix: tuple[int, ...], sampling: Sampling) -> Any:
    """Yield (emitted tokens, probability) over everything that one step can do."""
    for drafted in itertools.product(range(VOCAB), repeat=2):
        before = [prefix + drafted[:i] for i in range(3)]
        drawn = np.prod([q(b)[d] for b, d in zip(before, drafted, strict=False)])
        if drawn == 0:
            continue
        accept = [min(1.0, p(b)[d] / q(b)[d]) for b, d in zip(before, drafted, strict=False)]
        outside = [not sampling.keeps(p(b))[d] for b, d in zip(before, drafted, strict=False)]
        for k in range(3):
            stays = [a * (not o) for a, o in zip(accept[:k], outside, strict=False)]
            reached = drawn * np.prod(stays)
            for rejected in (True, False) if k < 2 else (False,):
                mass = reached
                if k < 2:
                    if not rejected and not outside[k]:
                        continue
                    mass *= 1 - accept[k] if rejected else accept[k]
                if mass == 0:
                    continue
                bits = np.array([i == k and rejected for i in range(2)])
                out = np.array([i <= k and outside[i] for i in range(2)])
                outcome = PostOutcome(bits, out, p(before[k]))
                distributions = np.stack([q(b) for b in before[:2]])
                for token, weight in drawn_by_resolve(outcome, drafted, distributions, sampling, k):
                    yield (*drafted[:k], token), mass * weight


def drawn_by_resolve(
    outcome: PostOutcome, drafted: tuple[int, ...], q: np.ndarray, sampling: Sampling, k: int
) -> Any:
    """Yield (token, probability) of `resolve`: its uniforms are enumerated between edges."""
    p = np.asarray(outcome.row)
    kept = sampling.restricted(p)
    if k < 2 and outcome.rejected[k]:
        first = residual(p / p.sum(), q[k])
        for x in range(VOCAB):
            if first[x] and kept[x]:
                yield resolved(outcome, drafted, q, sampling, k, [middle(first, x)]), first[x]
            elif first[x]:
                for y in np.flatnonzero(kept):
                    uniforms = [middle(first, x), middle(kept, y)]
                    token = resolved(outcome, drafted, q, sampling, k, uniforms)
                    yield token, first[x] * kept[y]
    else:
        for y in np.flatnonzero(kept):
            yield resolved(outcome, drafted, q, sampling, k, [middle(kept, y)]), kept[y]


def middle(p: np.ndarray, x: int) -> float:
    return float((np.cumsum(p)[x] - p[x] / 2) / p.sum())


def resolved(
    outcome: PostOutcome,
    drafted: tuple[int, ...],
    q: np.ndarray,
    sampling: Sampling,
    k: int,
    uniforms: list[float],
) -> int:
    left = list(uniforms)
    actual, token = Post(sampling).resolve(outcome, drafted, q, lambda: left.pop(0))
    assert (actual, left) == (k, [])
    return token


def test_acceptance_turns_at_p_over_q() -> None:
    """`verify` accepts exactly while r q(d) < p(d): with the enumeration above, all of it."""
    rng = np.random.default_rng(3)
    w = rng.integers(1, 1000, (50, 2, 5))
    z = w[:, 0].sum(-1)
    drafts = rng.integers(0, 5, 50)
    accept = Widths.of_weights(5).accept
    for weights, total, d in zip(w, z, drafts, strict=True):
        q = 60000
        turn = int(weights[0, d]) * 2 ** (accept + 17) / (q * int(total))  # of 2 r' + 1
        for r, expected in ((int(turn - 2) // 2, False), (int(turn + 2) // 2, True)):
            if 0 <= r < 2**accept:
                of_client = client_input([d], [q], [r])
                assert plaintext(weights * UNIT, of_client).rejected[0] == expected


def client_input(drafts: Any, q: Any, r: Any) -> ClientInput:
    return ClientInput(*(np.array(x, np.int32) for x in (drafts, q, r)))


def test_token_of_zero_encoded_probability_is_rejected() -> None:
    """The paper's tie rule would accept it; ours compares strictly."""
    rows = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert plaintext(rows, client_input([0], [1], [0])).rejected[0]


PLAIN = SecureFunction(
    of_one_lane(lambda w, m: post.verify(w, m, Sampling())[0]),
    (Owner.PROVIDER, Owner.CLIENT),
    "plain rows",
)
SESSION = PlaintextSession()


def plaintext(rows: np.ndarray, of_client: ClientInput) -> PostOutcome:
    outcome = SESSION.call(PLAIN, rows.astype(np.float32), of_client)
    return PostOutcome(*(v.value if v is not None else None for v in outcome))


@given(st.lists(st.booleans(), max_size=16))
def test_first_rejection(rejected: list[bool]) -> None:
    expected = rejected.index(True) if True in rejected else len(rejected)
    assert int(post.first_rejection(np.array(rejected, bool))) == expected


# ---- two parties


def post_input(step: Step, *, naive: bool, vocab: int) -> ClientInput:
    accept = Widths.of_weights(vocab).accept
    q = step.q if naive else step.q[np.arange(len(step.drafts)), step.drafts]
    return client_input(step.drafts, q, step.r % 2**accept)


def rejections(step: Step, widths: Widths) -> list[bool]:
    """Return the integer rule, by Python's integers."""
    collected = []
    for w, d, q, r in zip(step.weights, step.drafts, step.q, step.r, strict=False):
        threshold = (2 * (int(r) % 2**widths.accept) + 1) * int(q[d]) * int(w.sum())
        collected.append(threshold >= int(w[d]) << widths.scale)
    return collected


@pytest.mark.parametrize("name", ["post", "naive"])
def test_two_parties_reject_and_select_by_the_integer_rule(
    simulation: Simulation, name: str
) -> None:
    """Same drafts and r: the same bits and row, and to both the declared openings; also where
    drafts are certain.
    """
    rng = np.random.default_rng(6)
    firsts, steps = [], []
    for i in range(15):
        step = random_step(rng, drafts=2, vocab=6, certain=i % 3 == 0)
        of_client = post_input(step, naive=name == "naive", vocab=6)
        client, provider = two_parties(simulation, name, step.weights * UNIT, of_client, None)
        expected = rejections(step, Widths.of_weights(6))
        np.testing.assert_array_equal(client.outcome.rejected, expected)
        k = int(post.first_rejection(np.array(expected)))
        np.testing.assert_array_equal(np.rint(client.outcome.row / UNIT), step.weights[k])
        assert provider.outcome.row is None and provider.accepted is None
        collected = [(o.learner, o.label, o.count) for o in client.openings]
        assert collected == [
            ("client", "rejection bits", 2),
            ("client", "row of the distribution", 6),
        ]
        firsts.append(k)
        steps.append((step.weights, of_client, expected))
    assert set(firsts) == {0, 1, 2}
    # All of them side by side.
    weights, inputs, rejected = (list(each) for each in zip(*steps, strict=True))
    client, _ = two_parties(simulation, name, np.stack(weights) * UNIT, side_by_side(inputs), None)
    np.testing.assert_array_equal(client.outcome.rejected, rejected)
    chosen = [rows[k] for rows, k in zip(weights, firsts, strict=True)]
    np.testing.assert_array_equal(np.rint(client.outcome.row / UNIT), chosen)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("top-k", Sampling(1.0, 3)),
        ("top-k all", Sampling(1.0, 10**9)),
        ("top-p", Sampling(1.0, 0, 0.8)),
        ("both", Sampling(1.0, 4, 0.8)),
    ],
)
def test_two_parties_cut_as_plaintext_does(
    simulation: Simulation, name: str, sampling: Sampling
) -> None:
    """Which drafts top-k and top-p leave, ties included."""
    rng = np.random.default_rng(8)
    cuts = []
    for i in range(12):
        step = random_step(rng, drafts=2, vocab=6)
        if i % 3 == 0:
            step.weights[0] = np.array([9, 7, 7, 7, 5, 1]) * 1000  # ties about the edge
        of_client = post_input(step, naive=False, vocab=6)
        client, _ = two_parties(simulation, name, step.weights * UNIT, of_client, None)
        expected = [
            not sampling.keeps(w)[d] for w, d in zip(step.weights, step.drafts, strict=False)
        ]
        np.testing.assert_array_equal(client.outcome.outside, expected)
        cuts += expected
    assert any(cuts) == (name != "top-k all") and not all(cuts)


DRAWS = 20_000
ALPHA = 1e-6  # chance of a false alarm


def test_two_party_bits_give_draws_of_the_private_distribution(simulation: Simulation) -> None:
    """Chi-square on 20,000 speculative draws, V = 6, with bits that two parties computed.

    The emitted token must follow p, and a verifier that accepts every draft must fail the same
    test.
    """
    rng = np.random.default_rng(11)
    vocab, at_once = 6, 250
    w = np.rint(rng.dirichlet(np.ones(vocab)) / UNIT * 0.9).astype(np.int64)
    q = quantised(rng.dirichlet(np.ones(vocab) * 2))
    p = w / w.sum()
    streams = Streams(Prg.from_seed(1, "drafts"), Prg.from_seed(1, "sampling"))
    # `at_once` drafts of one and the same row: independent verifications side by side.
    rows = np.broadcast_to(w * UNIT, (at_once + 1, vocab))
    counts, everything = np.zeros(vocab), np.zeros(vocab)
    for _ in range(DRAWS // at_once):
        drafts = [draw(q, float(u)) for u in streams.drafting.uniform((at_once,))]
        distributions = np.repeat(q[None] / q.sum(), at_once, axis=0)
        of_client = Post(Sampling()).client_input(drafts, distributions, 0, streams)
        client, _ = two_parties(simulation, "post", rows, of_client, None)
        rejected = client.outcome.rejected
        for d, stops, u in zip(drafts, rejected, streams.sampling.uniform((at_once,)), strict=True):
            token = draw(residual(p, q / q.sum()), float(u)) if stops else d
            counts[token] += 1
            everything[d] += 1
    assert chi_square_p(counts, p) > ALPHA
    assert chi_square_p(everything, p) < ALPHA


def test_bytes_of_a_step_at_full_vocabulary(simulation: Simulation) -> None:
    """V = 32000, eight drafts, from shared weights: what the paper counts, and little else.

    The masked weights of the drafts' rows, the masked row that is chosen of nine, and that row.
    """
    vocab, count = 32000, 8
    verify = SecureFunction(
        of_one_lane(lambda w, of_client: post.verify(w, of_client, Sampling(), naive=False)),
        (Owner.JOINT, Owner.CLIENT),
        "post at full vocabulary",
    )
    weights = jax.ShapeDtypeStruct((count + 1, vocab), np.float32)
    of_client = Post(Sampling()).client_shapes(count, vocab)
    costs = simulation.run(lambda session: session.demand(verify, weights, of_client)[0].cost)
    assert costs[CLIENT] == costs[PROVIDER]
    cost = costs[CLIENT]
    chosen, row = -(-Widths.of_weights(vocab).chosen // 8), 3  # bytes of a word
    masked = vocab * (count * chosen + (count + 1) * row + row)
    assert 0 < cost.provider_to_client - masked < 1000
    assert 0 < cost.client_to_provider < 1000
    assert cost.messages == 16
