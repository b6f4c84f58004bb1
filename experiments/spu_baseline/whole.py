"""The stock path: the GPT-2 of `transformers` in Flax, compiled whole by SPU.

It runs SPU's own example (`examples/python/ml/flax_gpt2`: one `FlaxGPT2LMHeadModel`, greedy argmax
inside, token ids and weights as private inputs) with the model's own key/value cache, so that a
step costs one position. Nothing of this framework is in it: no op, no approximation, no folding.

    owners   weights: provider; token ids: client; cache: shares; its index, positions, mask: public
    opened   the next token, to the client
    tokens   `jnp.take` on secret ids, as Flax writes it: SPU turns them into one-hot rows
    settings as for this framework's programs, except `exp_mode`: Flax hides a score by adding
             float32's minimum, and only SPU's EXP_PADE clamps its input (EXP_DEFAULT returns noise
             there)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.common.measured import forget_peak, opening, peaks, timed, total
from experiments.common.two_parties import FEW_MESSAGES, run_study, session_record
from models.family import ModelConfig, Params
from models.gpt2 import GPT2Config, init_params
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from spu_llm.compiler.plan import Plan, Run
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core._jax import digest_of, flat_jaxpr
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT, PROVIDER, Owner, public
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import Session, private_tree
from spu_llm.systems.program import Job, Program, Send

SETTINGS = replace(FEW_MESSAGES, exp_mode="EXP_PADE")

open_token = opening("token", Owner.JOINT, "open token")


@dataclass(frozen=True, eq=False)
class WholeFunction(SecureFunction):
    """A function that is a single SPU segment, whatever its operations; its results are shares.

    `make_plan` does not vet it: SPU decides what each operation does with secret indices.
    """

    def _make_plan(
        self, flat: Callable[..., list[Any]], shapes: Sequence[Any], owners: Sequence[Owner]
    ) -> Plan:
        closed = flat_jaxpr(flat, shapes)
        inputs, outputs = tuple(closed.jaxpr.invars), tuple(closed.jaxpr.outvars)
        run = Run(Owner.JOINT, closed, inputs, outputs, local=False)
        owner_of = dict(zip(inputs, owners, strict=True)) | dict.fromkeys(outputs, Owner.JOINT)
        digest = hashlib.sha256(f"{digest_of(closed)}|{owners}".encode()).hexdigest()
        return Plan(
            inputs,
            tuple(owners),
            outputs,
            (Owner.JOINT,) * len(outputs),
            (run,),
            owner_of,
            {},
            digest,
        )


# ---- the model


def flax_params(params: Params) -> dict[str, Any]:
    """Return parameters of `models.gpt2` under Flax's names, with matrices as [outputs, inputs]."""

    def norm(held: Params) -> Params:
        return {"scale": held["gain"], "bias": held["bias"]}

    def linear(held: Params) -> Params:
        return {"kernel": held["weight"].T, "bias": held["bias"]}

    def block(held: Params) -> Params:
        return {
            "ln_1": norm(held["ln_1"]),
            "attn": {"c_attn": linear(held["qkv"]), "c_proj": linear(held["out"])},
            "ln_2": norm(held["ln_2"]),
            "mlp": {"c_fc": linear(held["fc"]), "c_proj": linear(held["proj"])},
        }

    return {
        "transformer": {
            "wte": {"embedding": params["wte"]},
            "wpe": {"embedding": params["wpe"]},
            "h": {str(i): block(held) for i, held in enumerate(params["blocks"])},
            "ln_f": norm(params["ln_f"]),
        }
    }


def flax_model(config: GPT2Config) -> Any:
    """Return a `FlaxGPT2LMHeadModel` of this shape, without weights."""
    from transformers import FlaxGPT2LMHeadModel
    from transformers import GPT2Config as FlaxConfig

    return FlaxGPT2LMHeadModel(FlaxConfig(**asdict(config)), _do_init=False)


class BaselineGPT2(NamedTuple):
    """Programs of greedy decoding; `cache` is Flax's cache without its public index.

    prefill(params, tokens [n]) -> next token, cache decode(params, tokens [n], cache, length,
    public) -> next token, cache
    """

    prefill: WholeFunction
    decode: WholeFunction


def build(config: GPT2Config, capacity: int) -> BaselineGPT2:
    """Return the programs for a model of this shape, with a cache of `capacity` positions."""
    model = flax_model(config)

    def decode(params: Any, tokens: Array, cache: Any, length: Array) -> tuple[Array, Any]:
        n = tokens.shape[0]
        out = model(
            tokens[None],
            attention_mask=jnp.ones((1, capacity), jnp.int32),
            position_ids=(length + jnp.arange(n))[None],
            params=params,
            past_key_values=_with_index(cache, length),
        )
        return jnp.argmax(out.logits[0, -1]), _without_index(out.past_key_values)

    def prefill(params: Any, tokens: Array) -> tuple[Array, Any]:
        shapes = _without_index(jax.eval_shape(lambda: model.init_cache(1, capacity)))
        cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return decode(params, tokens, cache, jnp.int32(0))

    owners = (Owner.PROVIDER, Owner.CLIENT, Owner.JOINT, Owner.PUBLIC)
    return BaselineGPT2(
        WholeFunction(prefill, owners[:2], "stock prefill"),
        WholeFunction(decode, owners, "stock decode"),
    )


def _with_index(cache: Any, length: Array) -> Any:
    layers = cache["transformer"]["h"].items()
    held = {i: {"attn": {**layer["attn"], "cache_index": length}} for i, layer in layers}
    return {"transformer": {"h": held}}


def _without_index(cache: Any) -> Any:
    layers = cache["transformer"]["h"].items()
    held = {
        i: {"attn": {k: v for k, v in layer["attn"].items() if k != "cache_index"}}
        for i, layer in layers
    }
    return {"transformer": {"h": held}}


# ---- decoding


def share_params(session: Session, config: GPT2Config, params: Params | None) -> Any:
    """Give the provider's weights to the session as private values under Flax's names; the client
    passes None for `params`.
    """
    shapes = jax.eval_shape(lambda: flax_params(init_params(config, jax.random.key(0))))
    return private_tree(session, PROVIDER, flax_params, shapes, params)


@dataclass(frozen=True)
class Decoded:
    """One party's result of a greedy completion."""

    tokens: list[int]
    prefill: dict[str, Any]
    steps: list[dict[str, Any]]  # of one token each; the first one warms up


def decode_greedily(
    session: Session,
    stock: BaselineGPT2,
    weights: Any,
    prompt: list[int],
    length: int,
    steps: int,
    before_step: Callable[[int], None] = lambda i: None,
) -> Decoded:
    """Run a prefill and decode `steps` more tokens. `prompt` (`length` tokens) is the client's; the
    provider passes an empty list.
    """
    tokens: list[int] = []

    def forward(phase: str, function: WholeFunction, given: list[int], n: int, *state: Any) -> Any:
        """Emit one token after n tokens of the client's; return the cache and the cost."""

        def work() -> Any:
            fresh = session.private(CLIENT, lambda: given, (n,), np.int32)
            token, cache = session.call(function, weights, fresh, *state)
            opened = session.get(session.call(open_token, token))
            if opened is not None:
                tokens.append(int(opened))
            return cache

        return timed(session, phase, work)

    cache, cost = forward("prefill", stock.prefill, prompt, length)
    costs = []
    for i in range(steps):
        before_step(i)
        at = public(np.int32(length + i))
        cache, spent = forward(f"step {i}", stock.decode, tokens[-1:], 1, cache, at)
        costs.append(spent)
    return Decoded(tokens, cost, costs)


# ---- the program of both workers


@dataclass(frozen=True)
class StockRequest:
    prompt_tokens: int
    capacity: int
    steps: int  # measured ones


@dataclass(frozen=True)
class StockInputs:
    prompt: list[int]


PROGRAM = Program(
    "spu-baseline",
    __name__,
    StockRequest,
    StockInputs,
    spu=SETTINGS,
    check=lambda asked, model: check(
        gpt2_config(model), asked.prompt_tokens, asked.capacity, asked.steps
    ),
)


def run(session: PartySession, job: Job[StockRequest, StockInputs], send: Send) -> dict[str, Any]:
    """Run a prefill, a step to warm up, and the measured steps."""
    config, length = gpt2_config(job.model), job.request.prompt_tokens
    steps = job.request.steps
    stock = build(config, job.request.capacity)
    with session.meter.in_phase("offline"):
        params = load_model(Path(job.provider.model_dir))[1] if session.rank != CLIENT else None
        weights = share_params(session, config, params)
        send("stage", name="compiling the stock path")
        _prepare(session, stock, weights, length)
    set_up = total([e for e in session.meter.entries if e.phase == "offline"], session.rank)
    send("stage", name=f"stock prefill of {length} tokens")
    forget_peak()
    prompt = job.client.prompt if session.rank == CLIENT else []
    decoded = decode_greedily(
        session,
        stock,
        weights,
        prompt,
        length,
        1 + steps,
        lambda i: send("update", name=f"stock step {i} of {steps}"),
    )
    return {
        "tokens": decoded.tokens,
        "set_up": set_up | {"seconds": session.meter.seconds["offline"]},
        "prefill": decoded.prefill,
        "warm_up": decoded.steps[0],
        "runs": decoded.steps[1:],
        "peak_memory": peaks(session),
        "learned": session.ledger.learned(),
    }


def gpt2_config(config: ModelConfig) -> GPT2Config:
    """Return the agreed model's configuration; InputError for a family other than GPT-2."""
    if not isinstance(config, GPT2Config):
        raise InputError(f"the stock path runs gpt2 alone, not a {config.family} model")
    return config


def check(config: ModelConfig, length: int, capacity: int, steps: int) -> None:
    """Raise InputError unless the model has room for the prompt and all steps."""
    if length < 1 or steps < 1:
        raise InputError("the stock path takes a prompt and a step at least")
    if not length + 1 + steps <= capacity <= gpt2_config(config).n_positions:
        raise InputError(
            f"{length} prompt tokens and {1 + steps} steps need a cache of as many positions, and "
            f"at most {config.context}, found {capacity}"
        )


def _prepare(session: PartySession, stock: BaselineGPT2, weights: Any, length: int) -> None:
    """Compile both programs and agree on them with the peer."""
    shape = jax.ShapeDtypeStruct
    prompt, token = shape((length,), np.int32), shape((1,), np.int32)
    session.prepare(stock.prefill, weights, prompt)
    shapes = jax.tree.map(lambda v: shape(v.shape, v.dtype), weights)
    next_token, cache = jax.eval_shape(stock.prefill.fn, shapes, prompt)
    session.prepare(stock.decode, weights, token, cache, shape((), np.int32))
    session.prepare(open_token, next_token)


# ---- the command at the client


def greedy_reference(model: Path, prompt: list[int], count: int) -> list[int]:
    """Decode `count` tokens after the prompt with Flax's model in plaintext float32."""
    config, params = load_model(model)
    config = gpt2_config(config)
    apply = jax.jit(functools.partial(flax_model(config).__call__, params=flax_params(params)))
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(apply(np.asarray([tokens], np.int32)).logits[0, -1])))
    return tokens[len(prompt) :]


def measure(model: Path, prompt: str, capacity: int, steps: int, network: str) -> dict[str, Any]:
    """Run one network's session; return its result as JSON fields, among them whether its tokens
    equal plaintext's.
    """
    completed = complete(model, prompt, capacity, steps, network)
    tokens = Tokenizer.load(model).encode(prompt)
    wanted = greedy_reference(model, tokens, len(completed["tokens"]))
    return completed | {"as_in_plaintext": completed["tokens"] == wanted}


def complete(model: Path, prompt: str, capacity: int, steps: int, network: str) -> dict[str, Any]:
    """Run one session, which emits 2 + `steps` tokens; return its result as JSON fields."""
    tokens = Tokenizer.load(model).encode(prompt)
    check(load_config(model), len(tokens), capacity, steps)
    outcome, agreed = run_study(
        PROGRAM,
        model,
        StockRequest(len(tokens), capacity, steps),
        StockInputs(tokens),
        network=network,
    )
    return {
        "network": network,
        "prompt_tokens": len(tokens),
        "capacity": capacity,
        **outcome.result,
        **session_record(outcome, agreed),
    }
