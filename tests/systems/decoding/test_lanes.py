"""Lanes: several sequences in one secure forward, each as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.cost_model.workload import dry_parties
from models.cache import Rows, see
from models.family import family_of, logits, weight_shapes
from protocols.bits import compare, price
from protocols.functions import maximum
from protocols.verification.distribution import Sampling
from protocols.verification.post import Post
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, Owner
from spu_llm.runtime.session import PlaintextSession, Session
from spu_llm.runtime.simulation import Simulation
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.decoding.text_rows import TextRows
from tests.kit.models import LLAMA, PRIVATE, tiny_params

PARAMS = tiny_params(PRIVATE, 1)  # as other tests that share the simulation have them


class Opening(Post):
    """Opens to the client every row of logits, and all that `Post` opens, where rows are hidden
    too.
    """

    hide_progress = True

    def verify(self, logits: Any, client: Any, provider: None) -> tuple[Any, Any]:
        outcome, accepted = super().verify(logits, client, provider)
        rows = reveal(logits, to=Owner.CLIENT, label="logits (test)")
        return (outcome, rows), accepted


JUDGE = Opening(Sampling())
PROMPTS = [[40, 41, 42], [50], [60, 61, 62, 63, 64], [70, 71], [80, 81, 82, 83]]
COUNT = 3  # rows of a step: the last token and two drafts
STEPS = 3
# Of every step's rows, which stay, lane by lane: all, some, none.
RETAINED = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0]], bool)


def tokens_of(lane: int, step: int) -> list[int]:
    return [100 + 40 * step + 7 * lane + i for i in range(COUNT)]


def sure(decoder: Decoder, tokens: Sequence[Sequence[int]]) -> JudgeInputs:
    """Drafts of probability one and r next to one in every lane: whatever the model thinks,
    rejected, so that the row after the first token is opened.
    """
    drafts = [np.array(row[1:], np.int32) for row in tokens]
    own = [(d, np.full(d.size, 1 << 16), np.full(d.size, 2**16 - 1)) for d in drafts]
    return decoder.inputs(len(tokens[0]), None, lambda: own)


def decode(session: Session, weights: Any, lanes: Sequence[int], hidden: bool) -> list[Any]:
    """Return for the prefill and every step, lane first, the row of weights that `Post` opens, and
    all rows of logits.
    """
    prompts = [PROMPTS[lane] for lane in lanes]
    longest = max(map(len, prompts))
    # Hidden rows stay until the block is packed: before the last step, with the longest prompt.
    live = max(len(PROMPTS[i]) + (STEPS - 1) * int(RETAINED[i].sum()) for i in lanes)
    most = (live if hidden else longest + (STEPS - 1) * COUNT) + COUNT
    layout = SessionShape(
        PRIVATE, tuple(map(len, prompts)), (longest + COUNT, most), live, hidden, packs=hidden
    )
    decoder = Decoder(session, layout, JUDGE, weights)
    padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    collected = [
        decoder.prefill(
            session.private(CLIENT, np.array, (len(lanes), longest), np.int32, padded),
            sure(decoder, [[row[0]] for row in padded]),
        )
    ]
    for step in range(STEPS):
        rows = [tokens_of(lane, step) for lane in lanes]
        given = session.private(CLIENT, np.array, (len(lanes), COUNT), np.int32, rows)
        inputs = sure(decoder, rows)
        collected.append(decoder.step(given, inputs, RETAINED[list(lanes)]))
    outcomes = [judged.outcome for judged in collected]
    return [(session.get(of_step.row), session.get(rows)) for of_step, rows in outcomes]


def whole(text: list[int]) -> np.ndarray:
    """Logits [n, vocab] of a text without a cache."""
    return np.asarray(logits(PARAMS, PRIVATE, jnp.asarray(text)))


def alone(lane: int) -> list[np.ndarray]:
    """Return the logits of one lane's text, from the whole text: of the prompt's last row, and of
    every row of each step.
    """
    text = list(PROMPTS[lane])
    collected = [whole(text)[-1:]]
    for step in range(STEPS):
        fresh = tokens_of(lane, step)
        collected.append(whole(text + fresh)[-COUNT:])
        text += [t for t, stays in zip(fresh, RETAINED[lane], strict=True) if stays]
    return collected


def check(scores: list[Any], lanes: Sequence[int], weights_atol: float, logits_atol: float) -> None:
    for i, lane in enumerate(lanes):
        for (weights, rows), wanted in zip(scores, alone(lane), strict=True):
            np.testing.assert_allclose(rows[i], wanted, atol=logits_atol)
            first = np.exp(wanted[0] - wanted[0].max())
            np.testing.assert_allclose(weights[i], first, atol=weights_atol)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("lanes", [[0], [0, 1], [0, 1, 2, 3, 4]], ids=["one", "two", "five"])
def test_a_lane_is_what_it_is_alone(lanes: list[int], hidden: bool) -> None:
    session = PlaintextSession()
    actual = decode(session, share_weights(session, PRIVATE, PARAMS), lanes, hidden)
    check(actual, lanes, 2e-5, 2e-5)


SOME, ALL = [0, 2, 3], [0, 1, 2, 3, 4]  # of some, all rows stay, some, none


@pytest.mark.parametrize(
    ("lanes", "hidden"),
    [
        pytest.param(SOME, True, marks=pytest.mark.slow, id="three, hidden"),
        pytest.param(ALL, True, marks=pytest.mark.slow, id="five, hidden"),
        pytest.param(ALL, False, marks=pytest.mark.slow, id="five, shown"),
    ],
)
def test_two_parties_run_lanes(simulation: Simulation, lanes: list[int], hidden: bool) -> None:
    """Packed where they are hidden."""

    def program(session: Any) -> Any:
        params = None if session.rank == CLIENT else PARAMS
        return decode(session, share_weights(session, PRIVATE, params), lanes, hidden)

    client, provider = simulation.run(program)
    assert all(of_step == (None, None) for of_step in provider)
    check(client, lanes, 0.02, 0.05)


@pytest.fixture
def rounds_at_any_price(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops take the fewest rounds, whatever they need for it."""
    chosen = (compare._levels, maximum._fan_ins)
    with monkeypatch.context() as patch:
        patch.setattr(price, "ROUND", 10**15)
        for actual in chosen:
            actual.cache_clear()
        yield
    for actual in chosen:
        actual.cache_clear()


@pytest.mark.usefixtures("rounds_at_any_price")
def test_lanes_share_the_messages_of_a_forward() -> None:
    """As many messages for five lanes as for one, the judge's included."""
    alone, (forward, judge) = messages_of_a_step(1), messages_of_a_step(5)
    assert alone == (forward, judge) and forward > 100 and judge > 10


def test_what_more_lanes_add_is_rounds_that_are_worth_it() -> None:
    """More comparisons at once are made in deeper trees and narrower matches, if at all."""
    alone, together = (sum(messages_of_a_step(lanes)) for lanes in (1, 5))
    assert alone <= together < 1.15 * alone


def messages_of_a_step(lanes: int) -> tuple[int, int]:
    """Count the messages of the forward and of the verifier."""
    party = dry_parties()[CLIENT]
    layout = SessionShape(PRIVATE, (4,) * lanes, (4, 4 + COUNT))
    decoder = Decoder(party, layout, JUDGE, weight_shapes(PRIVATE))
    shape = jax.ShapeDtypeStruct
    decoder.prefill(shape((lanes, 4), np.int32), decoder.judge_shapes(1))
    party.demand()
    decoder.step(shape((lanes, COUNT), np.int32), decoder.judge_shapes(COUNT), None)
    calls = party.demand().calls
    judged = [c for c in calls if "verification" in c.scope]
    count = [sum(c.cost.messages for c in some) for some in (calls, judged)]
    return count[0] - count[1], count[1]


def test_rows_of_the_text() -> None:
    rows = TextRows([2, 1])
    positions, visible = rows.place(2, 5, 4)
    np.testing.assert_array_equal(positions, [[2, 3], [1, 2]])
    np.testing.assert_array_equal(
        visible.astype(int),
        [[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], [[1, 0, 1, 0, 0], [1, 0, 1, 1, 0]]],
    )
    with pytest.raises(ValueError, match="step of 2 rows"):
        rows.add(np.ones((2, 3), bool), 2)
    rows.add(np.array([[1, 0, 0], [0, 1, 0]], bool), 3)
    rows.cut()  # the last row is no lane's
    assert rows.written == 4
    assert rows.place(1, 5, 3)[0].tolist() == [[2], [2]]  # at most the context's last
    np.testing.assert_array_equal(rows.pack(3), [[0, 1, 2], [0, 3, -1]])
    assert rows.written == 3 and rows.place(1, 4, 9)[0].tolist() == [[3], [2]]


@pytest.mark.parametrize("config", [PRIVATE, LLAMA], ids=["gpt2", "llama"])
def test_one_row_of_each_lane_may_go_on_alone(config: Any) -> None:
    """Through the last block, as it does among the others; the cache has all rows."""
    config, family = config.with_layers(2), family_of(config)
    weights = family.fold(tiny_params(config, 4), config)
    lanes, n, ends = 2, 5, (4, 2)
    x = jax.random.normal(jax.random.key(1), (lanes * n, config.width))
    positions = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (lanes, n))
    at = Rows(positions, jnp.broadcast_to(see(0, n, n), (lanes, n, n)), 0)
    cache = config.empty_cache(n, lanes)
    rows, whole, _ = family.forward(weights, config, x, at, cache)
    some, cached, _ = family.forward(weights, config, x, at, cache, ends=ends)
    assert some.shape == (lanes, config.width)
    expected = jnp.stack([rows[lane * n + end] for lane, end in enumerate(ends)])
    np.testing.assert_allclose(some, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(cached), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)
