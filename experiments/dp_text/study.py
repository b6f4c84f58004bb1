"""Differentially private text: utility against cost, by method.

"InvisibleInk" (Vinod, Pillutla, Thakurta), table 2 and figure 1, on the shipped models and on
docstrings (`experiments.dp_text.inputs`). Every text comes from the generator as `spu-llm dp
generate` runs it, and ends where a docstring would: at three quotation marks. Measured of each cell
(method, epsilon, batch, top-k): MAUVE, perplexity gap under the public model, lengths, names
(`experiments.dp_text.metrics`), and next-token evaluations of the model for each token.

A control, `null-references`: InvisibleInk whose references are all null, so that it is the public
model on the very candidates that epsilon gives (V_k+ grows with it). What a cell gains over that is
from references. Beside it, `worth`: what references say of a real text's tokens, without any
sampling.

Temperatures are the paper's: 1.2 with top-k, 1 without. AugPE generates 7 texts for one in each
iteration, and one before, some at a time: calls of those that have ended count, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.dp_text import metrics
from experiments.dp_text.inputs import corpus
from experiments.dp_text.utility import savings
from models.hf import load_model
from models.tokenizer import Tokenizer
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.accounting import rho_for
from spu_llm.systems.dp_text.baselines import amin, augpe
from spu_llm.systems.dp_text.corpus import METHODS, CorpusRequest, augpe_for, method_for
from spu_llm.systems.dp_text.generator import Generator, Made
from spu_llm.systems.dp_text.lanes import Features, folded
from spu_llm.systems.dp_text.methods import Method, Next
from spu_llm.systems.dp_text.prompts import Prompts, prompts_for

QUERY = 'def test(self):\n    """'
CLOSING = '"""'
DELTA = 1e-6
EPSILONS, BATCHES, TOP_K = (1.0, 3.0, 5.0, 10.0), (3, 7, 15), (10, 50, None)
OURS = ("invisibleink", "full-vocabulary")
BASELINE_BATCHES = {
    "amin": (31,),
    "amin-published": (31, 63, 127),
    "adapmixed": (7,),
    "adapmixed-published": (7,),
}
CONTROL = "null-references"
CHOSEN = ("public-only", CONTROL, *OURS, "amin", "amin-published", "adapmixed", "augpe")
UNREAD = ("public-only", CONTROL, "augpe")  # no batches of references
TEXTS, TOKENS = 80, 24
MOST_CALLS = 130_000  # of a cell, when all texts have all tokens
WITH_TOP_K, WITHOUT = 1.2, 1.0  # temperatures
ITERATIONS = (1,)  # of AugPE
SHOWN = 2  # texts of a cell that the result keeps


@dataclass(frozen=True)
class DpTextPlan:
    """The study's settings."""

    epsilons: Sequence[float] = EPSILONS
    batches: Sequence[int] = BATCHES
    top_k: Sequence[int | None] = TOP_K
    methods: Sequence[str] = CHOSEN
    baseline_batches: Sequence[int] | None = None  # else `BASELINE_BATCHES`
    texts: int = TEXTS
    tokens: int = TOKENS
    most_calls: int = MOST_CALLS
    seed: int = 0
    iterations: Sequence[int] = ITERATIONS


@dataclass(frozen=True)
class DpTextCell:
    """A method with its settings. epsilon: None for what spends nothing; top_k: None for the whole
    vocabulary; iterations: of AugPE.
    """

    method: str
    epsilon: float | None
    batch: int
    top_k: int | None
    iterations: int | None = None

    @property
    def temperature(self) -> float:
        return WITHOUT if self.top_k is None else WITH_TOP_K

    def wanted(self, plan: DpTextPlan) -> CorpusRequest:
        return CorpusRequest(
            "invisibleink" if self.method == CONTROL else self.method,
            self.epsilon,
            DELTA,
            self.batch,
            plan.texts,
            plan.tokens,
            self.temperature,
            self.top_k,
            iterations=self.iterations or augpe.ITERATIONS,
        )

    def state(self, plan: DpTextPlan) -> str:
        """Return whether the cell is run: "INF" where no parameters spend so little, "TLE": too
        many calls.
        """
        if self.method == "amin-published" and self.epsilon is not None:
            tokens = min(amin.PRIVATE_TOKENS, plan.tokens)
            rho = rho_for(self.epsilon, DELTA)
            if amin.published_clip(rho, self.batch, WITHOUT, tokens) is None:
                return "INF"
        lanes = 1 if self.method in UNREAD else self.batch + 1
        if self.iterations is not None:
            lanes = 1 + augpe.VARIATIONS * self.iterations
        calls = plan.texts * plan.tokens * lanes
        return "TLE" if calls > plan.most_calls else "run"


REAL = DpTextCell("real texts", None, 0, None)  # references in the place of generated texts


def cells(plan: DpTextPlan) -> list[DpTextCell]:
    """Return all cells of generated texts, in the order in which they are run."""
    with_k = [k for k in plan.top_k if k is not None]
    planned: list[DpTextCell] = []
    for method in plan.methods:
        if method == "public-only":
            planned += [DpTextCell(method, None, 1, k) for k in plan.top_k]
            continue
        for epsilon in plan.epsilons:
            if method == "augpe":
                k = with_k[-1] if with_k else None
                planned += [DpTextCell(method, epsilon, 1, k, n) for n in plan.iterations]
                continue
            if method == CONTROL:  # C / B, and so the candidates, are the same for every batch
                planned += [DpTextCell(method, epsilon, 1, k) for k in with_k]
                continue
            batches = plan.batches
            if method not in OURS:
                batches = plan.baseline_batches or BASELINE_BATCHES[method]
            ks = with_k if method == "invisibleink" else [None]
            planned += [DpTextCell(method, epsilon, batch, k) for batch in batches for k in ks]
    return list(dict.fromkeys(planned))


class Study:
    """The models, the corpus, and what all cells are compared with."""

    def __init__(
        self,
        private: Path,
        public: Path,
        plan: DpTextPlan,
        library: Path | None,
        say: Callable[[str], None],
    ) -> None:
        say("reading")
        tokenizer = Tokenizer.load(private)
        self.plan, self.corpus = plan, corpus(tokenizer, plan.tokens, library)
        say("compiling")
        ends = {i for i in range(tokenizer.vocab_size) if CLOSING in tokenizer.decode([i])}
        self.config, params = load_model(private)
        self.weights = folded(self.config, params)
        self.prompts: Prompts = prompts_for(
            replace(tokenizer, eos_ids=tokenizer.eos_ids | ends),
            QUERY,
            self.config.context,
            plan.tokens,
            plan.tokens,
        )
        self._features = Features(self.config, self.weights, 16, 1 + plan.tokens)
        config, draft = load_model(public)
        context = self.prompts.public
        self._perplexity = metrics.Perplexity(config, draft, context, plan.tokens)
        self.real = Sample(self, self.corpus.real)

    def features(self, tokens: Sequence[list[int]]) -> np.ndarray:
        return self._features.of([self.prompts.begin + text for text in tokens])

    def perplexity(self, tokens: Sequence[list[int]]) -> np.ndarray:
        return self._perplexity.of(tokens)

    def reads(self, cell: DpTextCell) -> int:
        """Return how many texts read the reference that is read most."""
        size = min(cell.batch, len(self.corpus.references))
        return math.ceil(self.plan.texts / (len(self.corpus.references) // size))

    def made(self, cell: DpTextCell, say: Callable[[str], None]) -> tuple[list[Made], float]:
        """Generate the texts of a cell; return them, and the calls for each token that was
        drawn.
        """
        wanted = cell.wanted(self.plan)
        prg = Prg.from_seed(self.plan.seed, f"dp-text {cell}")
        if cell.method == "augpe":
            made, calls = augpe.corpus(
                augpe_for(wanted),
                self.config,
                self.weights,
                self.prompts,
                self.corpus.references,
                self.plan.texts,
                prg,
                say,
            )
        else:
            method = method_for(wanted)
            if cell.method == CONTROL:
                method = without_references(method)
            generator = Generator(method, self.config, self.weights, self.prompts)
            made = []
            for number, batch in enumerate(self.corpus.batches(cell.batch, self.plan.texts)):
                say(f"text {number + 1} of {self.plan.texts}")
                made.append(generator.text(batch, prg))
            calls = generator.calls
        return made, calls / max(1, sum(len(text.tokens) + text.ended for text in made))

    def row(self, cell: DpTextCell, say: Callable[[str], None]) -> dict[str, Any]:
        """Return what is measured of a cell."""
        if cell == REAL:
            return self._real_row()
        facts = {**asdict(cell), "temperature": cell.temperature, "state": cell.state(self.plan)}
        if facts["state"] != "run":
            return facts
        todo = cells(self.plan)
        name = f"cell {todo.index(cell) + 1} of {len(todo)}, {cell.method}, batch {cell.batch}"
        made, calls = self.made(cell, lambda words: say(f"{name}: {words}"))
        texts = [cleandoc(self.prompts.tokenizer.decode(text.tokens)).strip() for text in made]
        reads = {} if cell.method in UNREAD else {"reads": self.reads(cell)}
        return {
            **facts,
            **reads,
            "calls": round(calls, 3),
            "ended": sum(text.ended for text in made),
            **Sample(self, texts).compared(self.real),
            "texts": texts[:SHOWN],
        }

    def _real_row(self) -> dict[str, Any]:
        """Measure as many references as a cell has texts, evenly over all files, in the place of
        generated ones: what to expect at best of samples of this size.
        """
        chosen = [batch[0] for batch in self.corpus.batches(1, self.plan.texts)]
        return {
            "method": REAL.method,
            "epsilon": None,
            "batch": None,
            "top_k": None,
            "state": "run",
            "calls": None,
            **Sample(self, chosen).compared(self.real),
        }


def without_references(method: Method) -> Method:
    """Return the method with nothing but nulls, which need no call of the model."""

    def begin(present: np.ndarray, prg: Prg) -> Next:
        token = method.begin(np.zeros_like(present), prg)
        return lambda public, _: token(public, np.tile(public, (method.batch, 1)))

    return replace(method, begin=begin, reads=False)


class Sample:
    """Texts, and what is measured of them. `empty` ones have no features and no perplexity."""

    def __init__(self, study: Study, texts: Sequence[str]) -> None:
        encode = study.prompts.tokenizer.encode
        self._seed = study.plan.seed
        tokens = [encode(text, goes_on=True)[: study.plan.tokens] for text in texts]
        self.lengths = np.array([len(text) for text in tokens])
        self.empty = int((self.lengths == 0).sum())
        self.features = study.features(tokens)
        self.perplexity = study.perplexity(tokens)
        self.names = np.array([metrics.names(text) for text in texts])

    def compared(self, real: Sample) -> dict[str, Any]:
        """Return each figure with half its interval."""
        usual = np.nanmean(real.perplexity)
        return {
            "mauve": metrics.mauve(self.features, real.features, self._seed),
            "perplexity_gap": metrics.mean(np.abs(self.perplexity - usual)),
            "length": metrics.mean(self.lengths),
            "empty": self.empty,
            "length_distance": metrics.distance(self.lengths, real.lengths),
            "names": metrics.mean(self.names),
        }


def measure(
    private: Path,
    public: Path,
    plan: DpTextPlan,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    done: Sequence[dict[str, Any]] = (),
    ray: str | None = None,
    library: Path | None = None,
) -> dict[str, Any]:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures. library: Python's, in place of this one's.
    """
    planned = all_cells(private, public, plan, library)
    study = planned.load(say)
    result: dict[str, Any] = {
        "plan": asdict(plan),
        "query": QUERY,
        "delta": DELTA,
        "corpus": study.corpus.facts,
        "rows": list(done),
        "real": {
            "length": metrics.mean(study.real.lengths),
            "names": metrics.mean(study.real.names),
            "perplexity": metrics.mean(study.real.perplexity),
        },
        "worth": savings(
            study.config,
            load_model(private)[1],
            study.prompts,
            study.corpus,
            plan.epsilons,
            plan.batches,
            plan.tokens,
            DELTA,
            say,
        ),
    }
    return with_rows(result, planned, say, keep, ray, study)


def all_cells(
    private: Path, public: Path, plan: DpTextPlan, library: Path | None = None
) -> Cells[Study, DpTextCell]:
    """Return the study's cells, that of real texts first."""
    private, public = private.absolute(), public.absolute()
    return Cells(
        [REAL, *cells(plan)],
        load=partial(Study, private, public, plan, library),
        row=Study.row,
        key=lambda cell: cell,
        key_of=cell_of,
        reads=(private, public),
    )


def cell_of(row: dict[str, Any]) -> DpTextCell:
    """Return the cell of a row. Files from before AugPE's iterations were a setting have rows of
    one iteration.
    """
    iterations = row.get("iterations", 1 if row["method"] == "augpe" else None)
    return DpTextCell(row["method"], row["epsilon"], row["batch"] or 0, row["top_k"], iterations)


# ---- the command


def top_ks(text: str) -> list[int | None]:
    """Parse the value of an option: numbers, and `full`."""
    try:
        return [None if part == "full" else int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 10,50,full, found {text!r}") from None


def epsilons(text: str) -> list[float]:
    """Parse the value of an option: numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 1,3,5,10, found {text!r}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each cell is written at once, and the same command goes on."
    parser.add_argument(
        "--epsilon",
        type=epsilons,
        default=list(EPSILONS),
        metavar="E,...",
        help="default: 1,3,5,10",
    )
    parser.add_argument(
        "--batch",
        type=commands.numbers,
        default=list(BATCHES),
        metavar="B,...",
        help="references to a text of InvisibleInk (default: 3,7,15)",
    )
    parser.add_argument(
        "--baseline-batch",
        type=commands.numbers,
        metavar="B,...",
        help="of amin, adapmixed (default: sizes for each)",
    )
    parser.add_argument(
        "--top-k",
        type=top_ks,
        default=list(TOP_K),
        metavar="K,...",
        help="of invisibleink and public-only (default: 10,50,full)",
    )
    parser.add_argument(
        "--methods",
        type=commands.names,
        default=list(CHOSEN),
        metavar="NAME,...",
        help=f"of {', '.join((*METHODS, CONTROL))} (default: without adapmixed-published)",
    )
    commands.add_number(parser, "--texts", TEXTS, "of a cell")
    commands.add_number(parser, "--tokens", TOKENS, "of a text at most", "T")
    commands.add_number(
        parser, "--most-calls", MOST_CALLS, "model calls beyond which a cell is left out (TLE)"
    )
    parser.add_argument(
        "--iterations",
        type=commands.numbers,
        default=list(ITERATIONS),
        metavar="N,...",
        help="of augpe (default: 1; the paper's are 1,3,5,10)",
    )
    commands.add_number(parser, "--seed", 0, "of all draws", "S")
    commands.add_draft_model(parser)
    commands.add_cluster(parser)
    commands.add_plot(parser, "draw MAUVE against model calls into a file")
    commands.add_common(parser)


def plan_of(options: argparse.Namespace) -> DpTextPlan:
    """Return the plan that the options ask for; InputError for what cannot be measured."""
    known = (*METHODS, CONTROL)
    if unknown := set(options.methods) - set(known):
        raise InputError(f"--methods: there is no {min(unknown)!r}; choose from {', '.join(known)}")
    commands.check_range("--texts", options.texts, 2)
    plan = DpTextPlan(
        options.epsilon,
        options.batch,
        options.top_k,
        options.methods,
        options.baseline_batch,
        options.texts,
        options.tokens,
        options.most_calls,
        options.seed,
        options.iterations,
    )
    for cell in cells(plan):  # refuses nonsense before any work
        if cell.state(plan) == "run":
            (augpe_for if cell.method == "augpe" else method_for)(cell.wanted(plan))
    return plan


def command(options: argparse.Namespace) -> None:
    from experiments.dp_text import report

    commands.check_folders(options)
    plan = plan_of(options)
    pair = commands.pair(options)
    result = commands.resumed(options, plan, lambda *how: measure(*pair, plan, *how))
    show_table(report.table(result))
    if options.plot is not None:
        report.plot(result, options.plot)
