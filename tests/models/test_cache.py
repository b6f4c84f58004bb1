"""The key/value cache: however positions are cut into steps and blocks, the result is the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from models.cache import HIDDEN, Block, Prefix, attend, packed, rows_after
from models.family import logits
from models.gpt2 import FAMILY, GPT2Config, fold, init_params
from protocols.functions.aggregation import OwnedBlock
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation

CONFIG = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
LENGTH = 6
TOKENS = np.random.default_rng(0).integers(CONFIG.vocab_size, size=LENGTH).astype(np.int32)
# Weights far from zero, so that attention is far from uniform.
PARAMS = jax.tree.map(
    lambda w: w + 0.5 * jax.random.normal(jax.random.key(1), w.shape),
    init_params(CONFIG, jax.random.key(0)),
)
WEIGHTS = fold(PARAMS, CONFIG)
WHOLE = np.asarray(logits(PARAMS, CONFIG, jnp.asarray(TOKENS)))
EXAMPLES = settings(max_examples=8, deadline=None, derandomize=True)
TOLERANCE = 2e-5


def embed(start: int, end: int) -> Array:
    """Embedding of TOKENS[start:end]."""
    return embed_tokens(jnp.asarray(TOKENS[start:end]), jnp.arange(start, end))


def embed_tokens(tokens: Array, positions: Array) -> Array:
    """Embedding of ids [n], or of one-hot rows [n, vocab]."""
    return FAMILY.embed(WEIGHTS, CONFIG, tokens, positions)


def shared_block(positions: int = LENGTH + 4) -> Block:
    return CONFIG.empty_cache(positions)


def prefix_block(length: int) -> Prefix | None:
    """Return the first `length` positions as a block of their own."""
    if length == 0:
        return None
    x, room = embed(0, length), shared_block(length)
    block = FAMILY.forward(WEIGHTS, CONFIG, x, rows_after(0, length, length), room)[1]
    return Prefix(block, length, jnp.zeros(0, jnp.int32))


def forward(
    x: Array, shared: Block, length: int, prefix: Prefix | None = None
) -> tuple[Array, Block]:
    """Logits of the positions with embedding `x`, and the shared block with them."""
    at = rows_after(length, x.shape[0], shared.positions)
    rows, shared, _ = FAMILY.forward(WEIGHTS, CONFIG, x, at, shared, prefix)
    return FAMILY.head(WEIGHTS, rows), shared


def run_steps(cuts: list[int], prefix: int, shared: Block) -> np.ndarray:
    """Logits of the positions from `prefix` on, in one step from each cut to the next."""
    rows, ends = [], sorted({*cuts, LENGTH})
    start = prefix
    for end in (e for e in ends if e > prefix):
        actual, shared = forward(embed(start, end), shared, start - prefix, prefix_block(prefix))
        rows.append(actual)
        start = end
    return np.concatenate(rows)


@EXAMPLES
@given(st.lists(st.integers(1, LENGTH - 1), max_size=3))
def test_steps_of_any_size_equal_the_whole(cuts: list[int]) -> None:
    np.testing.assert_allclose(run_steps(cuts, 0, shared_block()), WHOLE, atol=TOLERANCE)


def test_one_position_at_a_time_equals_the_whole() -> None:
    actual = run_steps(list(range(1, LENGTH)), 0, shared_block())
    np.testing.assert_allclose(actual, WHOLE, atol=TOLERANCE)


@EXAMPLES
@given(st.integers(1, LENGTH - 2), st.data())
def test_prefix_shared_and_draft_equal_the_whole(prefix: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(prefix + 1, LENGTH - 1))
    actual = run_steps([cut], prefix, shared_block())
    np.testing.assert_allclose(actual, WHOLE[prefix:], atol=TOLERANCE)


def test_rows_past_the_length_do_not_matter() -> None:
    noise = shared_block()
    noise = Block(tuple(k + 100.0 for k in noise.keys), tuple(v - 100.0 for v in noise.values))
    np.testing.assert_allclose(run_steps([3], 0, noise), WHOLE, atol=TOLERANCE)


@EXAMPLES
@given(st.integers(1, LENGTH - 1), st.integers(1, 2), st.integers(0, 3))
def test_rolled_back_drafts_leave_no_trace(start: int, drafts: int, seed: int) -> None:
    _, shared = forward(embed(0, start), shared_block(), 0)
    wrong = np.random.default_rng(seed).integers(CONFIG.vocab_size, size=drafts)
    x = embed_tokens(jnp.asarray(wrong), start + jnp.arange(drafts))
    _, shared = forward(x, shared, start)
    actual, _ = forward(embed(start, LENGTH), shared, start)
    np.testing.assert_allclose(actual, WHOLE[start:], atol=TOLERANCE)


def test_one_hot_embedding_equals_lookup() -> None:
    one_hot = jax.nn.one_hot(jnp.asarray(TOKENS), CONFIG.vocab_size)
    tokens = embed_tokens(one_hot, jnp.arange(LENGTH))
    np.testing.assert_allclose(tokens, embed(0, LENGTH), atol=1e-6)


HEADS, HEAD_DIM, QUERIES, KEYS = 2, 4, 3, 7


def random_attention(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return query [head, query, head_dim], keys and values [head, key, head_dim], visible."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(HEADS, QUERIES, HEAD_DIM)).astype(np.float32) * 3
    keys, values = rng.normal(size=(2, HEADS, KEYS, HEAD_DIM)).astype(np.float32)
    visible = rng.random((QUERIES, KEYS)) < 0.7
    visible[:, 0] = True
    return query, keys, values, visible


def whole_attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray
) -> np.ndarray:
    """Softmax attention in float64: [head, query, head_dim]."""
    scores = np.einsum("hnd,htd->hnt", query, keys, dtype=np.float64)
    scores = np.where(visible[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hnt,htd->hnd", weights, values)


def cut_blocks(
    keys: np.ndarray, values: np.ndarray, visible: np.ndarray, cuts: set[int]
) -> list[OwnedBlock]:
    """Key positions cut into consecutive blocks."""
    ends = sorted({0, *cuts, KEYS})
    return [
        OwnedBlock(jnp.asarray(keys[:, a:b]), jnp.asarray(values[:, a:b]), jnp.asarray(v))
        for a, b in zip(ends, ends[1:], strict=False)
        for v in [np.broadcast_to(visible[:, a:b], (HEADS, QUERIES, b - a))]
    ]


@EXAMPLES
@given(st.integers(0, 5), st.sets(st.integers(1, KEYS - 1), max_size=3))
def test_blocks_together_equal_whole_attention(seed: int, cuts: set[int]) -> None:
    query, keys, values, visible = random_attention(seed)
    actual, _ = attend(jnp.asarray(query), cut_blocks(keys, values, visible, cuts), 511.0)
    wanted = whole_attention(query, keys, values, visible)
    np.testing.assert_allclose(actual, wanted, atol=TOLERANCE)


def test_a_block_without_visible_positions_adds_nothing() -> None:
    query, keys, values, visible = random_attention(1)
    blocks = cut_blocks(keys, values, visible, set())
    unseen = blocks[0]._replace(visible=jnp.zeros_like(blocks[0].visible))
    actual, _ = attend(jnp.asarray(query), [unseen, *blocks], 511.0)
    wanted, _ = attend(jnp.asarray(query), blocks, 511.0)
    np.testing.assert_allclose(actual, wanted, atol=1e-6)


def test_rows_that_the_client_hides_have_no_influence(simulation: Simulation) -> None:
    """Two parties, 500 hidden rows of large values beside three visible ones: as without them."""
    hidden, seen = 500, 3
    rng = np.random.default_rng(0)
    query = rng.normal(size=(1, 1, HEAD_DIM)).astype(np.float32)
    keys = rng.normal(size=(1, hidden + seen, HEAD_DIM)).astype(np.float32)
    values = np.full((1, hidden + seen, HEAD_DIM), 50.0, np.float32)
    values[:, -seen:] = rng.normal(size=(1, seen, HEAD_DIM))
    visible = np.arange(hidden + seen) >= hidden
    function = SecureFunction(
        lambda q, k, v, m: reveal(
            attend(q, [OwnedBlock(k, v, jnp.where(m, 0, HIDDEN)[None, None])], 511.0)[0],
            to=Owner.CLIENT,
            label="test",
        ),
        (Owner.CLIENT, Owner.PROVIDER, Owner.PROVIDER, Owner.CLIENT),
        "hidden rows",
    )

    def program(session: PartySession) -> Any:
        inputs = [
            session.private(owner, lambda x=x: x, x.shape, x.dtype)  # type: ignore[misc]
            for owner, x in (
                (CLIENT, query),
                (PROVIDER, keys),
                (PROVIDER, values),
                (CLIENT, visible),
            )
        ]
        return session.get(session.call(function, *inputs))

    outcomes = simulation.run(program)[CLIENT]
    wanted = whole_attention(query, keys[:, hidden:], values[:, hidden:], np.ones((1, seen), bool))
    np.testing.assert_allclose(outcomes, wanted, atol=0.01)


def test_a_full_block_is_packed_by_the_clients_choice(simulation: Simulation) -> None:
    """Of two lanes with two heads and two layers, after a row of a prefix; -1 is a row of zeros.
    Words are off by a unit and noise.
    """
    layers, lanes, heads, size, inside, rows, room = 2, 2, 2, 3, 1, 4, 5
    rng = np.random.default_rng(0)
    shape = (2 * layers, lanes * heads, inside + rows, size)
    whole = (rng.normal(size=shape) * 100).astype(np.float32)
    kept = np.array([[2, -1, 0], [3, 1, -1]], np.int32)

    def work(own: Any, kept: Any) -> Any:
        parts = list(own)
        block = packed(Block(tuple(parts[:layers]), tuple(parts[layers:])), kept, room, inside)
        return [reveal(x, to=Owner.CLIENT, label="row") for x in (*block.keys, *block.values)]

    def shared(a: Any, b: Any, kept: Any) -> Any:
        return work(a + b, kept)

    function = SecureFunction(shared, (Owner.CLIENT, Owner.PROVIDER, Owner.CLIENT), "packed")

    def program(session: PartySession) -> Any:
        halves = [
            session.private(rank, lambda: whole / 2, shape, np.float32)
            for rank in (CLIENT, PROVIDER)
        ]
        chosen = session.private(CLIENT, lambda: kept, kept.shape, np.int32)
        return [session.get(x) for x in session.call(function, *halves, chosen)]

    outcome = simulation.run(program)[CLIENT]
    wanted = np.zeros((2 * layers, lanes * heads, inside + room, size), np.float32)
    wanted[:, :, :inside] = whole[:, :, :inside]
    for (lane, at), row in np.ndenumerate(kept):
        if row >= 0:
            of_lane = slice(lane * heads, (lane + 1) * heads)
            wanted[:, of_lane, inside + at] = whole[:, of_lane, inside + row]
    np.testing.assert_allclose(np.stack(outcome), wanted, rtol=0, atol=2.1 * 2.0**-18 + 2e-5)
    plain = packed(
        Block(tuple(whole[:layers]), tuple(whole[layers:])), jnp.asarray(kept), room, inside
    )
    np.testing.assert_array_equal(np.stack([*plain.keys, *plain.values]), wanted)
