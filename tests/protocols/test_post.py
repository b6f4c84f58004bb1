"""POST verification: exact law by enumeration, plaintext against two parties, and statistics."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from protocols import post
from spu_llm.prg import Prg
from spu_llm.secure import PartySession, PlaintextSession, SecureFunction, Simulation
from spu_llm.values import CLIENT, PROVIDER, Owner

VOCAB = 3


def chains(seed: int) -> tuple[Any, Any]:
    """p(. | prefix) and q(. | prefix): a fresh random distribution for every prefix."""
    rng = np.random.default_rng(seed)
    tables: dict[Any, Any] = {}

    def conditional(which: str, prefix: tuple[int, ...]) -> np.ndarray:
        key = which, prefix
        if key not in tables:
            tables[key] = rng.dirichlet(np.ones(VOCAB))
        return tables[key]

    return lambda prefix: conditional("p", prefix), lambda prefix: conditional("q", prefix)


@pytest.mark.parametrize("seed", range(5))
def test_emitted_tokens_follow_the_private_model_by_enumeration(seed: int) -> None:
    """Joint law of the first three tokens of a two-draft step and the steps after, V = 3.

    Every draft, every accept or reject, and every bonus token is enumerated with its probability;
    acceptance has probability P(r q < p) = min(1, p / q), the bonus is `next_distribution`'s.
    """
    p, q = chains(seed)
    law: dict[tuple[int, ...], float] = {}

    def grow(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) >= 3:
            law[prefix[:3]] = law.get(prefix[:3], 0.0) + mass
            return
        for tokens, weight in step_outcomes(p, q, prefix, drafts=2):
            grow(prefix + tokens, mass * weight)

    grow((), 1.0)
    for tokens in itertools.product(range(VOCAB), repeat=3):
        chain = np.prod([p(tokens[:i])[tokens[i]] for i in range(3)])
        assert abs(law[tokens] - chain) < 1e-12, tokens


def step_outcomes(p: Any, q: Any, prefix: tuple[int, ...], drafts: int) -> Any:
    """(emitted tokens, probability) over everything that one step can do."""
    for drafted in itertools.product(range(VOCAB), repeat=drafts):
        drawn = np.prod([q(prefix + drafted[:i])[d] for i, d in enumerate(drafted)])
        accept = [
            min(1.0, p(prefix + drafted[:i])[d] / q(prefix + drafted[:i])[d])
            for i, d in enumerate(drafted)
        ]
        for k in range(drafts + 1):
            kept = prefix + drafted[:k]
            reached = drawn * np.prod(accept[:k]) * (1.0 if k == drafts else 1 - accept[k])
            bonus = post.next_distribution(p(kept), None if k == drafts else q(kept))
            for token in range(VOCAB):
                yield (*drafted[:k], token), reached * bonus[token]


def test_acceptance_turns_at_p_over_q() -> None:
    """`verify` accepts exactly while r q(d) < p(d): with enumeration above, the whole law."""
    rng = np.random.default_rng(3)
    e = rng.random((200, 2, 5)).astype(np.float32)
    drafts = rng.integers(0, 5, (200, 1)).astype(np.int32)
    p_of_draft = (e[np.arange(200), 0, drafts[:, 0]] / e[:, 0].sum(-1))[:, None]
    for factor, expected in ((1 - 1e-4, False), (1 + 1e-4, True)):
        rejected, _ = _plaintext(e, drafts, (p_of_draft * factor).astype(np.float32))
        assert (rejected == expected).all()


@given(st.lists(st.booleans(), max_size=16))
def test_first_rejection(rejected: list[bool]) -> None:
    expected = rejected.index(True) if True in rejected else len(rejected)
    assert int(post.first_rejection(np.array(rejected, bool))) == expected


@given(st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_draw_is_the_inverse_cdf(vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(vocab)) * (rng.random(vocab) < 0.7)
    p = p / p.sum() if p.sum() > 0 else np.eye(vocab)[0]
    edges = np.concatenate([[0], np.cumsum(p)])
    for token in range(vocab):
        low, high = edges[token], edges[token + 1]
        if high - low > 1e-9:
            assert post.draw(p, (low + high) / 2 / edges[-1]) == token
    assert p[post.draw(p, 0.0)] > 0 and p[post.draw(p, 1 - 2**-53)] > 0


def test_residual_that_rounds_to_zero_falls_back_to_p() -> None:
    p = np.array([0.25, 0.75])
    np.testing.assert_array_equal(post.next_distribution(p, p), p)


def test_token_of_zero_encoded_probability_is_rejected() -> None:
    """The paper's tie rule would accept it; ours compares strictly."""
    rows = jnp.array([[[0.0, 1.0], [1.0, 0.0]]])
    rejected, _ = _plaintext(rows, np.array([[0]], np.int32), np.array([[0.0]], np.float32))
    assert rejected[0, 0]


def _plaintext(rows: Any, drafts: np.ndarray, thresholds: np.ndarray) -> Any:
    function = SecureFunction(
        lambda r, d, t: post.verify(r, d, t, greedy=False),
        (Owner.PROVIDER, Owner.CLIENT, Owner.CLIENT),
        "verify rows",
    )
    out = PlaintextSession().call(function, rows, drafts, thresholds)
    return [v.value for v in out]


def _two_parties(
    simulation: Simulation, logits: np.ndarray, drafts: np.ndarray, thresholds: np.ndarray,
    *, greedy: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Secure verification of shared logits; rejected bits and rows as the client sees them."""
    function = _shared_verify(greedy)

    def program(session: PartySession) -> Any:
        # Half of the logits each: what both add is shared, as after a forward.
        halves = [session.private(r, lambda: logits / 2, logits.shape, np.float32)
                  for r in (CLIENT, PROVIDER)]  # fmt: skip
        d = session.private(CLIENT, lambda: drafts, drafts.shape, np.int32)
        t = session.private(CLIENT, lambda: thresholds, thresholds.shape, np.float32)
        out = session.call(function, *halves, d, t)
        return [session.get(v) for v in out]

    client, provider = simulation.run(program)
    assert all(v is None for v in provider)
    return client[0], client[1]


_SHARED: dict[bool, SecureFunction] = {}


def _shared_verify(greedy: bool) -> SecureFunction:
    C, P = Owner.CLIENT, Owner.PROVIDER  # noqa: N806
    if greedy not in _SHARED:
        _SHARED[greedy] = SecureFunction(
            lambda a, b, d, t: post.verify(
                post.scores(a + b, 1.0, greedy=greedy), d, t, greedy=greedy
            ),
            (C, P, C, C), f"shared verify {greedy}",
        )  # fmt: skip
    return _SHARED[greedy]


def test_two_parties_reject_and_select_as_plaintext(simulation: Simulation) -> None:
    """Same drafts and r: the same bits (unless within fixed-point reach) and the same row."""
    rng = np.random.default_rng(5)
    batch, count, vocab = 64, 4, 24
    logits = rng.normal(0, 2, (batch, count + 1, vocab)).astype(np.float32)
    drafts = logits[:, :count].argmax(-1).astype(np.int32)
    thresholds = (rng.random((batch, count)) * 0.6).astype(np.float32)
    rejected, row = _two_parties(simulation, logits, drafts, thresholds)

    e = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float64)
    chosen = np.take_along_axis(e[:, :count], drafts[..., None], -1)[..., 0]
    margin = chosen - thresholds * e[:, :count].sum(-1)
    clear = np.abs(margin) > 0.02
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(rejected[clear], (margin <= 0)[clear])
    first = np.asarray(post.first_rejection(rejected))
    assert len(set(first)) > 2  # different rows get selected
    np.testing.assert_allclose(row, e[np.arange(batch), first], atol=5e-3)


def test_two_parties_greedy(simulation: Simulation) -> None:
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 2, (32, 3, 16)).astype(np.float32)
    drafts = rng.integers(0, 16, (32, 2)).astype(np.int32)
    best = logits.argmax(-1).astype(np.int32)
    drafts[:24] = best[:24, :2]
    drafts[8:16, 1] = (drafts[8:16, 1] + 1) % 16
    none = np.zeros((32, 2), np.float32)
    rejected, row = _two_parties(simulation, logits, drafts, none, greedy=True)
    np.testing.assert_array_equal(rejected, drafts != best[:, :2])
    first = np.asarray(post.first_rejection(rejected))
    np.testing.assert_array_equal(row.argmax(-1), best[np.arange(32), first])


DRAWS = 20_000
ALPHA = 1e-6  # chance of a false alarm


def test_two_party_draws_have_the_private_distribution(simulation: Simulation) -> None:
    """Chi-square on 20,000 speculative draws verified by two parties, V = 6, two drafts.

    One call verifies the whole batch, drafts drawn from q and r from a keyed stream. The first two
    emitted tokens must follow p's chain (here p does not depend on the prefix: row i is p_i). A
    verifier that accepts everything must fail the same test.
    """
    vocab, count = 6, 2
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 1.0, (count + 1, vocab)).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    q = rng.dirichlet(np.ones(vocab) * 2, count)
    sampling = Prg.from_seed(1, "chi-square")
    drafts = np.stack(
        [np.searchsorted(np.cumsum(q[i]), sampling.uniform((DRAWS,))) for i in range(count)], -1
    ).astype(np.int32)
    q_of_draft = q[np.arange(count), drafts]
    thresholds = post.threshold(sampling.uniform((DRAWS, count)), q_of_draft)
    batch = np.broadcast_to(logits, (DRAWS, count + 1, vocab)).copy()
    rejected, rows = _two_parties(simulation, batch, drafts, thresholds)

    def emitted(rejected: np.ndarray) -> np.ndarray:
        first = np.asarray(post.first_rejection(rejected))
        uniform = sampling.uniform((DRAWS,))
        tokens = np.zeros((DRAWS, count + 1), int)
        for i in range(DRAWS):
            k = first[i]
            row = post.distribution(rows[i], greedy=False)
            bonus = post.draw(post.next_distribution(row, q[k] if k < count else None), uniform[i])
            tokens[i] = [*drafts[i, :k], bonus, *[-1] * (count - k)]
        return tokens

    tokens = emitted(rejected)
    assert _chi_square_p(np.bincount(tokens[:, 0], minlength=vocab), p[0]) > ALPHA
    second = tokens[tokens[:, 1] >= 0, 1]
    # Given that the first draft was accepted, the second token follows p_1.
    assert second.size > 5_000
    assert _chi_square_p(np.bincount(second, minlength=vocab), p[1]) > ALPHA
    # A broken verifier that accepts every draft emits q, which the same test must notice.
    accept_all = emitted(np.zeros_like(rejected))
    assert _chi_square_p(np.bincount(accept_all[:, 0], minlength=vocab), p[0]) < ALPHA


def _chi_square_p(counts: np.ndarray, p: np.ndarray) -> float:
    expected = counts.sum() * p
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), p.size - 1))


def test_distribution_is_close_at_full_vocabulary(simulation: Simulation) -> None:
    """Total variation of an opened row from p, from shared logits: under 0.003 at V = 4096."""
    vocab = 4096
    logits = np.random.default_rng(2).normal(0, 3, (1, 1, vocab)).astype(np.float32)
    empty = np.zeros((1, 0))
    _, row = _two_parties(
        simulation, logits, empty.astype(np.int32), empty.astype(np.float32)
    )
    p = np.exp(logits[0, 0].astype(np.float64))
    p /= p.sum()
    variation = np.abs(post.distribution(row[0], greedy=False) - p).sum() / 2
    assert variation < 0.003


