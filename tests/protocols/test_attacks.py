"""What a party makes of what it sees: attacks that work on `post` and must fail on `token`.

After spec of POST, section 8. The client follows the messages and brings true distributions; what
it can do with false ones stands at the end, and after that what a provider that deviates reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from protocols.ot.select import select
from protocols.verification import race, token
from protocols.verification.post import ClientInput
from protocols.verification.sampling import Widths
from spu_llm.core.op import protocol_op
from spu_llm.core.party import Party
from spu_llm.core.values import PROVIDER, Arith, Value
from spu_llm.runtime.simulation import Simulation
from tests.protocols import verifying
from tests.protocols.verifying import UNIT, Seen, two_parties

VOCAB = 6
WIDTHS = Widths.of_weights(VOCAB)
ONE = 1 << Widths.draft


def ask_post(
    simulation: Simulation, weights: np.ndarray, drafts: list[int], q: int, r: list[int]
) -> Seen:
    """Return a step of `post` with drafts of claimed probability q / 2^16, at r' that the client
    chose.
    """
    of_client = ClientInput(*(np.array(x, np.int32) for x in (drafts, [q] * len(drafts), r)))
    return two_parties(simulation, "post", weights * UNIT, of_client, None)[0]


def ask_token(
    simulation: Simulation,
    weights: np.ndarray,
    drafts: list[int],
    q: int,
    r: list[int],
    rng: np.random.Generator,
    name: str = "token",
) -> list[Seen]:
    """Return the same of `token`, with r' as the client's part of the randomness; the provider's is
    its own. A rejected draft takes the mass q of its distribution.
    """
    count = len(drafts)
    distributions = np.zeros((count + 1, weights.shape[1]), np.int32)
    distributions[np.arange(count), drafts] = q
    of_provider = rng.integers(0, 2**31, count + 2).astype(np.int32)
    of_client = token.ClientInput(
        np.array(drafts, np.int32),
        distributions,
        token.Randomness(np.array(r, np.int32), np.zeros(2, np.int32)),
    )
    provider = token.Randomness(of_provider[:count], of_provider[count:])
    return two_parties(simulation, name, weights * UNIT, of_client, provider)


def ask_with_distribution(
    simulation: Simulation, weights: np.ndarray, draft: int, distribution: np.ndarray, rng: Any
) -> tuple[int, int]:
    """Return (k, token) of `token` with one draft and a claimed distribution in multiples of
    2^-16.
    """
    words = rng.integers(0, 2**31, (2, 3)).astype(np.int32)
    of_client, of_provider = (token.Randomness(w[:1], w[1:]) for w in words)
    distributions = np.stack([distribution, np.zeros_like(distribution)]).astype(np.int32)
    brought = token.ClientInput(np.array([draft], np.int32), distributions, of_client)
    client, _ = two_parties(simulation, "token", weights * UNIT, brought, of_provider)
    return int(client.outcome.accepted), int(client.outcome.token)


def row_of(p: list[float]) -> np.ndarray:
    return np.rint(np.array(p) / max(p) / UNIT).astype(np.int64)


FLAT = row_of([1 / VOCAB] * VOCAB)
SURE = row_of([0.0, 1.0, *[0.0] * (VOCAB - 2)])  # token 1 and no other


# ---- 1. bits after the first rejection


def off_path(simulation: Simulation, ask: Any, *rest: Any) -> list[Any]:
    """Return what the client sees of two models that differ only after a rejected draft (0 of
    SURE).
    """
    seen = []
    for after in (SURE, row_of([1.0, *[0.0] * (VOCAB - 1)])):
        weights = np.stack([SURE, after, FLAT])
        client = ask(simulation, weights, [0, 1], ONE, [2**WIDTHS.accept - 1] * 2, *rest)
        client = client if isinstance(client, Seen) else client[0]
        outcome = [np.asarray(x).tolist() for x in client.outcome if x is not None]
        seen.append((outcome, client.openings, client.opened))
    return seen


def test_bits_after_a_rejection(simulation: Simulation) -> None:
    """Contexts with a rejected draft in them are none of the client's business: `post` tells of
    them, `token` does not.
    """
    one, other = off_path(simulation, ask_post)
    assert one != other
    assert [one[0][0], other[0][0]] == [[True, False], [True, True]]
    one, other = off_path(simulation, ask_token, np.random.default_rng(1))
    assert one == other
    assert one[0] == [0, 1]  # the rejected place, and the only token there is


# ---- 2. the model from opened rows


def test_span_of_the_head_from_opened_rows(simulation: Simulation) -> None:
    """Log-probabilities of d-wide hidden states lie in a space of d + 1 dimensions: a few opened
    rows give away the head's span. Tokens do not.
    """
    rng = np.random.default_rng(2)
    hidden, steps = 2, 24
    head = rng.normal(0, 0.6, (hidden, VOCAB))
    rows, tokens = [], []
    for _ in range(steps):
        logits = rng.normal(0, 1, hidden) @ head
        weights = row_of(list(np.exp(logits)))[None]
        rows.append(np.log(ask_post(simulation, weights, [], 0, []).outcome.row))
        actual = int(ask_token(simulation, weights, [], 0, [], rng)[0].outcome.token)
        tokens.append(np.eye(VOCAB)[actual])
    span = np.linalg.svd(np.vstack([head, np.ones(VOCAB)]))[2][: hidden + 1]

    def outside(observed: list[np.ndarray]) -> float:
        """Return how far the main directions of what was observed lie outside the head's span."""
        main = np.linalg.svd(np.array(observed))[2][: hidden + 1]
        return float(np.linalg.norm(main - main @ span.T @ span))

    assert outside(rows) < 0.01
    assert outside(tokens) > 0.5


# ---- 3. the provider counts


def test_noise_of_the_providers_choice(simulation: Simulation) -> None:
    """In `marked` the provider may bring noise under which a token of its choice wins: where
    progress is shown it then reads whether the first draft is that token, and only there. The
    client gets that token.
    """
    noise = np.zeros((4, 5), np.float32)
    noise[:, 2] = 30.0
    for name, visible in (("marked", True), ("marked hidden", False)):
        counts = []
        for drafts in ([2, 1, 2], [1, 2, 2], [2, 2, 2]):
            brought = race.ClientInput(np.array(drafts), None)
            client, provider = two_parties(simulation, name, np.zeros((4, 5)), brought, noise)
            assert client.outcome.token == 2
            counts.append(provider.accepted)
        assert counts == ([1, 0, 3] if visible else [None] * 3)


def test_progress_is_hidden_from_the_provider(simulation: Simulation) -> None:
    """The provider sees how many drafts stay where progress is shown, and only there."""
    rng = np.random.default_rng(3)
    weights = np.stack([SURE, SURE, FLAT])
    for name, visible in (("token", True), ("hidden", False)):
        counts = []
        for drafts in ([0, 1], [1, 0], [1, 1]):
            client, provider = ask_token(simulation, weights, drafts, ONE, [0, 0], rng, name)
            counts.append(provider.accepted)
            to_provider = [o for o in client.openings if o.learner == "provider"]
            assert bool(to_provider) == visible
            assert int(client.outcome.accepted) == len(set(counts)) - 1 or not visible
        assert counts == ([0, 1, 2] if visible else [None] * 3)


# ---- 4. thresholds of the client's choice

SECRET = 0.3172


def bisect(decide: Any) -> float:
    """Return p(0) by binary search over r, at q = 1: rejected says r >= p."""
    low, high = 0, 2**WIDTHS.accept
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decide(middle) else (middle, high)
    return low / 2**WIDTHS.accept


def test_binary_search_on_a_probability(simulation: Simulation) -> None:
    """A chosen r makes every bit of `post` a threshold on p: some queries give p to four digits.
    With joint randomness a bit is a coin of probability min(1, p / q), whatever the client brings.
    """
    weights = np.stack([row_of([SECRET, 0.5, 0.1, 0.0828, 0.0, 0.0]), FLAT])
    actual = bisect(lambda r: ask_post(simulation, weights, [0], ONE, [r]).outcome.rejected[0])
    assert abs(actual - SECRET) < 1e-4
    rng = np.random.default_rng(4)

    def rejected(r: int) -> bool:
        client, _ = ask_token(simulation, weights, [0], ONE, [r], rng)
        return int(client.outcome.accepted) == 0

    errors = [abs(bisect(rejected) - SECRET) for _ in range(2)]
    assert min(errors) > 1e-3 and max(errors) > 0.03, errors
    # The same r again and again: a coin of the model's probability, no verdict.
    outcomes = [rejected(0) for _ in range(20)]
    assert 5 <= sum(outcomes) <= 19


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["post", "token"])
def test_forcing_a_draft_through(simulation: Simulation, variant: str) -> None:
    """r = 0 accepts any draft of some probability: a chosen prefix. Not with joint randomness."""
    unlikely = row_of([0.01, 0.9, 0.09, 0.0, 0.0, 0.0])
    weights, rng = np.stack([unlikely, FLAT]), np.random.default_rng(5)
    forced = 0
    for _ in range(12):
        if variant == "post":
            forced += not ask_post(simulation, weights, [0], ONE, [0]).outcome.rejected[0]
        else:
            forced += int(ask_token(simulation, weights, [0], ONE, [0], rng)[0].outcome.accepted)
    assert forced == 12 if variant == "post" else forced <= 2


# ---- what false distributions still do: `token` is semi-honest


@pytest.mark.slow
def test_false_distributions_ask_and_force(simulation: Simulation) -> None:
    """Known limits, kept here so that nobody claims more: a distribution that leaves room for one
    token alone is a threshold on its probability, and a claim of next to nothing forces a draft
    through.
    """
    rng = np.random.default_rng(6)
    weights = np.stack([row_of([SECRET, 0.5, 0.1, 0.0828, 0.0, 0.0]), FLAT])

    def at_most(threshold: int) -> bool:
        """Return p(0) <= threshold / 2^16: draft token 5, which is never accepted, and let 0 alone
        in.
        """
        distribution = np.full(VOCAB, ONE)
        distribution[0] = threshold
        k, x = ask_with_distribution(simulation, weights, 5, distribution, rng)
        assert k == 0 and x in (0, -1)
        return x == -1

    low, high = 0, ONE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at_most(middle) else (middle, high)
    assert abs(low / ONE - SECRET) < 1e-4
    unlikely = np.stack([row_of([0.01, 0.9, 0.09, 0.0, 0.0, 0.0]), FLAT])
    distribution = np.array([1, ONE - 1, 0, 0, 0, 0])
    assert all(
        ask_with_distribution(simulation, unlikely, 0, distribution, rng)[0] == 1 for _ in range(6)
    )


# ---- a provider that deviates

CANDIDATES = 64


class Probe:
    """`select` by a provider that adds constants to its share of the drafts' rows, and there alone:
    drafts of `chosen` then weigh more than all tokens do, others less than nothing.
    """

    def __init__(self) -> None:
        self.chosen = np.zeros(CANDIDATES, bool)
        self.select = protocol_op(
            "select of a probing provider",
            reference=select.reference,
            two_party=self._select,
            owners=select.owners,
            cost=select.cost,
            simulate=select.simulate,
        )

    def _select(self, party: Party, table: Value, index: Value, **static: Any) -> Any:
        # Tables [drafts, vocab]; those of rows and of blocks have one dimension more.
        if party.rank == PROVIDER and isinstance(table, Arith) and len(table.shape) == 2:
            far = np.uint64(1 << (Widths.of_weights(CANDIDATES).total - 1))
            words = table.words + np.where(self.chosen, far, ~far + np.uint64(1))
            table = dataclasses.replace(table, words=words)
        return select.two_party(party, table, index, **static)


@pytest.mark.parametrize("name", ["token", "hidden"])
def test_a_provider_asks_for_the_draft(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where progress is shown, the opened stop says whether the secret draft lies in a set of the
    provider's choice: one of 64 is found in six steps, if the client keeps to it. With hidden
    progress nothing is opened to the provider. What remains: the client still accepts or rejects by
    that set, so whatever it later shows of its own (when the text ends, how many steps that took,
    whether it gives up for an activation out of range) may depend on it.
    """
    probe, rng = Probe(), np.random.default_rng(7)
    monkeypatch.setattr(token, "select", probe.select)
    monkeypatch.setattr(verifying, "_FUNCTIONS", {})  # none compiled with the true op
    weights = row_of(list(rng.dirichlet(np.ones(CANDIDATES), 2).reshape(-1))).reshape(2, -1)
    secret, read = int(rng.integers(CANDIDATES)), 0
    for bit in range(6):
        probe.chosen = np.arange(CANDIDATES) >> bit & 1 == 1
        client, provider = ask_token(simulation, weights, [secret], ONE // 4, [0], rng, name)
        assert client.outcome.accepted == probe.chosen[secret]
        if name == "token":
            read |= int(provider.accepted or 0) << bit
        else:
            assert provider.accepted is None and provider.opened == []
            assert {o.learner for o in provider.openings} == {"client"}
    assert name == "hidden" or read == secret
