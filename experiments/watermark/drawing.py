"""How a watermark's candidates are best drawn: what "A Watermark for Black-Box Language Models"
(Bahri, Wieting, Alon, Metzler) leaves open, since independent ones are often alike.

    independent  m candidates of k tokens each, as published
    spread       they share their draws, so that fewer are alike (`ModelSampler`)
    fitted m     a chunk has twice as many as were distinct in the chunk before it, within bounds
    fitted k     a chunk ends once so many of its m candidates are distinct, after k tokens at most

All keep the distribution of the model. m of a chunk follows from the chunks before. A chunk's end
follows from what all of its candidates are up to there: a stopping time, after which any of them
goes on by the model's distribution; and which one is chosen depends on numbers that nothing before
depends on.

Texts, keys, prompts and scores are as in `experiment watermark`, with a history. A text has the
same key whatever the way, so that ways are compared prompt by prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, rows_table
from experiments.watermark import metrics, scores
from experiments.watermark.plan import WatermarkPlan, add_plan, plan_of
from experiments.watermark.report import around, percent
from experiments.watermark.study import Study, figures, unpacked
from experiments.watermark.texts import UNITS, Author, Method, State, distribution_of, draws, tail
from spu_llm.app.printing import show_table
from spu_llm.systems.watermark.model_sampler import spread_points
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.selecting import Chooser

TOKENS, LENGTHS = 100, (25, 100)
INDEPENDENT, SPREAD, FITTED_M, FITTED_K = "independent", "spread", "fitted m", "fitted k"

Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to draw candidates. k: tokens of a candidate, at most. m: candidates, of `fitted m` in
    the first chunk and `most` at most. distinct: of `fitted k`.
    """

    name: str
    m: int
    k: int = 1
    most: int = 0
    distinct: int = 0

    @property
    def title(self) -> str:
        sizes = f"k = {self.k}, m = {self.m}"
        if self.name == FITTED_M:
            sizes = f"k = {self.k}, m from 2 to {self.most}"
        if self.name == FITTED_K:
            sizes = f"k up to {self.k}, {self.distinct} distinct of m = {self.m}"
        return f"{self.name}, {sizes}"


def _plain(m: int, k: int = 1) -> Way:
    return Way(INDEPENDENT, m, k)


WAYS = (
    _plain(4),
    Way(SPREAD, 4),
    _plain(8),
    _plain(16),
    Way(SPREAD, 16),
    _plain(32),
    Way(FITTED_M, 8, most=16),
    Way(FITTED_M, 8, most=64),
    _plain(4, 10),
    Way(SPREAD, 4, 10),
    Way(FITTED_K, 4, 10, distinct=2),
    Way(FITTED_K, 4, 10, distinct=4),
)


# ---- texts


class Model(Protocol):
    """A model that continues many texts, as `texts.Lanes` does."""

    def begun(self, prompts: np.ndarray) -> State: ...

    def after(self, state: State, tokens: np.ndarray) -> State: ...

    def picked(self, state: State, lanes: np.ndarray) -> State: ...


class Told(NamedTuple):
    """A text, what the model's distribution says of its tokens, and what it took."""

    tokens: list[int]
    nats: list[float]
    entropy: list[float]
    asked: int  # tokens of all candidates
    distinct: list[int]  # candidates, chunk by chunk


def write(
    way: Way,
    author: Author,
    model: Model,
    prompt: np.ndarray,
    count: int,
    temperature: float,
    never: Sequence[int],
) -> Told:
    """Write `count` tokens, or what the last chunk has more, after the prompt [token]."""
    state, told = model.begun(prompt[None]), Told([], [], [], 0, [])
    m = way.m
    while len(told.tokens) < count:
        made, nats, entropy, wide = _candidates(way, m, author, model, state, temperature, never)
        chooser = Chooser(author.keys, _method(way).scheme, UNITS, m, author.histories, author.prg)
        drawn = [Drawn(tuple(row), False) for row in made.tolist()]
        winner, chunk, _ = chooser.chosen(drawn, tail(tuple(told.tokens)))
        lane = drawn.index(winner)
        state = wide if made.shape[1] == 1 else model.picked(wide, np.array([lane]))
        state = model.after(state, made[lane, -1:])
        told.tokens.extend(made[lane].tolist())
        told.nats.extend(nats[lane])
        told.entropy.extend(entropy[lane])
        told.distinct.append(chunk.distinct)
        told = told._replace(asked=told.asked + made.size)
        if way.name == FITTED_M:
            m = min(max(2, 2 * chunk.distinct), way.most)
    return told


def _method(way: Way) -> Method:
    return Method("flat", way.m, way.k, history=True)


def _candidates(
    way: Way,
    m: int,
    author: Author,
    model: Model,
    state: State,
    temperature: float,
    never: Sequence[int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, State]:
    """Draw m candidates, int [m, k]; return them, -log p of their tokens and the distribution's
    entropy, both float64 [m, k], and the state before the last token, of one lane while that is the
    first one.
    """
    made = np.zeros((m, 0), int)
    nats, entropy = np.zeros((m, 0)), np.zeros((m, 0))
    while True:
        distribution = distribution_of(state.logits, temperature, never)
        lanes = np.arange(m) if len(distribution.p) == m > 1 else np.zeros(m, int)
        row = _drawn(way, distribution.p, lanes, made, author)
        nats = np.column_stack([nats, -distribution.log_p[lanes, row]])
        entropy = np.column_stack([entropy, distribution.entropy[lanes]])
        made = np.column_stack([made, row])
        if made.shape[1] == way.k or _enough(way, made):
            return made, nats, entropy, state
        if made.shape[1] == 1:
            state = model.picked(state, lanes)
        state = model.after(state, row)


def _drawn(
    way: Way, p: np.ndarray, lanes: np.ndarray, made: np.ndarray, author: Author
) -> np.ndarray:
    """Draw the next token of every candidate, by the distribution of its lane."""
    points = author.prg.uniform((len(lanes),))
    if way.name == SPREAD:
        alike = np.unique(made, axis=0, return_inverse=True)[1] if made.size else lanes
        points = spread_points(author.prg, alike.reshape(-1))
    if not lanes.any():
        return np.array(draws(p[0], points))
    return np.array([draws(p[i], points[i : i + 1])[0] for i in lanes])


def _enough(way: Way, made: np.ndarray) -> bool:
    return way.name == FITTED_K and len(np.unique(made, axis=0)) >= way.distinct


# ---- cells


def cell(study: Study, way: Way, temperature: float) -> Row:
    """Write texts of one way at one temperature; return what is measured of them."""
    base, plan = study.base(temperature), study.plan
    texts, again, authors = [], [], []
    for j, prompt in enumerate(study.prompts):
        study.say(f"temperature {temperature}: {way.title}, text {j + 1}")
        author = Author.of(_method(way), plan.seed, f"{temperature} drawing text {j}")
        told = write(way, author, study.lanes, prompt, plan.tokens, temperature, study.never)
        texts.append(told)
        authors.append(author)
        again.append(study.again(told.tokens[: plan.tokens]))
    lengths = [n for n in LENGTHS if n <= plan.tokens] or [plan.tokens]
    of = scores.scores_of(_method(way), "sum", authors, again, lengths, base.nulls, study.vocab)
    excess = [np.mean(t.nats) - np.mean(t.entropy) for t in texts]
    return {
        "temperature": temperature,
        **asdict(way),
        "texts": len(texts),
        "asked": metrics.mean(np.array([t.asked / len(t.tokens) for t in texts])),
        "tokens_a_chunk": metrics.mean(np.array([len(t.tokens) / len(t.distinct) for t in texts])),
        "distinct_a_chunk": metrics.mean(np.array([np.mean(t.distinct) for t in texts])),
        "bits": metrics.mean(np.array([np.mean(t.entropy) for t in texts]) / np.log(2)),
        "excess_bits": metrics.mean(np.array(excess) / np.log(2)),
        "by_length": {
            str(n): figures(of[:, [i]], base.nulls.scores("sum", n)) for i, n in enumerate(lengths)
        },
        "scores": " ".join(f"{score:.4g}" for score in of[:, -1]),
    }


def way_of(row: Row) -> Way:
    return Way(**{name: row[name] for name in asdict(WAYS[0])})


def measure(
    private: Path,
    public: Path,
    plan: WatermarkPlan,
    say: Callable[[str], None],
    keep: Callable[[Row], None] = lambda result: None,
    done: Sequence[Row] = (),
    ray: str | None = None,
) -> Row:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: Row = {"plan": asdict(plan), "rows": list(done)}
    return with_rows(result, all_cells(private, public, plan), say, keep, ray)


def all_cells(private: Path, public: Path, plan: WatermarkPlan) -> Cells[Study, tuple[float, Way]]:
    """Return the study's cells: temperature and way."""
    private, public = private.absolute(), public.absolute()
    return Cells(
        [(temperature, way) for temperature in plan.temperatures for way in WAYS],
        load=partial(study_of, private, public, plan),
        row=lambda study, one, say: cell(study, one[1], one[0]),
        key=lambda one: one,
        key_of=lambda row: (row["temperature"], way_of(row)),
        reads=(private, public),
    )


def study_of(private: Path, public: Path, plan: WatermarkPlan, say: Callable[[str], None]) -> Study:
    """Return what all cells share, with room for the last chunk of a text, which may have more."""
    room = plan.tokens + max(way.k for way in WAYS)
    study = Study(private, public, replace(plan, tokens=room), say)
    study.plan = plan
    return study


# ---- the report


def table(result: Row) -> str:
    """Return a table of all ways, and how much more evidence a text has than by independent
    candidates.
    """

    def at(place: int, figure: str) -> Callable[[Row], Any]:
        return lambda row: list(row["by_length"].values())[place][figure]

    first, last, partly = at(0, "auc"), at(-1, "auc"), at(-1, "pauc")
    columns: list[Column[Row]] = [
        Column("candidates", lambda row: way_of(row).title),
        Column("temperature", lambda row: f"{row['temperature']:g}"),
        Column("tokens asked for, a token", lambda row: f"{row['asked'][0]:.1f}"),
        Column("tokens a chunk", lambda row: f"{row['tokens_a_chunk'][0]:.2f}"),
        Column("distinct a chunk", lambda row: f"{row['distinct_a_chunk'][0]:.2f}"),
        Column("AUC, % at 25 tokens", lambda row: f"{100 * first(row)[0]:.1f}"),
        Column("at 100", lambda row: percent(last(row))),
        Column("pAUC, %, at 100", lambda row: percent(partly(row))),
        Column(
            "mean -log10 p at 100",
            lambda row: "{:.2f} ({:.2f} to {:.2f})".format(*metrics.mean(unpacked(row["scores"]))),
        ),
        Column("more than as many independent ones", lambda row: _more(result, row)),
        Column("nats above entropy, in bits a token", lambda row: around(row["excess_bits"], 3)),
    ]
    return "\n".join(rows_table(columns, result["rows"]))


def _more(result: Row, row: Row) -> str:
    """Write how much more evidence a text has than by independent candidates."""
    plain = _independent(result, row)
    if plain is None or way_of(row).name == INDEPENDENT:
        return "–"
    return around(metrics.mean(unpacked(row["scores"]) - plain), 2)


def _independent(result: Row, row: Row) -> np.ndarray | None:
    """Return -log10 p [text] of independent candidates of as many tokens each that ask for as many
    in all: between the values of two numbers m by the logarithm, or the values of the nearest m.
    """
    plain = {
        other["m"]: unpacked(other["scores"])
        for other in result["rows"]
        if other["temperature"] == row["temperature"]
        and other["k"] == row["k"]
        and other["name"] == INDEPENDENT
    }
    if not plain:
        return None
    sizes = sorted(plain)
    at = np.interp(np.log(row["asked"][0]), np.log(sizes), np.arange(len(sizes)))
    low, high = sizes[int(np.floor(at))], sizes[int(np.ceil(at))]
    share = at - np.floor(at)
    return np.asarray((1 - share) * plain[low] + share * plain[high])


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each cell is written at once, and the same command goes on."
    add_plan(parser, "of a way", TOKENS)
    commands.add_cluster(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    plan = plan_of(options, 20)
    pair = commands.pair(options)
    result = commands.resumed(options, plan, lambda *how: measure(*pair, plan, *how))
    show_table(table(result))
