"""Prices: the cost of making a unit of each correlation, and of computing online, fitted to runs.

The runs are runs of `experiments.benchmarks.scale` on models small enough to take minutes; their
workloads (`experiments.cost_model.workload`) say what was made and computed. For most correlations,
the price of a batch is its number of random transfers, or of words of results where it takes none,
times a price of the kind. SPU's products of shared matrices use ciphertexts that hold 8,192
words: bytes follow from the number of ciphertexts, seconds from words and multiplications. The
ciphertexts of packed products are counted: bytes follow from their number, seconds from the
operations on them. Silent (PCG-style) products with weights take seconds for each input and output,
and no bytes. The price of computing online is a sum of such terms, too (`workload.COMPUTE`).

Extending the transfers has a price of its own, of which each correlation that takes transfers bears
its part (`experiments.common.transfers`).

The prices in `prices.json` next to this file were made by `spu-llm experiment prices`, except where
its `origin` says otherwise, on the machine that the file names.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from experiments.benchmarks import scale
from experiments.common import commands
from experiments.common.measured import FIGURES as COSTS
from experiments.common.measured import summed
from experiments.common.transfers import extensions
from experiments.cost_model import workload
from experiments.cost_model.workload import COMPUTE, Workload, matrix_sizes
from spu_llm.app.output import write_json
from spu_llm.app.printing import show
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline.ot.transfers import EXTENSION
from spu_llm.offline.packed.layout import columns_apart
from spu_llm.offline.packed.products import owners

SHIPPED = Path(__file__).parent / "prices.json"
FIGURES = ("seconds", "client_to_provider", "provider_to_client")
_OF_COMMIT = ": of commit "  # in an origin, after kinds that are not of its runs
_SLOTS = 8192  # words that a ciphertext holds
# Of random transfers, and next to nothing sent; `field`: transfers of the field's elements.
_MADE_ALIKE = {"transfer": "gate", "field": "gate"}


@dataclass(frozen=True)
class Prices:
    """Prices of a machine. `flat`, `fitted` and `messages` are by kind of correlation and without
    extensions of the transfers.
    """

    machine: dict[str, Any]
    runs: list[dict[str, Any]]  # the shapes that were measured
    origin: str  # of the figures
    flat: dict[str, dict[str, float]]
    fitted: dict[str, dict[str, list[float]]]
    messages: dict[str, float]
    extension: dict[str, float]
    compute: dict[str, float]

    @staticmethod
    def load(path: Path = SHIPPED) -> Prices:
        """Read prices from a file; InputError when it cannot be read or holds none."""
        try:
            return Prices(**json.loads(path.read_text(encoding="utf-8")))
        except OSError as exc:
            raise InputError(f"{path} cannot be read: {exc.strerror}") from None
        except (ValueError, TypeError):
            raise InputError(f"{path} holds no prices; make them by `experiment prices`") from None

    def of_units(self, correlation: Correlation, units: float) -> dict[str, float]:
        """Return seconds, bytes by direction and messages of making `units` of a correlation: their
        part of full batches and of extensions of the stocks of transfers.
        """
        kind, batches = kind_of(correlation), units / correlation.chunk
        if kind in _TERMS:
            terms = {name: _TERMS[kind](correlation, name) for name in FIGURES}
            figures = {
                name: batches * float(np.dot(self.fitted[kind][name], terms[name]))
                for name in FIGURES
            }
        else:
            price = self.flat[self._known(kind)]
            figures = {name: units * priced(correlation) * price[name] for name in FIGURES}
        figures["messages"] = batches * self.messages[self._known(kind)]
        part = extensions(correlation, units)
        return {name: figures[name] + part * self.extension[name] for name in COSTS}

    def _known(self, kind: str) -> str:
        """Return the kind whose price stands for `kind`: itself, the mean gate, or a kind that is
        made alike.
        """
        known = kind if kind in self.messages else kind.split()[0]
        return known if known in self.messages else _MADE_ALIKE[known]

    def of_material(self, work: Workload) -> dict[str, dict[str, float]]:
        """Return the cost of making all correlations that a step takes, by kind."""
        by_kind: dict[str, list[dict[str, float]]] = defaultdict(list)
        for name, units in work.units.items():
            correlation = work.correlations[name]
            by_kind[kind_of(correlation)].append(self.of_units(correlation, units))
        return {kind: summed(costs) for kind, costs in by_kind.items()}

    def extensions(self, work: Workload) -> float:
        """Return how often transfers are extended for a step's correlations."""
        of = work.correlations
        return sum(extensions(of[name], units) for name, units in work.units.items())

    def computing(self, work: Workload) -> float:
        """Return the online seconds of a step, without the network."""
        return sum(self.compute[name] * work.counts[name] for name in COMPUTE)


def priced(correlation: Correlation) -> float:
    """Return the number per unit that flat prices multiply: transfers, or words of results for a
    correlation that takes no transfers.
    """
    return sum(correlation.transfers) or sum(part.size for part in correlation.results)


def kind_of(correlation: Correlation) -> str:
    """Return the kind of a correlation; all of a kind have one price, or one set of terms. Records
    of runs use the first two words of a correlation's name instead: packed products are "cached
    products", "weighted cached", "known products", "weighted known", "known factors", "row squares"
    and "scaled row" there, and matrix products are "matrix triple".
    """
    if correlation.fixed is not None:
        return "masked product"
    if correlation.matrices is not None:
        return "packed product"
    if matrix_sizes(correlation) is not None:
        return "matrix product"
    return " ".join(correlation.name.split()[:2])


def _masked_terms(correlation: Correlation, figure: str) -> list[float]:
    """Return the terms of a batch of silent products: for seconds, a constant, inputs and outputs;
    for bytes, zero.
    """
    assert correlation.fixed is not None
    return [1.0, *map(float, correlation.fixed.shape)] if figure == "seconds" else [0.0]


def _matrix_terms(correlation: Correlation, figure: str) -> list[float]:
    """Return the terms of a batch of SPU's matrix products, where each unit is two products, one
    encrypted by each party: for seconds, a constant, units, words of results and multiplications;
    for bytes, ciphertexts sent and returned.
    """
    sizes = matrix_sizes(correlation)
    assert sizes is not None
    units = correlation.chunk
    m, k, n = sizes
    if figure != "seconds":
        sent, back = math.ceil(min(m, n) * k / _SLOTS), math.ceil(m * n / _SLOTS)
        return [float(units * sent), float(units * back)]
    return [1.0, units, units * m * n, units * m * k * n]


def _packed_terms(correlation: Correlation, figure: str) -> list[float]:
    """Return the terms of a batch of packed products: for seconds, a constant, ciphertexts,
    polynomials that are multiplied by transforms, and pairs that are packed; for bytes, the bytes
    themselves. Both directions run side by side.
    """
    assert correlation.matrices is not None
    empty = [np.zeros((1, *part.shape), np.uint64) for part in correlation.masks]
    x, y = correlation.matrices(*empty)
    layouts = [of for _, of in columns_apart(correlation.chunk, x.shape[1], x.shape[2], y.shape[2])]
    if figure == "seconds":
        ciphertexts = sum(of.groups * of.blocks for of in layouts)
        pairs = [of.units * of.pairs for of in layouts]
        products = sum(
            0 if of.is_scalar else some * of.blocks for of, some in zip(layouts, pairs, strict=True)
        )
        return [1.0, ciphertexts, products, sum(pairs)]
    sender, encrypt = _sender(figure), owners(correlation)
    sent = sum(of.ciphertext_bytes for of in layouts) if sender in encrypt else 0
    answered = sum(of.answer_bytes for of in layouts) if 1 - sender in encrypt else 0
    return [float(sent + answered)]


def _sender(figure: str) -> int:
    return CLIENT if figure == "client_to_provider" else PROVIDER


_TERMS: Mapping[str, Callable[[Correlation, str], list[float]]] = {
    "masked product": _masked_terms,
    "matrix product": _matrix_terms,
    "packed product": _packed_terms,
}


# ---- measuring

# Models of few blocks, as wide as those that are estimated: of narrower ones the first use of every
# program takes most of the time. They differ enough for all terms; a prompt of 72 has a cache of
# larger tiles than the others.
SHAPES = tuple(
    scale.Shape(layers, width, heads, vocab, 256, prompt, 6, second_batches=True, extensions=more)
    for layers, width, heads, vocab, prompt, more in (
        (1, 384, 6, 8192, 24, 6),
        (4, 576, 9, 8192, 13, 0),
        (1, 768, 12, 16384, 32, 0),
        (2, 1024, 16, 4096, 72, 0),
    )
)


def measure(
    model: Path, shapes: Sequence[scale.Shape] = SHAPES, more: Sequence[dict[str, Any]] = ()
) -> Prices:
    """Run a completion of every shape without a network, and fit prices to the results and to
    `more`, results of earlier such runs. SpuLlmError when a result is wrong.
    """
    results = [*more, *(scale.measure(model, shape, "local") for shape in shapes)]
    made: Made = []
    longer: list[Cost] = []
    steps: list[tuple[Workload, float]] = []
    for result in results:
        if failures := result["failures"]:
            raise SpuLlmError(f"a result is wrong: {failures[0]}")
        shape = scale.Shape(**result["shape"])
        works = workload.of_completion(shape.config, shape.request, [])
        prefill, *tokens = (cost["seconds"] for cost in [result["prefill"], *result["tokens"]])
        # The first token of a session is the first use of its programs.
        steps += zip(works, (prefill, float(np.median(tokens[1:] or tokens))), strict=True)
        made += made_in(result, workload.together(works))
        longer += extended_in(result)
    return fit(results[0]["machine"], [r["shape"] for r in results], made, longer, steps)


# ---- fitting

Cost = dict[str, float]  # of a batch: COSTS
Made = list[tuple[Correlation, list[Cost]]]  # batches of a correlation


def fit(
    machine: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    made: Made,
    longer: Sequence[Cost],
    steps: Sequence[tuple[Workload, float]],
) -> Prices:
    """Fit prices, none below zero, to the batches `made`, to extensions of transfers (`longer`),
    and to `steps` with their online seconds without a network. SpuLlmError without an extension.

    The fits minimise relative errors.
    """
    by_kind: dict[str, list[tuple[Correlation, Cost]]] = defaultdict(list)
    for correlation, batches in made:
        by_kind[kind_of(correlation)].append((correlation, _mean(batches)))
    if not longer:
        raise SpuLlmError("no run extended its transfers a second time, so that has no price")
    flat: dict[str, dict[str, float]] = {}
    fitted: dict[str, dict[str, list[float]]] = {}
    messages: dict[str, float] = {}
    for kind, some in by_kind.items():
        messages[kind] = float(np.mean([cost["messages"] for _, cost in some]))
        if kind in _TERMS:
            fitted[kind] = {
                name: _fitted([(_TERMS[kind](c, name), cost[name]) for c, cost in some])
                for name in FIGURES
            }
        else:
            count = sum(c.chunk * priced(c) for c, _ in some)
            flat[kind] = {name: sum(cost[name] for _, cost in some) / count for name in FIGURES}
    gates = [kind for kind in flat if kind.startswith("gate ")]
    if gates:  # for a gate of a kind that was not measured
        flat["gate"] = {n: float(np.mean([flat[k][n] for k in gates])) for n in FIGURES}
        messages["gate"] = float(np.mean([messages[k] for k in gates]))
    terms = [([work.counts[name] for name in COMPUTE], seconds) for work, seconds in steps]
    compute = dict(zip(COMPUTE, _fitted(terms), strict=True))
    origin = f"these runs; the price of an extension is the mean of {len(longer)}"
    return Prices(machine, list(runs), origin, flat, fitted, messages, _mean(longer), compute)


def with_others(fresh: Prices, before: Prices) -> Prices:
    """Return the prices `found`, with the prices in `before` for kinds that `found` lacks."""
    kept = sorted(before.messages.keys() - fresh.messages.keys())
    if not kept:
        return fresh
    by_commit: dict[str, list[str]] = defaultdict(list)
    older = _older(before.origin)
    for kind in kept:
        by_commit[older.get(kind, before.machine["commit"])].append(kind)
    others = (f"{', '.join(kinds)}{_OF_COMMIT}{commit}" for commit, kinds in by_commit.items())
    return replace(
        fresh,
        origin="; ".join([fresh.origin, *others]),
        flat={**before.flat, **fresh.flat},
        fitted={**before.fitted, **fresh.fitted},
        messages={**before.messages, **fresh.messages},
    )


def _older(origin: str) -> dict[str, str]:
    """Return the commits that an origin names for kinds that were kept before."""
    parts = (part.partition(_OF_COMMIT) for part in origin.split("; "))
    return {kind: commit for names, _, commit in parts if commit for kind in names.split(", ")}


def _mean(costs: Sequence[Cost]) -> Cost:
    return {name: total / len(costs) for name, total in summed(costs).items()}


def _fitted(rows: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Fit the coefficients, none below zero, of terms to figures by least squares of relative
    errors.
    """
    terms = np.array([t for t, _ in rows], np.float64)
    figures = np.array([max(y, 1e-9) for _, y in rows])
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-9)
    factors, _ = nnls(terms / scale / figures[:, None], np.ones(len(rows)))
    return [float(x) for x in factors / scale]


def made_in(result: dict[str, Any], work: Workload) -> Made:
    """Return the batches of each correlation of `work` in a result of
    `experiments.benchmarks.scale`; the first batch, which compiles, is left out where there are
    others.
    """
    made: Made = []
    for row in result["material"]:
        correlation = work.correlations.get(workload.common_name(row["name"]))
        if correlation is not None:
            batches = row["batches"][1:] or row["batches"]
            made.append((correlation, [{name: b[name] for name in COSTS} for b in batches]))
    return made


def extended_in(result: dict[str, Any]) -> list[Cost]:
    """Return what extensions of the transfers cost in such a result, but for the first one of a
    session, which makes what it starts from, too.
    """
    rows = [row for row in result["material"] if row["name"] == EXTENSION]
    return [{name: b[name] for name in COSTS} for row in rows for b in row["batches"][1:]]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--with",
        dest="more",
        type=commands.names,
        default=[],
        metavar="FILE,...",
        help="results of `experiment scale --network local` to fit to as well",
    )
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    more = [result for path in options.more for result in _results(path)]
    prices = with_others(measure(commands.private_model(options), more=more), Prices.load())
    write_json(options.json or SHIPPED, asdict(prices))
    show(f"written to {options.json or SHIPPED}")


def _results(path: str) -> list[dict[str, Any]]:
    """Return the results in the JSON file of a study, one per network."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        networks: list[dict[str, Any]] = json.loads(text)["networks"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"--with: {path} is not the JSON of a study") from None
    return networks
