"""How a split model's utility grows with the tokens that it is tuned on (NOIR's STuning; Q1, Q7,
Fig. 14): without a codebook, under codebooks by mechanism and epsilon, and with LoRA at the
client's ends in place of their weights (Q10).

The learning rate is chosen first, by a short trial of each on texts that are neither tuned on nor
held out: once without a codebook, once under the first one, for all of them, and again for LoRA.
Then each variant is tuned in one go, and measured on held-out windows before, and at the last
doublings of its rounds. Windows to tune on are drawn from all text, so that the tokens seen are the
size of the data, too. Seconds are those that processors spent on this process.

Of Python's standard library. The shipped model was trained on all of it but what is held out here;
a published model may have seen all of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.split import tuning_report
from experiments.split.low_rank import LowRankClient
from experiments.split.study import (
    LENGTH,
    NONE,
    PAPER,
    drawn_codebook,
    drawn_windows,
    library,
    tokens_of,
)
from experiments.split.tuning_report import half, label
from models.family import ModelConfig, Params
from models.hf import load_model
from models.split import Split
from models.tokenizer import Tokenizer
from spu_llm.app.printing import show_table
from spu_llm.attacks.split import check_codebook
from spu_llm.core.errors import InputError
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.systems.split import ltokenizer, vocabulary
from spu_llm.systems.split.attacks import views
from spu_llm.systems.split.boundary import Boundary
from spu_llm.systems.split.ends import client_ends
from spu_llm.systems.split.tuning import Batches, ClientHalf, HostHalf, halves, tune

BATCH, ROUNDS, TRIAL = 16, 1024, 32
LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3)
EPSILONS = (PAPER, 9.0)
WINDOWS, TRIAL_WINDOWS = 64, 32
_DOUBLINGS = 5  # of the tokens, that a curve has points at
_VALIDATED_ONE_IN = 16  # of the files that are not held out

Row = dict[str, Any]


@dataclass(frozen=True)
class TuningPlan:
    """The study's settings. trial: rounds that a learning rate is tried with; clean_rounds: of the
    variants without a codebook, and with LoRA; lora: rank at the client's ends, 0 for none.
    """

    mechanisms: Sequence[str] = ("grr",)
    epsilons: Sequence[float] = EPSILONS
    split: tuple[int, int] = (1, 1)
    rounds: int = ROUNDS
    clean_rounds: int = ROUNDS
    batch: int = BATCH
    learning_rates: Sequence[float] = LEARNING_RATES
    trial: int = TRIAL
    lora: int = 0
    windows: int = WINDOWS
    seed: int = 0


@dataclass(frozen=True)
class Variant:
    """Variant of tuning. mechanism: "none" leaves table and labels; epsilon: of a feature."""

    mechanism: str
    epsilon: float | None
    lora: int = 0

    @property
    def kind(self) -> tuple[bool, int]:
        """Return what decides which learning rate is best."""
        return self.mechanism == NONE, self.lora


@dataclass(frozen=True)
class TuningCell:
    """A trial of a learning rate, on validation windows at its end, or a curve."""

    variant: Variant
    learning_rate: float
    rounds: int
    trial: bool


def variants(plan: TuningPlan) -> list[Variant]:
    """Return what is tuned, in the order in which it is."""
    codebooks = [Variant(m, e) for m in plan.mechanisms for e in plan.epsilons]
    planned = [Variant(NONE, None), *codebooks]
    if plan.lora:
        planned += [replace(one, lora=plan.lora) for one in planned[:2]]
    return planned


def trials(plan: TuningPlan) -> Iterator[TuningCell]:
    """Yield a cell for each learning rate of the first variant of each kind."""
    first: dict[tuple[bool, int], Variant] = {}
    for variant in variants(plan):
        first.setdefault(variant.kind, variant)
    for variant in first.values():
        for rate in plan.learning_rates:
            yield TuningCell(variant, rate, plan.trial, trial=True)


def curves(plan: TuningPlan, rows: Sequence[Row]) -> Iterator[TuningCell]:
    """Yield the curve of each variant, with the learning rate of its kind that was best in the
    trials among these rows.
    """
    tried = [(variant_of(row), row) for row in rows if row["trial"]]
    for variant in variants(plan):
        of_kind = [row for other, row in tried if other.kind == variant.kind]
        best = min(of_kind, key=lambda row: row["points"][-1]["perplexity"][0])
        full = variant.mechanism != NONE and not variant.lora
        rounds = plan.rounds if full else plan.clean_rounds
        yield TuningCell(variant, best["learning_rate"], rounds, trial=False)


def variant_of(row: Row) -> Variant:
    """Return the variant that a row is of."""
    return Variant(row["mechanism"], row["epsilon"], row["lora"])


def key_of(row: Row) -> tuple[Variant, float, bool]:
    return variant_of(row), row["learning_rate"], row["trial"]


def measured_at(rounds: int) -> list[int]:
    """Return the rounds, a power of two, after which a curve has a point: 0, and the last
    doublings.
    """
    return [0, *(rounds >> i for i in reversed(range(_DOUBLINGS + 1)) if rounds >> i)]


# ---- real text


@dataclass(frozen=True)
class Texts:
    """Tokens to tune on, one text after the other, and windows int32 [w, LENGTH + 1] of the files
    that learning rates are chosen by, and of held-out ones. files: numbers of all three.
    """

    tuned: np.ndarray
    validation: np.ndarray
    held_out: np.ndarray
    files: tuple[int, int, int]


def texts(tokenizer: Tokenizer, windows: int) -> Texts:
    """Return the texts of the running interpreter's library."""
    known, held_out = library()
    validation = known[::_VALIDATED_ONE_IN]
    rest = [file for i, file in enumerate(known) if i % _VALIDATED_ONE_IN]
    return Texts(
        tokens_of(tokenizer, rest),
        drawn_windows(tokenizer, validation, TRIAL_WINDOWS),
        drawn_windows(tokenizer, held_out, windows),
        (len(rest), len(validation), len(held_out)),
    )


def without_context(of: Texts, vocab: int) -> Row:
    """Return the utility of a model that knows nothing but how frequent a token is in the text to
    tune on, each counted once more, in the words of `utility`.
    """
    counts = 1 + np.bincount(of.tuned, minlength=vocab)
    log_p, wanted = np.log(counts / counts.sum()), of.held_out[:, 1:]
    return _summary(-log_p[wanted].mean(axis=1), (wanted == counts.argmax()).mean(axis=1))


# ---- one cell


class TuningStudy:
    """The model, the texts, and what all cells share."""

    def __init__(self, model: Path, plan: TuningPlan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.config, self.params = load_model(model)
        Split(*plan.split).check(self.config)
        self.texts = texts(Tokenizer.load(model), plan.windows)
        self._drawn: tuple[Variant, vocabulary.Codebook] | None = None

    def codebook(self, variant: Variant, prg: Prg) -> vocabulary.Codebook | None:
        """Draw a variant's codebook; the last one is kept, since a variant has several cells."""
        if variant.epsilon is None:
            return None
        of = replace(variant, lora=0)
        if self._drawn is None or self._drawn[0] != of:
            drawn = drawn_codebook(self.params, self.config, of.mechanism, variant.epsilon, prg)
            self._drawn = of, drawn
        return self._drawn[1]

    def row(self, cell: TuningCell, say: Callable[[str], None]) -> Row:
        """Tune a cell's ends, and measure utility on the way."""
        plan, config, variant = self.plan, self.config, cell.variant
        name = f"{label(asdict(variant))}, rate {cell.learning_rate:g}"
        say(name)
        prg = Prg.from_seed(plan.seed, f"noir tuning {variant.mechanism} {variant.epsilon}")
        drawn, labels = self.codebook(variant, prg), np.arange(config.vocab_size)
        if drawn is not None:
            labels = ltokenizer.Permutation.draw(len(labels), prg.child("permutation")).forward
        boundary = Boundary(config.width, "float32")
        client, host = self._halves(cell, drawn, labels, boundary, prg)
        # The same batches for all variants, so that their curves differ by what they are of.
        key = Prg.from_seed(plan.seed, "noir tuning").words((KEY_BYTES // 8,)).tobytes()
        batches = Batches(self.texts.tuned, plan.batch, LENGTH, key)
        windows = self.texts.validation if cell.trial else self.texts.held_out
        points, losses, spent, done = [], [], [], 0

        def on_round(number: int, loss: float) -> None:
            say(f"{name}: round {number + 1} of {cell.rounds}, {loss:.2f} nats")

        for rounds in [cell.rounds] if cell.trial else measured_at(cell.rounds):
            started = time.process_time()
            losses += tune(client, host, boundary, batches, range(done, rounds), on_round=on_round)
            spent.append((rounds - done, time.process_time() - started))
            done = rounds
            of_texts = utility(config, client, host, windows, labels, plan.batch)
            points.append({"rounds": rounds, "tokens": rounds * plan.batch * LENGTH, **of_texts})
        # The first rounds compile.
        later, seconds = (sum(x) for x in zip(*(spent[2:] or spent), strict=True))
        return {
            **asdict(variant),
            "learning_rate": cell.learning_rate,
            "trial": cell.trial,
            "kept": None if drawn is None else float(drawn.kept.mean()),
            "points": points,
            "loss": losses[-1],
            "round_s": seconds / later,
        }

    def _halves(
        self,
        cell: TuningCell,
        drawn: vocabulary.Codebook | None,
        labels: np.ndarray,
        boundary: Boundary,
        prg: Prg,
    ) -> tuple[ClientHalf, HostHalf]:
        """Make both halves before the first round."""
        split, lora = Split(*self.plan.split), cell.variant.lora
        codebook = None if drawn is None else drawn.table
        client, host = halves(
            self.params,
            self.config,
            split,
            codebook=codebook,
            labels=labels,
            boundary=boundary,
            learning_rate=cell.learning_rate,
        )
        if lora:
            front, back = client_ends(self.params, self.config, split, codebook)
            drawing = prg.child("lora")
            client = LowRankClient(
                self.config, front, back, labels, cell.learning_rate, lora, drawing
            )
        return client, host


def ends_of(client: ClientHalf) -> tuple[Params, Params]:
    """Return all folded weights of front and back."""
    back = client.back_weights() if isinstance(client, LowRankClient) else client.weights["back"]
    return client.front_weights(), back


def utility(
    config: ModelConfig,
    client: ClientHalf,
    host: HostHalf,
    windows: np.ndarray,
    labels: np.ndarray,
    at_once: int,
) -> Row:
    """Return perplexity and accuracy of the next token on windows [w, n + 1], each with half its
    95 % interval over windows (perplexity's in nats of its logarithm), and the nats of each window.
    `at_once` windows go through the model together: a large vocabulary has large logits.
    """
    front, back = ends_of(client)
    nats, right = [], []
    for at in range(0, len(windows), at_once):
        some = windows[at : at + at_once]
        y = host.middle(views.front_of(front, config, some[:, :-1]))
        logits = np.asarray(views.back_of(back, config, y), np.float64)
        wanted = labels[some[:, 1:]]
        right.append((logits.argmax(axis=-1) == wanted).mean(axis=1))
        logits -= logits.max(axis=-1, keepdims=True)
        of_wanted = np.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
        nats.append((np.log(np.exp(logits).sum(axis=-1)) - of_wanted).mean(axis=1))
    return _summary(np.concatenate(nats), np.concatenate(right))


def _summary(each: np.ndarray, hits: np.ndarray) -> Row:
    """Sum up the nats of each window, and the share of its tokens that are right."""
    return {
        "perplexity": [float(np.exp(each.mean())), half(each)],
        "accuracy": [float(hits.mean()), half(hits)],
        "nats": [round(float(x), 4) for x in each],
    }


# ---- all cells


def measure(
    model: Path,
    plan: TuningPlan,
    say: Callable[[str], None],
    keep: Callable[[Row], None] = lambda result: None,
    done: Sequence[Any] = (),
    ray: str | None = None,
) -> Row:
    """Measure all cells, trials first; `keep` is given the result so far after each. done: rows of
    an earlier run. ray: the address of the cluster that measures.
    """
    say("reading")
    study = TuningStudy(model, plan, say)
    result: Row = {
        "model": model.name,
        "plan": asdict(plan),
        "files": study.texts.files,
        "text": len(study.texts.tuned),
        "without_context": without_context(study.texts, study.config.vocab_size),
        "rows": list(done),
    }
    tried = list(trials(plan))
    result = with_rows(result, all_cells(model, plan, tried), say, keep, ray, study)
    planned = [*tried, *curves(plan, result["rows"])]
    return with_rows(result, all_cells(model, plan, planned), say, keep, ray, study)


def all_cells(
    model: Path, plan: TuningPlan, planned: Sequence[TuningCell]
) -> Cells[TuningStudy, TuningCell]:
    """Return some of the study's cells."""
    return Cells(
        planned,
        load=partial(TuningStudy, model.absolute(), plan),
        row=TuningStudy.row,
        key=lambda cell: (cell.variant, cell.learning_rate, cell.trial),
        key_of=key_of,
        reads=(model.absolute(),),
    )


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Hours for a published model: each trial and each curve is written at once, and the same "
        "command goes on."
    )
    parser.add_argument(
        "--mechanisms",
        type=commands.names,
        metavar="NAME,...",
        default=list(TuningPlan.mechanisms),
        help=f"of codebooks: {', '.join(vocabulary.MECHANISMS)} (default: grr)",
    )
    parser.add_argument(
        "--epsilons",
        type=commands.fractions,
        metavar="E,...",
        default=EPSILONS,
        help="of a feature (default: the paper's 13 / 4096, 9)",
    )
    parser.add_argument(
        "--split",
        default="1,1",
        metavar="F,B",
        help="blocks of the client's front and back (default: %(default)s)",
    )
    commands.add_number(parser, "--rounds", ROUNDS, "of tuning under a codebook, a power of two")
    commands.add_number(parser, "--clean-rounds", ROUNDS, "without one, and with LoRA")
    commands.add_number(parser, "--batch", BATCH, f"texts of {LENGTH} tokens in a round")
    parser.add_argument(
        "--learning-rates",
        type=commands.fractions,
        metavar="R,...",
        default=LEARNING_RATES,
        help="Adam's, that are tried (default: 1e-4,3e-4,1e-3,3e-3)",
    )
    commands.add_number(parser, "--trial", TRIAL, "rounds that a learning rate is tried with")
    commands.add_number(
        parser, "--lora", 0, "also tune LoRA of this rank at the client's ends", "R"
    )
    commands.add_number(
        parser, "--windows", WINDOWS, f"of {LENGTH} tokens, held out, to measure on"
    )
    commands.add_number(parser, "--seed", 0, "of all draws", "S")
    commands.add_plot(parser, "draw perplexity against tokens")
    commands.add_cluster(parser)
    commands.add_common(parser)


def plan_of(options: argparse.Namespace) -> TuningPlan:
    """Return the plan that options name; InputError for what is none."""
    for option, least in (("--batch", 1), ("--trial", 1), ("--lora", 0), ("--windows", 2)):
        commands.check_range(option, getattr(options, option[2:]), least)
    for option, value in (("--rounds", options.rounds), ("--clean-rounds", options.clean_rounds)):
        if value < 2 or value & (value - 1):
            raise InputError(f"{option} must be a power of two, 2 or more, found {value}")
    for rate in options.learning_rates:
        if not 0 < rate <= 1:
            raise InputError(f"--learning-rates must be above 0 and at most 1, found {rate:g}")
    for mechanism in options.mechanisms:
        if mechanism not in vocabulary.MECHANISMS:
            known = ", ".join(vocabulary.MECHANISMS)
            raise InputError(f"--mechanisms: there is no {mechanism!r}; choose from {known}")
        for epsilon in options.epsilons:
            check_codebook(mechanism, epsilon)
    front, back = Split.parse(options.split)
    return TuningPlan(
        options.mechanisms,
        options.epsilons,
        (front, back),
        options.rounds,
        options.clean_rounds,
        options.batch,
        options.learning_rates,
        options.trial,
        options.lora,
        options.windows,
        options.seed,
    )


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    plan, model = plan_of(options), commands.private_model(options)
    result = commands.resumed(options, plan, lambda *how: measure(model, plan, *how))
    show_table(tuning_report.table(result))
    if options.plot is not None:
        tuning_report.plot(result, options.plot)
