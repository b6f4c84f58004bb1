"""What "A Watermark for Black-Box Language Models" (Bahri, Wieting, Alon, Metzler) sketches as
extensions (§3), and the attack by paraphrase with a model that can be asked for one.

    candidates   of the shipped private model: beams, and rewritings of one sample by the shipped
                 public one, beside samples of as many candidates and tokens
    essays       of a chat model: words and stems as units, beside Aaronson's and Kirchenbauer's
                 marks, under edits of words and when the model paraphrases its own text (`essays`)

Candidates' texts, keys, prompts and scores are as in `experiment watermark-drawing`. `shared`: of
the n-grams that a chunk's distinct candidates add, how many are not the first of their kind, so
that they say nothing of who has them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, rows_table
from experiments.watermark import metrics, scores
from experiments.watermark.essays import (
    MARKS,
    PARAPHRASED,
    VERSIONS,
    WRITTEN,
    Essays,
    EssaysPlan,
    Mark,
)
from experiments.watermark.plan import WatermarkPlan
from experiments.watermark.report import around, percent
from experiments.watermark.study import Study, figures
from experiments.watermark.texts import NEVER, NGRAM, UNITS, Author, Lanes, Method, distribution_of
from models.hf import load_folded
from protocols.verification.distribution import Sampling
from spu_llm.app.printing import show_table
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.beams import BeamSampler
from spu_llm.systems.watermark.embedding import Embedder
from spu_llm.systems.watermark.model_sampler import ModelSampler
from spu_llm.systems.watermark.rewriting import Rewriter
from spu_llm.systems.watermark.sampler import Drawn, Sampler
from spu_llm.systems.watermark.selecting import added
from spu_llm.systems.watermark.units import Content

CANDIDATES, ESSAYS = "candidates", "essays"
SAMPLES, BEAMS, REWRITINGS = "samples", "beams", "rewritings of one sample"
TEMPERATURE = 1.0
Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """Source of candidates. share: of blocks that are rewritten."""

    name: str
    m: int
    k: int
    share: float = 0.0

    @property
    def title(self) -> str:
        sizes = f"{self.name}, k = {self.k}, m = {self.m}"
        return f"{sizes}, {self.share:.0%} of blocks" if self.share else sizes

    @property
    def method(self) -> Method:
        return Method("flat", self.m, self.k, history=True)

    @property
    def asked(self) -> int:
        """Return how many tokens the model itself gives for a token of the text."""
        return 1 if self.name == REWRITINGS else self.m


WAYS = (
    Way(SAMPLES, 4, 1),
    Way(BEAMS, 4, 1),
    Way(SAMPLES, 4, 10),
    Way(BEAMS, 4, 10),
    Way(SAMPLES, 16, 20),
    Way(REWRITINGS, 16, 20, 0.5),
    Way(REWRITINGS, 16, 20, 0.8),
)


@dataclass(frozen=True)
class VariantsPlan:
    """The study's settings. texts, tokens: of a way of candidates."""

    texts: int = 24
    tokens: int = 100
    samples: int = 2
    null_keys: int = 6
    seed: int = 0
    essays: EssaysPlan = field(default_factory=EssaysPlan)

    @property
    def of_candidates(self) -> WatermarkPlan:
        return WatermarkPlan(
            self.texts, self.tokens, (TEMPERATURE,), self.samples, self.null_keys, self.seed
        )


# ---- candidates of the shipped model


@dataclass(frozen=True)
class Endless(Sampling):
    """Sampling of texts that do not end: tokens `never` have no probability."""

    never: tuple[int, ...] = ()

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        kept = np.array(logits, np.float64)
        kept[list(self.never)] = NEVER
        return super().distribution(kept)


class Watched:
    """A sampler that keeps what it gave, with how many tokens stood before."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.given: list[tuple[int, list[Drawn]]] = []

    def sample(self, prefix: Content, n: int, max_tokens: int) -> Sequence[Drawn]:
        drawn = list(self._sampler.sample(prefix, n, max_tokens))
        self.given.append((len(prefix), drawn))
        return drawn


class Variants:
    """Models, prompts, and what cells share, each part loaded when its first cell is measured."""

    def __init__(
        self, private: Path, public: Path, chat: Path | None, plan: VariantsPlan, say: Say
    ) -> None:
        self._private, self._public, self._chat = private, public, chat
        self.plan, self.say = plan, say

    @functools.cached_property
    def essays(self) -> Essays:
        assert self._chat is not None
        return Essays(self._chat, self.plan.essays, self.say)

    @functools.cached_property
    def study(self) -> Study:
        return Study(self._private, self._public, self.plan.of_candidates, self.say)

    def row(self, cell: Way | Mark) -> Row:
        if isinstance(cell, Mark):
            return {"part": ESSAYS, **self.essays.row(cell)}
        return {"part": CANDIDATES, **self._candidates(cell)}

    def _source(self, way: Way) -> Sampler:
        sampling = Endless(TEMPERATURE, never=tuple(self.study.never))
        prg = Prg.from_seed(self.plan.seed, f"variants {way}")
        private, public = load_folded(self._private), load_folded(self._public)
        if way.name == BEAMS:
            return BeamSampler(*private, frozenset(), sampling)
        sampler = ModelSampler(*private, frozenset(), sampling, prg.child("samples"))
        if way.name == SAMPLES:
            return sampler
        cheaper = ModelSampler(*public, frozenset(), sampling, prg.child("rewriting"))
        return Rewriter(sampler, cheaper, prg.child("blocks"), share=way.share)

    def _candidates(self, way: Way) -> Row:
        """Write texts of one way; return what is measured of them."""
        study, source, plan = self.study, self._source(way), self.plan
        base = study.base(TEMPERATURE)
        written, authors, distinct, shared, seeds = [], [], [], [], []
        for j, prompt in enumerate(study.prompts):
            self.say(f"{way.title}, text {j + 1}")
            author = Author.of(way.method, plan.seed, f"variants text {j}")
            watched, scheme = Watched(source), way.method.scheme
            embedder = Embedder(
                author.keys, scheme, watched, UNITS, way.m, way.k, author.histories, author.prg
            )
            made = embedder.text(tuple(prompt.tolist()), plan.tokens)
            assert not isinstance(made.content, str)
            written.append(list(made.content))
            authors.append(author)
            distinct.append(float(np.mean([chunk.distinct for chunk in made.chunks])))
            seeds.append(sum(chunk.seeds[0] for chunk in made.chunks) / plan.tokens)
            shared.append(_shared(watched, len(prompt), made.content))
        texts = np.array(written)
        nats, entropy = told_of(study.lanes, study.prompts, texts, study.never)
        again = [study.again(text) for text in texts]
        lengths = [plan.tokens]
        of = scores.scores_of(way.method, "sum", authors, again, lengths, base.nulls, study.vocab)
        bits = np.log(2)
        return {
            **asdict(way),
            "texts": len(texts),
            "distinct": metrics.mean(np.array(distinct)),
            "shared": metrics.mean(np.array(shared)),
            "seeds": metrics.mean(np.array(seeds)),
            "excess_bits": metrics.mean((nats - entropy).mean(axis=1) / bits),
            "unmarked_bits": metrics.mean(base.nats / bits),
            "bits": metrics.mean(nats.mean(axis=1) / bits),
            "evidence": metrics.mean(of[:, -1]),
            **figures(of, base.nulls.scores("sum", plan.tokens), tpr=False),
        }


def told_of(
    lanes: Lanes, prompts: np.ndarray, texts: np.ndarray, never: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the model says of texts [text, token] after their prompts: -log p of each token,
    and the entropy that it would have been drawn with, in nats.
    """
    state, numbers = lanes.begun(prompts), np.arange(len(texts))
    nats, entropy = [], []
    for i, row in enumerate(texts.T):
        next_ = distribution_of(state.logits, TEMPERATURE, never)
        nats.append(-next_.log_p[numbers, row])
        entropy.append(next_.entropy)
        if i + 1 < texts.shape[1]:
            state = lanes.after(state, row)
    return np.array(nats).T, np.array(entropy).T


def _shared(watched: Watched, prompt: int, text: tuple[int, ...]) -> float:
    """Return the share of n-grams that a candidate of the same chunk has, too, but for the first
    that has each.
    """
    every = different = 0
    for before, drawn in watched.given:
        of = added(UNITS, NGRAM, text[: before - prompt], drawn).values()
        every += sum(len(set(units)) for units in of)
        different += len({gram for units in of for gram in units})
    return 1 - different / every


# ---- cells


def cell_of(row: Row) -> Way | Mark:
    kind = Way if row["part"] == CANDIDATES else Mark
    return kind(**{name: row[name] for name in kind.__dataclass_fields__})


def measure(
    models: tuple[Path, Path, Path | None],
    plan: VariantsPlan,
    say: Say,
    keep: Callable[[Row], None] = lambda result: None,
    done: Sequence[Row] = (),
    ray: str | None = None,
) -> Row:
    """Measure all cells; `keep` is given the result so far after each. models: the private, the
    public, and the chat model, without which there are no essays. done: rows of an earlier run.
    ray: the address of the cluster that measures.
    """
    result: Row = {"plan": asdict(plan), "rows": list(done)}
    return with_rows(result, all_cells(models, plan), say, keep, ray)


def all_cells(
    models: tuple[Path, Path, Path | None], plan: VariantsPlan
) -> Cells[Variants, Way | Mark]:
    """Return the study's cells: ways of candidates, and marks of essays."""
    private, public, chat = models[0].absolute(), models[1].absolute(), models[2]
    chat = chat.absolute() if chat else None
    return Cells(
        [*WAYS, *(MARKS if chat else ())],
        load=functools.partial(Variants, private, public, chat, plan),
        row=lambda study, one, say: study.row(one),
        key=lambda one: one,
        key_of=cell_of,
        reads=(private, public, *([chat] if chat else [])),
    )


# ---- the report


def candidates_rows(result: Row) -> list[str]:
    """Return a table of ways to have candidates."""
    columns: list[Column[Row]] = [
        Column("candidates", lambda row: _way(row).title),
        Column("tokens of the model, a token", lambda row: str(_way(row).asked)),
        Column("distinct a chunk", lambda row: f"{row['distinct'][0]:.2f}"),
        Column("n-grams shared, %", lambda row: percent(row["shared"])),
        Column("n-grams that mark, a token", lambda row: f"{row['seeds'][0]:.2f}"),
        Column("AUC, %", lambda row: percent(row["auc"])),
        Column("mean -log10 p", lambda row: "{:.2f} ({:.2f} to {:.2f})".format(*row["evidence"])),
        Column("bits a token", lambda row: "{:.2f} ({:.2f} to {:.2f})".format(*row["bits"])),
        Column("above entropy, bits a token", lambda row: around(row["excess_bits"], 2)),
    ]
    return rows_table(columns, [row for row in result["rows"] if row["part"] == CANDIDATES])


def _way(row: Row) -> Way:
    way = cell_of(row)
    assert isinstance(way, Way)
    return way


def essay_tables(result: Row) -> list[list[str]]:
    """Return tables of essays: how many are found, by how much evidence, what edits keep."""
    rows = [row for row in result["rows"] if row["part"] == ESSAYS]

    def of(name: str, figure: str) -> Callable[[Row], list[float]]:
        return lambda row: list(row["versions"][name][figure])

    def called(name: str) -> Column[Row]:
        value = of(name, "found")
        return Column(name, lambda row: percent(value(row), 0))

    def evidence(name: str) -> Column[Row]:
        value = of(name, "evidence")
        return Column(name, lambda row: "{:.2f} ({:.2f} to {:.2f})".format(*value(row)))

    def auc(name: str) -> Column[Row]:
        value = of(name, "auc")
        return Column(f"AUC, %, {name}", lambda row: percent(value(row)))

    def keeps(name: str, number: int) -> Column[Row]:
        heads = ("words left", "4-grams of it", "stems left")
        return Column(
            f"{name}: {heads[number]}, %",
            lambda row: percent(row["versions"][name]["kept"][number], 0),
        )

    excess: Column[Row] = Column(
        "above entropy, bits a token", lambda row: around(row["excess_bits"], 2)
    )
    false: Column[Row] = Column("unmarked", lambda row: percent(_mean_of(row, "unmarked_found")))
    again: Column[Row] = Column(
        "4-grams that come again, % (unmarked)",
        lambda row: f"{percent(row['repeated'])}; {100 * row['unmarked_repeated'][0]:.1f}",
    )
    edits = [name for name in VERSIONS if name not in (WRITTEN, PARAPHRASED)]
    return [
        rows_table([_marks("found, %"), *map(called, VERSIONS), false, excess, again], rows),
        rows_table(
            [_marks("mean -log10 p"), *map(evidence, VERSIONS), *map(auc, (WRITTEN, PARAPHRASED))],
            rows,
        ),
        rows_table(
            [
                _marks("what is left"),
                *(keeps(PARAPHRASED, i) for i in range(3)),
                *(keeps(name, 2) for name in edits),
            ],
            rows,
        ),
    ]


def _marks(head: str) -> Column[Row]:
    def title(row: Row) -> str:
        mark = cell_of(row)
        assert isinstance(mark, Mark)
        return mark.title

    return Column(head, title)


def _mean_of(row: Row, figure: str) -> list[float]:
    """Return a figure and its bounds, each in the mean over the versions of texts."""
    values = [version[figure] for version in row["versions"].values()]
    return [float(x) for x in np.mean(values, axis=0)]


def table(result: Row) -> str:
    """Return the whole result as Markdown."""
    return "\n\n".join("\n".join(rows) for rows in _tables(result))


def _tables(result: Row) -> list[list[str]]:
    return [rows for rows in (candidates_rows(result), *essay_tables(result)) if rows]


def in_results(result: Row, origin: str) -> list[str]:
    """Return the whole result as paragraphs of its page in docs/results."""
    return [text for rows in _tables(result) for text in ("\n".join(rows), origin)]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each cell is written at once, and the same command goes on."
    parser.add_argument(
        "--chat-model",
        type=Path,
        metavar="DIR",
        help="a model with a chat template, which writes essays and paraphrases them (default: "
        "no essays)",
    )
    commands.add_draft_model(parser)
    commands.add_number(parser, "--texts", VariantsPlan.texts, "of a way of candidates")
    commands.add_number(parser, "--tokens", VariantsPlan.tokens, "of such a text", "T")
    commands.add_number(parser, "--essays", EssaysPlan.texts, "of a mark")
    commands.add_number(parser, "--essay-tokens", EssaysPlan.tokens, "of an essay", "T")
    commands.add_number(parser, "--seed", 0, "of all draws", "S")
    commands.add_cluster(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    for name, least in (("texts", 4), ("tokens", 20), ("essays", 4), ("essay_tokens", 20)):
        commands.check_range(f"--{name.replace('_', '-')}", getattr(options, name), least)
    essays = EssaysPlan(options.essays, options.essay_tokens, seed=options.seed)
    plan = VariantsPlan(options.texts, options.tokens, seed=options.seed, essays=essays)
    models = (*commands.pair(options), options.chat_model)
    result = commands.resumed(options, plan, lambda *how: measure(models, plan, *how))
    show_table(table(result))
