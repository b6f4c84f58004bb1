"""Differentially private text: utility against cost, by method.

"InvisibleInk" (Vinod, Pillutla, Thakurta), table 2 and figure 1, on the shipped models and on
docstrings, or on another model and on sentences (`experiments.dp_text.inputs`). Every text comes
from the generator as `spu-llm dp generate` runs it, and ends where a docstring would, at three
quotation marks, or a sentence, at the end of a line. Measured of each cell (method, epsilon, batch,
top-k): MAUVE, perplexity gap under the public model, lengths, names
(`experiments.dp_text.metrics`), next-token evaluations of the model for each token, and the
processor's seconds.

A control, `null-references`: InvisibleInk whose references are all null, so that it is the public
model on the very candidates that epsilon gives (V_k+ grows with it). What a cell gains over that is
from references. Beside it, `worth`: what references say of a real text's tokens, without any
sampling.

Temperatures are the paper's where the plan has none: 1.2 with top-k, 1 without. AugPE generates 7
texts for one in each iteration, and one before. Calls are counted as long as a text lasts, also
where several go through the model together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.cells import Cells, with_rows
from experiments.dp_text import metrics
from experiments.dp_text.candidates import Expansion, counted
from experiments.dp_text.inputs import ORIGINS, corpus
from experiments.dp_text.plan import (
    CONTROL,
    DELTA,
    REAL,
    SHOWN,
    UNREAD,
    DpTextCell,
    DpTextPlan,
    cell_of,
    cells,
)
from experiments.dp_text.utility import savings
from models.hf import load_model
from models.tokenizer import Tokenizer
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.baselines import augpe
from spu_llm.systems.dp_text.corpus import augpe_for, method_for
from spu_llm.systems.dp_text.generator import Generator, Made, together
from spu_llm.systems.dp_text.lanes import Features, folded
from spu_llm.systems.dp_text.methods import Method, Next


@dataclass(frozen=True)
class Written:
    """The texts of a cell. calls: for each token that was drawn; facts: what else was counted while
    they were drawn (processor_s: seconds of this process on all cores, for each token, where not
    all texts went together).
    """

    texts: list[Made]
    calls: float
    facts: dict[str, Any]


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
        tokenizer, origin = Tokenizer.load(private), ORIGINS[plan.corpus]
        self.plan, self.corpus = plan, corpus(tokenizer, plan.tokens, origin, library)
        say("compiling")
        self.config, params = load_model(private)
        self.weights = folded(self.config, params)
        self.prompts = origin.prompts(private, tokenizer, self.config.context, plan.tokens)
        self.vary = origin.variations(private, tokenizer, self.config.context, plan.tokens)
        self._features = Features(self.config, self.weights, 16, 1 + plan.tokens)
        judge = (self.config, self.weights)
        if public != private:
            config, params = load_model(public)
            judge = (config, folded(config, params))
        self._perplexity = metrics.Perplexity(*judge, self.prompts.public, plan.tokens)
        self.real = Sample(self, self.corpus.real)

    def features(self, tokens: Sequence[list[int]]) -> np.ndarray:
        return self._features.of([self.prompts.begin + text for text in tokens])

    def perplexity(self, tokens: Sequence[list[int]]) -> np.ndarray:
        return self._perplexity.of(tokens)

    def reads(self, cell: DpTextCell) -> int:
        """Return how many texts read the reference that is read most."""
        size = min(cell.batch, len(self.corpus.references))
        return math.ceil(self.plan.texts / (len(self.corpus.references) // size))

    def written(self, cell: DpTextCell, say: Callable[[str], None]) -> Written:
        """Generate the texts of a cell."""
        wanted = cell.wanted(self.plan)
        prg = Prg.from_seed(self.plan.seed, f"dp-text {cell}")
        facts: dict[str, Any] = {}
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
                self.vary,
            )
        else:
            method = method_for(wanted)
            expansion = Expansion()
            if cell.has_candidates:
                method = counted(method, expansion)
            if cell.method == CONTROL:
                method = without_references(method)
            at_once = together(method, self.prompts.room, self.plan.texts)
            generator = Generator(method, self.config, self.weights, self.prompts, None, at_once)
            made, spent = [], []
            batches = self.corpus.batches(cell.batch, self.plan.texts)
            for start in range(0, len(batches), at_once):
                some = batches[start : start + at_once]
                say(f"text {start + 1} of {len(batches)}, {len(some)} together")
                before = time.process_time()
                made += generator.texts(some, prg)
                spent.append(time.process_time() - before)
            facts["together"] = at_once
            if drawn := drawn_tokens(made[at_once:]):  # the first texts compile
                facts["processor_s"] = sum(spent[1:]) / drawn
            calls = generator.calls
            if cell.has_candidates:
                facts |= {"clip": method.facts["clip"], **expansion.facts()}
        return Written(made, calls / max(1, drawn_tokens(made)), facts)

    def row(self, cell: DpTextCell, say: Callable[[str], None]) -> dict[str, Any]:
        """Return what is measured of a cell."""
        if cell == REAL:
            return self._real_row()
        facts = {**asdict(cell), "state": cell.state(self.plan)}
        if facts["state"] != "run":
            return facts
        todo = cells(self.plan)
        name = f"cell {todo.index(cell) + 1} of {len(todo)}, {cell.method}, batch {cell.batch}"
        written = self.written(cell, lambda words: say(f"{name}: {words}"))
        made, decode = written.texts, self.prompts.tokenizer.decode
        texts = [cleandoc(decode(text.tokens)).strip() for text in made]
        reads = {} if cell.method in UNREAD else {"reads": self.reads(cell)}
        return {
            **facts,
            **reads,
            "calls": round(written.calls, 3),
            **written.facts,
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


def drawn_tokens(texts: Sequence[Made]) -> int:
    """Return how many tokens were drawn, those that ended texts counted."""
    return sum(len(text.tokens) + text.ended for text in texts)


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
        "query": study.prompts.query,
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
