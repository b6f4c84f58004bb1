"""Cost of each kind of layer of the stock path alone, against the number of positions.

The layers are Flax's modules and functions as the GPT-2 of `transformers` combines them, each
compiled whole by SPU (`experiments.spu_baseline.whole`) and run on shared random activations with
random weights of the provider's, since seconds, bytes and messages do not depend on values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.common.measured import FIGURES, timed
from experiments.common.two_parties import run_study
from experiments.spu_baseline.whole import SETTINGS, WholeFunction, gpt2_config, share_params
from models.family import ModelConfig
from models.gpt2 import GPT2Config, init_params
from models.hf import load_config
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import Session
from spu_llm.systems.program import Job, Nothing, Program, Send

_share = SecureFunction(
    lambda own, peers: own + peers, (Owner.CLIENT, Owner.PROVIDER), "share activations"
)


@dataclass(frozen=True)
class Layer:
    """A kind of layer."""

    kind: str
    times: int
    fn: Callable[..., Any]
    held: Any
    shapes: tuple[tuple[int, ...], ...]


def layers(config: GPT2Config, weights: Any, capacity: int, n: int) -> list[Layer]:
    """Return all kinds of layers on n positions, which see a cache of `capacity` positions.
    `weights`: of a model with at least one block, under Flax's names.
    """
    from flax import linen
    from transformers.models.gpt2.modeling_flax_gpt2 import ACT2FN, FlaxConv1D

    d, heads, head_dim, vocab = config.n_embd, config.n_head, config.head_dim, config.vocab_size
    seen = np.tril(np.ones((n, capacity), bool), capacity - n)[None, None]
    hidden = jnp.finfo(jnp.float32).min

    def apply(module: Any, params: Any, x: Any) -> Array:
        return module.apply({"params": params}, x)

    def embedding(held: Any, tokens: Array) -> Array:
        places = jnp.arange(capacity - n, capacity)[None]
        words = apply(linen.Embed(vocab, d), held[0], tokens[None])
        return words + apply(linen.Embed(config.n_positions, d), held[1], places)

    def norm(held: Any, tokens: Array, x: Array) -> Array:
        return apply(linen.LayerNorm(epsilon=config.layer_norm_epsilon), held, x)

    def linear(held: Any, tokens: Array, x: Array, wide: Array) -> list[Array]:
        features, rows = (3 * d, d, 4 * d, d), (x, x, x, wide)
        return [
            apply(FlaxConv1D(m), params, given)
            for m, params, given in zip(features, held, rows, strict=True)
        ]

    def products(held: Any, tokens: Array, query: Array, keys: Array, distribution: Array) -> Any:
        scores = jnp.einsum("...qhd,...khd->...hqk", query / np.sqrt(head_dim), keys)
        return scores, jnp.einsum("...hqk,...khd->...qhd", distribution, keys)

    def softmax(held: Any, tokens: Array, scores: Array) -> Array:
        return jax.nn.softmax(scores + jnp.where(seen, 0.0, hidden))

    def gelu(held: Any, tokens: Array, x: Array) -> Array:
        activation: Any = ACT2FN["gelu_new"]
        return activation(x)

    def head(held: Any, tokens: Array, x: Array) -> Array:
        return apply(linen.Dense(vocab, use_bias=False), {"kernel": held.T}, x)

    def argmax(held: Any, tokens: Array, logits: Array) -> Array:
        return jnp.argmax(logits, axis=-1)

    rows, wide, square = (1, n, d), (1, n, 4 * d), (1, heads, n, capacity)
    query, keys = (1, n, heads, head_dim), (1, capacity, heads, head_dim)
    deep, held = config.n_layer, weights["transformer"]
    block, table = held["h"]["0"], held["wte"]["embedding"]
    attention, mlp = block["attn"], block["mlp"]
    dense = [attention["c_attn"], attention["c_proj"], mlp["c_fc"], mlp["c_proj"]]
    return [
        Layer("embedding", 1, embedding, [held["wte"], held["wpe"]], ()),
        Layer("norm", 2 * deep + 1, norm, block["ln_1"], (rows,)),
        Layer("linear", deep, linear, dense, (rows, wide)),
        Layer("attention products", deep, products, (), (query, keys, square)),
        Layer("softmax", deep, softmax, (), (square,)),
        Layer("GELU", deep, gelu, (), (wide,)),
        Layer("head", 1, head, table, (rows,)),
        Layer("verification", 1, argmax, (), ((n, vocab),)),
    ]


# ---- the program of both workers


@dataclass(frozen=True)
class LayersRequest:
    positions: tuple[int, ...]
    capacity: int


PROGRAM = Program(
    "spu-baseline-layers",
    __name__,
    LayersRequest,
    spu=SETTINGS,
    check=lambda asked, model: check(gpt2_config(model), asked.positions, asked.capacity),
)


def run(session: PartySession, job: Job[LayersRequest, Nothing], send: Send) -> dict[str, Any]:
    """Run each kind of layer once on each number of positions, after a warm-up of all kinds.
    Neither party has secret inputs.
    """
    config = gpt2_config(job.model)
    positions, capacity = job.request.positions, job.request.capacity
    for rank in (CLIENT, PROVIDER):
        session.ledger.declare(rank, "the inputs: random numbers of known seeds (study)")
    one = config.with_layers(1)
    params = jax.tree.map(np.asarray, init_params(one, jax.random.key(0)))
    weights = share_params(session, one, params)

    def measured(n: int) -> list[dict[str, Any]]:
        tokens = session.private(CLIENT, lambda: np.arange(n) % 7, (n,), np.int32)
        costs = []
        for layer in layers(config, weights, capacity, n):
            send("update", name=f"stock {layer.kind}, {n} positions")
            function = WholeFunction(
                layer.fn,
                (Owner.PROVIDER, Owner.CLIENT, *(Owner.JOINT for _ in layer.shapes)),
                f"stock {layer.kind}",
            )
            shared = [_shared(session, shape, seed=i) for i, shape in enumerate(layer.shapes)]
            args = (layer.held, tokens, *shared)
            session.prepare(function, *args)
            phase = f"{layer.kind} {len(session.meter.seconds)}"
            cost = timed(session, phase, functools.partial(session.call, function, *args))[1]
            costs.append({"kind": layer.kind, "times": layer.times} | cost)
        return costs

    send("stage", name="layers of the stock path, to warm up")
    measured(positions[0])
    send("stage", name="layers of the stock path")
    return {
        "steps": [{"positions": n, "layers": measured(n)} for n in positions],
        "learned": session.ledger.learned(),
    }


def check(config: ModelConfig, positions: Sequence[int], capacity: int) -> None:
    """Raise InputError unless steps of each size in `positions` fit the cache, and the cache fits
    the model's context.
    """
    if not positions or min(positions) < 1:
        raise InputError("--positions must be 1 or more")
    if not max(positions) <= capacity <= gpt2_config(config).n_positions:
        raise InputError(
            f"a cache of {capacity} positions does not hold steps of {max(positions)}, or exceeds "
            f"the model's context of {config.context}"
        )


def _shared(session: Session, shape: tuple[int, ...], seed: int) -> Any:
    """Share random numbers from a known seed."""
    client, provider = np.random.default_rng(seed).uniform(-1, 1, (2, *shape))
    return session.call(
        _share,
        session.private(CLIENT, lambda: client, shape, np.float32),
        session.private(PROVIDER, lambda: provider, shape, np.float32),
    )


# ---- the command at the client


def measure(model: Path, positions: Sequence[int], capacity: int, network: str) -> dict[str, Any]:
    """Run one network's session; return its result as JSON fields: `steps` with the cost of one
    layer of each kind.
    """
    check(load_config(model), positions, capacity)
    asked = LayersRequest(tuple(positions), capacity)
    outcome, _ = run_study(PROGRAM, model, asked, network=network)
    return {"network": network, "capacity": capacity, **outcome.result}


def scaled(layer: dict[str, Any]) -> dict[str, float]:
    """Return the cost of all layers of a kind in one step, given the cost of one layer."""
    return {name: layer["times"] * layer[name] for name in FIGURES}
