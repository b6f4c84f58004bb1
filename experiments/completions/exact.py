"""Exact figures: messages, rounds and bytes of ops, functions, verification, and whole steps.

They follow from dry runs alone (`spu_llm.compiler.demand`), replayed as the executor would send
them (`experiments.common.replay`): no key is made and nothing is sent. `data/exact.json` has them
as they were when the tables in docs/results and protocols/README.md were last brought up to date
(`experiments.completions.exact_cells`); a test compares all three.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import enable_x64

from experiments.benchmarks import verify_bench
from experiments.benchmarks.op_cases import OPS, Input
from experiments.benchmarks.step_sweep import capacity_for
from experiments.common import commands
from experiments.common.replay import cost_of
from experiments.common.saved import DATA
from experiments.completions import exact_cells
from experiments.cost_model.workload import Workload, of_completion
from models.family import ModelConfig
from models.gpt2 import GPT2Config
from models.hf import load_config
from protocols.arithmetic.field_product import field_multiply, field_square
from protocols.arithmetic.joint import joint_bits, joint_fraction, joint_words
from protocols.arithmetic.narrow import narrow, widen
from protocols.arithmetic.product import linear, matmul, multiply, square
from protocols.arithmetic.truncate import truncate
from protocols.bits.compare import sign, sign_cost, tree
from protocols.bits.convert import to_arith
from protocols.bits.logic import and_bits, prefix_or
from protocols.bits.mux import mux
from protocols.bits.stars import transfers
from protocols.bits.thresholds import below
from protocols.functions.aggregation import OwnedBlock, with_one_maximum, with_own_maxima
from protocols.functions.argmax import argmax
from protocols.functions.exponential import exponential
from protocols.functions.maximum import maximum
from protocols.functions.softmax import score_bits
from protocols.ot.select import select
from protocols.verification.sampling import Widths, locate, reject, residual
from spu_llm.api.defaults import DRAFT_LENGTH, PREFIX_PAD
from spu_llm.app.output import write_json
from spu_llm.app.printing import show_table
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.core.values import Arith, Bool, Owner
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.program import SystemPromptShape

FILE = DATA / "exact.json"
PROMPT_TOKENS = 7  # of the prompt of demo
POSITIONS = (1, 8, 16)
SMALL = GPT2Config(50257, 1024, 768, 12, 12)  # GPT-2 small's shape
SMALL_PROMPT = 64
VOCAB = 32000
DRAFTS = (4, 8)
VERIFIED = (
    ("token", "probabilities"),
    ("token", "logits"),
    ("post", "probabilities"),
    ("post", "logits"),
    ("naive", "probabilities"),
    ("naive", "logits"),
    ("race", "logits"),
)
ATTENTION = ((4, 1, 32, 96), (4, 8, 32, 96), (12, 8, 256, 512))  # heads, queries, prefix, cache
HEAD_DIM = 64
OWN_TEXT, OWN_STEPS = (32, 128, 200), 13  # tokens; steps that the mean is of
COMPARED = (9, 12, 24, 32, 64)  # bits
TOGETHER = (1_024, 102_400)  # values compared at once
MANY = 6400  # values: a multiple of 64, to which bits are packed
J, C, P = Owner.JOINT, Owner.CLIENT, Owner.PROVIDER


def figures(model: Path) -> dict[str, Any]:
    """Return all exact figures, as JSON fields. `model`: the directory of the shipped private
    model.
    """
    return quick_figures(model) | {"own text": own_text_figures(model)}


def quick_figures(model: Path) -> dict[str, Any]:
    """Return all exact figures but the figures of text of the provider's own, whose dry runs take
    most of the time.
    """
    with enable_x64():  # whole ring words
        ops = [_case(name, size) for name, case in OPS.items() for size in case.sizes]
        protocols = _protocols()
    return {
        "steps": [*_shipped_steps(load_config(model)), *_small_steps()],
        "attention": _attention(),
        "verification": _verification(),
        "ops": ops,
        "protocols": protocols,
        "comparisons": _comparisons(),
    }


# ---- steps of a model


def _shipped_steps(config: ModelConfig) -> list[dict[str, Any]]:
    """Return the costs of the shipped model's steps as `bench step` runs them after the prompt of
    demo.
    """
    prefill, steps = of_sweep(config, PROMPT_TOKENS, POSITIONS)
    named = {f"prefill of {PROMPT_TOKENS}": prefill} | {f"step of {n}": steps[n] for n in steps}
    return [{"model": "shipped", "step": name} | step for name, step in named.items()]


def of_sweep(
    config: ModelConfig, prompt_tokens: int, positions: Sequence[int], temperature: float = 0.0
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the costs of the prefill and the steps of `step_sweep`, all with one cache, by
    positions.
    """
    rows = capacity_for(prompt_tokens, positions)
    prefill, steps = {}, {}
    for n in positions:
        request = Request(
            prompt_tokens, rows - prompt_tokens - n, n - 1, temperature, show_progress=True
        )
        assert request.sizes(config) == (rows,)
        prefill, steps[n] = steps_of(config, request)
    return prefill, steps


def _small_steps() -> list[dict[str, Any]]:
    """Return the costs of GPT-2 small's steps as `experiment scale` runs them."""
    prefill, step = steps_of(SMALL, Request(SMALL_PROMPT, 3, 0, temperature=0.0))
    return [
        {"model": "GPT-2 small", "step": f"prefill of {SMALL_PROMPT}"} | prefill,
        {"model": "GPT-2 small", "step": "step of 1"} | step,
    ]


def steps_of(config: ModelConfig, request: Request) -> list[dict[str, Any]]:
    """Return the costs of the prefill and the first decode step of a completion, each with what one
    block adds.
    """
    steps = []
    wholes = of_completion(config, request, [])
    one, two = (of_completion(config.with_layers(n), request, []) for n in (1, 2))
    for whole, a, b in zip(wholes, one, two, strict=True):
        block = b.combined(a, 1.0, -1.0)
        sizes = {kind: round(n) for kind, n in whole.bytes_of.items()}
        steps.append(_counts(whole) | {"block": _counts(block), "bytes_of": sizes})
    return steps


def _counts(work: Workload) -> dict[str, int]:
    names = ("messages", "rounds", "client_to_provider", "provider_to_client")
    return {name: round(work.counts[name]) for name in names}


def own_text_figures(model: Path) -> list[dict[str, Any]]:
    """Return the figures of text of the provider's own, a row for each length and way."""
    figures = []
    for (tokens, way), works in own_text(load_config(model)).items():
        prefill, step = map(_counts, works)
        figures.append({"tokens": tokens, "way": way, "prefill": prefill, "step": step})
    return figures


@functools.cache
def own_text(config: ModelConfig) -> dict[tuple[int, str], list[Workload]]:
    """Return the work of a drafted completion after text of the provider's own, and after as much
    of the client's, by tokens and way: the prefill, and the mean of the first steps.
    """
    by_length = {}
    for tokens in (0, *OWN_TEXT):
        ways = {"the prompt alone": (0, SystemPromptShape())}
        if tokens:
            rows = -(-tokens // PREFIX_PAD) * PREFIX_PAD
            ways = {
                "a system prompt": (0, SystemPromptShape(rows, PREFIX_PAD - 1)),
                "in the prompt": (tokens, SystemPromptShape()),
            }
        for way, (more, before) in ways.items():
            request = Request(PROMPT_TOKENS + more, 16, DRAFT_LENGTH, 0.0)
            by_length[tokens, way] = of_completion(config, request, [], OWN_STEPS, before)
    return by_length


def _attention() -> list[dict[str, Any]]:
    """Return the costs of one layer's attention over the provider's prefix and a cache, whose rows
    it opens, both ways.
    """
    calls = []
    for heads, queries, prefix, rows in ATTENTION:
        sizes = (queries, prefix, prefix, rows, rows)
        forms = [jax.ShapeDtypeStruct((heads, n, HEAD_DIM), np.float32) for n in sizes]
        for way in (with_one_maximum, with_own_maxima):
            cost = cost_of(_aggregation(way), forms)
            row = {"heads": heads, "queries": queries, "prefix": prefix, "cache": rows}
            calls.append(row | {"way": way.__name__} | dataclasses.asdict(cost))
    return calls


def _aggregation(way: Callable[..., Any]) -> SecureFunction:
    def attention(query: Any, *blocks: Any) -> Any:
        owned = [
            OwnedBlock(k, v, jnp.ones((*query.shape[:2], k.shape[1]), bool))
            for k, v in (blocks[:2], blocks[2:])
        ]
        return way(query, owned, score_bits(511))

    return SecureFunction(attention, (J, P, P, J, J), way.__name__)


# ---- ops, functions made of ops, verification


def _verification() -> list[dict[str, Any]]:
    """Return the costs of what `bench verify` measures."""
    rows = []
    for drafts in DRAFTS:
        for name, source in VERIFIED:
            cost = verify_bench.cost(name, source, drafts, VOCAB)
            row = {"draft_length": drafts, "variant": name, "source": source}
            rows.append(row | dataclasses.asdict(cost))
    return rows


def _case(name: str, size: int) -> dict[str, Any]:
    """Return the cost of what `bench op` measures of ours."""
    case = OPS[name]
    inputs = case.inputs(np.random.default_rng(0), size)
    function = SecureFunction(case.ours, tuple(x.owner for x in inputs), name)
    cost = cost_of(function, [_form(x) for x in inputs])
    values = max(x.plain.size for x in inputs if x.owner is J) if J in function.owners else size
    return {"op": name, "size": size, "values": values} | dataclasses.asdict(cost)


def _form(x: Input) -> Any:
    if x.boolean and x.plain.dtype != np.bool_:
        return Bool(np.zeros(x.plain.shape, np.uint64), x.plain.dtype, 0, 64)
    return jax.ShapeDtypeStruct(x.plain.shape, x.plain.dtype)


def _protocols() -> dict[str, dict[str, Any]]:
    """Return what protocols/README.md says of ops: costs, and how many values they are of."""
    return {
        name: {"values": values} | dataclasses.asdict(cost_of(SecureFunction(fn, owners, name), x))
        for name, (fn, owners, x, values) in _ops().items()
    }


def _comparisons() -> list[dict[str, int]]:
    """Return what one comparison of so many values takes: messages of all of them, random
    transfers made ahead, and the sums of them that are kept (`protocols.bits.gates`).
    """
    rows = []
    for bits, values in itertools.product(COMPARED, TOGETHER):
        gates = tree(bits - 1, values)
        rows.append(
            {
                "bits": bits,
                "values": values,
                "messages": sign_cost(values, bits).messages,
                "transfers": round(sum(n * sum(transfers(gate)) for gate, n in gates)),
                "sums": sum(n * len(gate.sums) for gate, n in gates),
            }
        )
    return rows


Priced = tuple[Callable[..., Any], tuple[Owner, ...], Sequence[Any], int]


def _ops() -> dict[str, Priced]:
    """Return each op with what it is called on: function, owners, forms, values."""

    def ints(*shape: int, bits: int = 64) -> Arith:
        return Arith(np.zeros(shape, np.uint64), np.dtype(np.int64), 0, bits)

    def bools(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.bool_)

    def floats(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.float32)

    def own(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.int64)

    def of(fn: Callable[..., Any], *x: Any) -> Priced:
        return fn, (J,) * len(x), x, MANY

    one, many, bits = ints(MANY), (ints(MANY), ints(MANY)), bools(MANY)
    widths = Widths.of_weights(VOCAB)
    rows, words = MANY // 64, MANY // 2
    return {
        **{f"sign {n}": of(lambda x, n=n: sign(x, bits=n), one) for n in COMPARED},
        **{
            f"below {count}": of(
                lambda x, count=count, n=n: below(x, thresholds=(tuple(range(count)),), bits=n),
                ints(MANY, 1),
            )
            for count, n in ((6, 14), (100, 28))
        },
        "and_bits": of(and_bits, bits, bits),
        **{f"prefix_or {n}": of(prefix_or, bools(MANY // n, n)) for n in (4, 8, 20)},
        "to_arith": of(to_arith, bits),
        "truncate unbiased": of(lambda x: truncate(x, shift=18, how="unbiased", bits=62), one),
        "truncate local": of(lambda x: truncate(x, shift=18, how="local", bits=24), one),
        "truncate exact": of(lambda x: truncate(x, shift=18, how="exact", bits=62), one),
        "multiply": of(multiply, *many),
        "square": of(square, one),
        "field_multiply": of(lambda x, y: field_multiply(x, y, cuts=(0, 0)), *many),
        "field_square": of(lambda x: field_square(x, cuts=(0,)), one),
        "matmul": of(lambda x, y: matmul(x, y, shift=0), ints(1, rows, 32), ints(1, 32, rows)),
        "linear": (
            lambda x, w: linear(x, w, label="exact", shift=0),
            (J, P),
            (floats(rows, 64), floats(64, 32)),
            MANY,
        ),
        "select": (lambda x, d: select(x, d, bits=64), (J, C), (ints(8, 4096), own(8)), 8 * 4096),
        "joint_bits": (joint_bits, (C, P), (bools(MANY), bools(MANY)), MANY),
        "joint_words": (joint_words, (C, P), (own(MANY), own(MANY)), MANY),
        "joint_fraction": (
            lambda x, y: joint_fraction(x, y, bits=16),
            (C, P),
            (own(MANY), own(MANY)),
            16 * MANY,
        ),
        "mux": of(mux, bits, one),
        "mux 25": of(mux, bits, ints(MANY, bits=25)),
        "mux 32": of(mux, bits, ints(MANY, bits=32)),
        "narrow": of(lambda x: narrow(x, drop=18, bits=30), floats(MANY)),
        "widen": of(widen, ints(MANY, bits=30)),
        "maximum": (lambda x: maximum(x, bits=26), (J,), (ints(9, VOCAB),), 9 * VOCAB),
        "argmax": (lambda x: argmax(x, bits=26), (J,), (ints(9, VOCAB),), 9 * VOCAB),
        "exponential": of(exponential, floats(MANY)),
        "reject": (
            lambda w, z, q, r: reject(w, z, q, r, widths=widths),
            (J, J, C, J),
            (one, one, own(MANY), one),
            MANY,
        ),
        "residual": (
            lambda w, q: residual(w, q, widths=widths),
            (J, C),
            (ints(2, words), own(2, words)),
            MANY,
        ),
        "locate": of(
            lambda w, u: locate(w, u, draw=widths.draw, total=widths.total), ints(2, words), ints(2)
        ),
    }


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--write",
        action="store_true",
        help="bring the documents and experiments/data/exact.json up to date",
    )
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    if options.write and options.model is not None:
        raise InputError("--write is for the shipped model's figures; leave --model out")
    exact = figures(commands.private_model(options))
    show_table(exact_cells.table(exact))
    commands.write(options, exact)
    if options.write:
        write_json(FILE, exact)
        exact_cells.documents(exact, write=True)
    stale = exact_cells.documents(exact, write=False)
    if exact_cells.stored(FILE) != exact:
        stale.append(f"{FILE.name} has other figures")
    if stale:
        text = "; ".join(stale[:3])
        raise SpuLlmError(f"{len(stale)} stale ({exact_cells.COMMAND} mends them): {text}")
