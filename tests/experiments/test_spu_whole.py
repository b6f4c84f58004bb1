"""The stock path: Flax's model with our weights, whole in SPU, says what plaintext says."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.spu_baseline import layers as spu_layers
from experiments.spu_baseline import whole as spu_whole
from models.family import logits
from models.hf import load_model
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT, Owner
from spu_llm.runtime.session import PlaintextSession, Session
from spu_llm.runtime.simulation import Simulation
from tests.kit.models import PRIVATE, endless, tiny_params

PARAMS = endless(tiny_params(PRIVATE, 1))
PROMPT = [40, 41, 42, 43]
CAPACITY, STEPS = 12, 2


def decode(session: Session) -> spu_whole.Decoded:
    own = getattr(session, "rank", CLIENT) == CLIENT
    stock = spu_whole.build(PRIVATE, CAPACITY)
    weights = spu_whole.share_params(session, PRIVATE, PARAMS)
    prompt = PROMPT if own else []
    return spu_whole.decode_greedily(session, stock, weights, prompt, len(PROMPT), STEPS)


def are_greedy(tokens: list[int]) -> bool:
    """Return whether each token is the most likely one after the prompt and those before it."""
    rows = jax.jit(lambda xs: logits(PARAMS, PRIVATE, xs))(np.asarray(PROMPT + tokens[:-1]))
    return np.argmax(rows[len(PROMPT) - 1 :], axis=-1).tolist() == tokens


def test_flax_computes_the_same_model() -> None:
    tokens = np.arange(3, 40, 3, dtype=np.int32)
    model, params = spu_whole.flax_model(PRIVATE), spu_whole.flax_params(PARAMS)
    peers = jax.jit(lambda xs: model(xs[None], params=params).logits[0])(tokens)
    ours = jax.jit(lambda xs: logits(PARAMS, PRIVATE, xs))(tokens)
    # Ours have mean zero over the vocabulary, which changes no distribution.
    np.testing.assert_allclose(peers - peers.mean(-1, keepdims=True), ours, atol=2e-4)


def test_steps_with_a_cache_emit_the_greedy_tokens() -> None:
    tokens = decode(PlaintextSession()).tokens
    assert len(tokens) == 1 + STEPS and are_greedy(tokens)


def test_other_constants_are_another_program() -> None:
    def digest(table: np.ndarray) -> str:
        function = spu_whole.WholeFunction(lambda x: x + table, (Owner.JOINT,), "sum")
        return function.plan(np.zeros(3, np.float32))[0].digest

    one, same, other = (digest(np.full(3, v, np.float32)) for v in (1.5, 1.5, 2.5))
    assert one == same != other


@pytest.mark.slow
def test_two_parties_emit_greedy_tokens_and_open_no_more() -> None:
    # `transformers` loads its parts when they are first used, which two threads cannot do at once.
    spu_whole.flax_model(PRIVATE)
    with Simulation(spu_whole.SETTINGS) as simulation:

        def program(session: Session) -> tuple[spu_whole.Decoded, dict[str, list[str]]]:
            return decode(session), session.ledger.learned()

        (own, learned), (peers, _) = simulation.run(program)
    assert len(own.tokens) == 1 + STEPS and are_greedy(own.tokens) and peers.tokens == []
    assert learned == {"client": ["token: 3 x 64 bit in 3 openings"], "provider": []}
    prefill, *steps = [own.prefill, *own.steps]
    # One layer, one row: hundreds of messages, which do not depend on what is computed.
    assert steps[0]["messages"] > 1000 and prefill["messages"] > steps[0]["messages"]
    assert steps[0]["messages"] == pytest.approx(steps[1]["messages"], rel=0.02)


@pytest.mark.parametrize(
    ("length", "capacity", "steps", "wanted"),
    [
        (0, 8, 1, "a prompt and a step"),
        (4, 8, 0, "a prompt and a step"),
        (4, 5, 1, "need a cache"),
        (4, 65, 1, "at most 64"),
    ],
)
def test_what_does_not_fit_is_refused(length: int, capacity: int, steps: int, wanted: str) -> None:
    with pytest.raises(InputError, match=wanted):
        spu_whole.check(PRIVATE, length, capacity, steps)


def test_the_layers_put_together_are_the_model() -> None:
    """Each kind's function on plain numbers, in the order of a forward: Flax's logits."""
    weights = spu_whole.flax_params(PARAMS)
    tokens = np.asarray(PROMPT, np.int32)
    n, heads = len(PROMPT), PRIVATE.n_head
    collected = {x.kind: x for x in spu_layers.layers(PRIVATE, weights, n, n)}

    def run(kind: str, *xs: np.ndarray, held: object = None) -> list[np.ndarray]:
        layer = collected[kind]
        assert [x.shape for x in xs] == list(layer.shapes)
        return [
            np.asarray(y)
            for y in jax.tree.leaves(layer.fn(layer.held if held is None else held, tokens, *xs))
        ]

    block, wide = weights["transformer"]["h"]["0"], np.zeros((1, n, 4 * PRIVATE.n_embd), np.float32)
    (x,) = run("embedding")
    (normed,) = run("norm", x)
    query, key, value = (
        part.reshape(1, n, heads, -1) for part in np.split(run("linear", normed, wide)[0], 3, -1)
    )
    no_distribution = np.zeros((1, heads, n, n), np.float32)
    (distribution,) = run("softmax", run("attention products", query, key, no_distribution)[0])
    mixed = run("attention products", query, value, distribution)[1].reshape(1, n, -1)
    x = x + run("linear", mixed, wide)[1]
    (h,) = run("GELU", run("linear", run("norm", x, held=block["ln_2"])[0], wide)[2])
    x = x + run("linear", x, h)[3]
    (rows,) = run("head", run("norm", x, held=weights["transformer"]["ln_f"])[0])
    centred = rows[0] - rows[0].mean(-1, keepdims=True)
    np.testing.assert_allclose(centred, logits(PARAMS, PRIVATE, tokens), atol=2e-4)
    assert run("verification", rows[0])[0].tolist() == rows[0].argmax(-1).tolist()


@pytest.mark.slow
def test_a_session_between_two_processes(tiny_pair: tuple[Path, Path]) -> None:
    private, _ = tiny_pair
    result = spu_whole.measure(private, "def read", 16, 1, "local")
    assert result["as_in_plaintext"] and len(result["runs"]) == 1
    assert min(result["peak_memory"].values()) > 1 << 26
    assert load_model(private)[0] == PRIVATE
