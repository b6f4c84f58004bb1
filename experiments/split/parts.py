"""What each part of NOIR is for (the paper's Q9, Q10, Q12 and Q13): utility and attacks with the
codebook or the permutation left out, with the back tuned alone or without the provider's blocks,
with LoRA in them, and with more of the blocks at the client.

All of one mechanism and epsilon, of the shipped private model and the texts of `experiment noir`.
Also how far a token's row is from its own (Figs 4b and 5).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.common import commands, report
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, rows_table
from experiments.split import report as noir_report
from experiments.split.study import (
    BATCH,
    EVALUATED,
    LENGTH,
    as_dict,
    batches_of,
    corpus,
    drawn_codebook,
    utility,
)
from models.hf import load_model
from models.split import Split
from models.tokenizer import Tokenizer
from spu_llm.app.printing import show_table
from spu_llm.attacks import split as attacks
from spu_llm.attacks.request import AttackConfig
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.split import ltokenizer, vocabulary
from spu_llm.systems.split.attacks import suite, views
from spu_llm.systems.split.attacks.own_codebooks import Drawing
from spu_llm.systems.split.boundary import Boundary
from spu_llm.systems.split.ends import table_of
from spu_llm.systems.split.modes import BACK, CODEBOOK, ENDS, PERMUTATION
from spu_llm.systems.split.tuning import HostHalf, halves, tune

NOIR, CLEAN, UNTOUCHED = "NOIR", "neither of the two", "untouched"
EPSILON, MECHANISM, ROUNDS, TEXTS = 9.0, "grr", 200, 8
LEARNING_RATE, RANK = 1e-3, 8
ATTACKS = ("a1", "a2", "a4", "a8", "a10")


@dataclass(frozen=True)
class PartsPlan:
    """The study's settings. epsilon: of a feature."""

    mechanism: str = MECHANISM
    epsilon: float = EPSILON
    rounds: int = ROUNDS
    learning_rate: float = LEARNING_RATE
    attacks: Sequence[str] = ATTACKS
    texts: int = TEXTS
    seed: int = 0


@dataclass(frozen=True)
class PartsCell:
    """One variant. leave_out: parts of NOIR that are left out; tuned: "ends" or "back"; middle:
    whether the provider's blocks are there; lora: rank of what it tunes in them; attacked: whether
    attacks are run, which know the split of the first cell.
    """

    name: str
    leave_out: tuple[str, ...] = ()
    tuned: str = ENDS
    middle: bool = True
    lora: int = 0
    split: Split = Split(1, 1)
    tunes: bool = True
    attacked: bool = False


CELLS = (
    PartsCell(UNTOUCHED, (CODEBOOK, PERMUTATION), tunes=False, attacked=True),
    PartsCell(CLEAN, (CODEBOOK, PERMUTATION), attacked=True),
    PartsCell("codebook alone", (PERMUTATION,), attacked=True),
    PartsCell("permutation alone", (CODEBOOK,), attacked=True),
    PartsCell(NOIR, attacked=True),
    PartsCell("NOIR, back tuned alone", tuned=BACK, attacked=True),
    PartsCell("NOIR, without the provider's blocks", middle=False),
    PartsCell(f"NOIR, LoRA of rank {RANK} at the provider", lora=RANK),
    PartsCell("NOIR, 1 block in front, 2 behind", split=Split(1, 2)),
    PartsCell("NOIR, 2 blocks in front, 1 behind", split=Split(2, 1)),
)


# ---- one cell


class PartsStudy:
    """The model, the texts, and what all cells share."""

    def __init__(self, model: Path, plan: PartsPlan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.config, self.params = load_model(model)
        self.corpus = corpus(Tokenizer.load(model))
        self.attacker = attacks.Attacker(
            AttackConfig(model, plan.texts, plan.seed, say, tuple(plan.attacks), CELLS[0].split)
        )

    def row(self, cell: PartsCell, say: Callable[[str], None]) -> dict[str, Any]:
        """Tune a cell's ends; measure utility and attacks."""
        plan, config = self.plan, self.config
        # The same codebook, permutation and batches in all cells that have them.
        prg = Prg.from_seed(plan.seed, f"noir parts {plan.mechanism} {plan.epsilon}")
        codebook, distances = None, None
        if CODEBOOK not in cell.leave_out:
            drawn = drawn_codebook(self.params, config, plan.mechanism, plan.epsilon, prg)
            codebook, distances = drawn.table, distances_of(table_of(self.params, config), drawn)
        tau = ltokenizer.Permutation.draw(config.vocab_size, prg.child("permutation"))
        hidden = PERMUTATION not in cell.leave_out
        labels = tau.forward if hidden else np.arange(config.vocab_size)
        boundary = Boundary(config.width, "float32")
        client, host = halves(
            self.params,
            config,
            cell.split,
            codebook=codebook,
            labels=labels,
            boundary=boundary,
            learning_rate=plan.learning_rate,
            rank=cell.lora,
            tuned=cell.tuned,
        )
        if not cell.middle:
            host = HostHalf(config, [], boundary, [], plan.learning_rate)
        rounds = plan.rounds if cell.tunes else 0

        def on_round(number: int, loss: float) -> None:
            say(f"{cell.name}: round {number + 1} of {rounds}, {loss:.2f} nats")

        batches = batches_of(self.corpus, prg)
        losses = tune(client, host, boundary, batches, range(rounds), on_round=on_round)
        front, back = client.front_weights(), client.weights["back"]
        x = views.front_of(front, config, jnp.asarray(self.corpus.evaluated[:, :-1]))
        outcomes = []
        if cell.attacked:
            drawing = Drawing(plan.mechanism, plan.epsilon * config.width)
            seen = attacks.Client(
                front, back, labels if hidden else None, drawing if codebook is not None else None
            )
            outcomes = [as_dict(o) for o in self.attacker.outcomes(cell.name, seen, plan.attacks)]
        return {
            **asdict(cell),
            "distances": distances,
            "loss": losses[-1] if losses else None,
            **utility(config, x, host.middle, back, self.corpus.evaluated, labels),
            "outcomes": outcomes,
        }


def distances_of(table: np.ndarray, drawn: vocabulary.Codebook) -> dict[str, float]:
    """Measure, in the mean over tokens, how far a token's row of a codebook is from its own: the
    features that are its own, the L1 norm, that of a table drawn at random from the columns, the
    angle in degrees, and that to another token's row.
    """
    distortion = vocabulary.observed_distortion(table, drawn)
    shifted = np.roll(table, 1, axis=0)
    return {
        **distortion._asdict(),
        "angle": _angle(table, drawn.table),
        "angle_to_another": _angle(table, shifted),
    }


def _angle(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    cosine = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))).mean())


def measure(
    model: Path,
    plan: PartsPlan,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    done: Sequence[Any] = (),
    ray: str | None = None,
) -> dict[str, Any]:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: dict[str, Any] = {"plan": asdict(plan), "rows": list(done)}
    return with_rows(result, all_cells(model, plan), say, keep, ray)


def all_cells(model: Path, plan: PartsPlan) -> Cells[PartsStudy, PartsCell]:
    """Return the study's cells."""
    return Cells(
        CELLS,
        load=partial(PartsStudy, model.absolute(), plan),
        row=PartsStudy.row,
        key=lambda cell: cell.name,
        key_of=lambda row: row["name"],
        reads=(model.absolute(),),
    )


# ---- the report


def circumstances(result: dict[str, Any]) -> str:
    """Say what all cells share."""
    plan = result["plan"]
    text = (
        f"{plan['mechanism']}, ε / m = {plan['epsilon']:.3g}; {plan['rounds']} rounds of tuning, "
        f"{plan['rounds'] * BATCH * LENGTH:,} tokens, learning rate {plan['learning_rate']:g}; "
        f"perplexity and accuracy of {EVALUATED} held-out windows of {LENGTH} tokens; "
        f"{plan['texts']} texts attacked. 95 % intervals (±)."
    )
    of = next((row["distances"] for row in result["rows"] if row["distances"]), None)
    if of is not None:
        text += (
            f" Of a token's features {report.three(of['kept'])} are its own; its row's L1 norm "
            f"from its own is {report.three(of['l1'])}, where columns drawn at random have "
            f"{report.three(of['resampled'])}, and its angle {of['angle']:.1f} degrees, where "
            f"another token's row has {of['angle_to_another']:.1f}."
        )
    return text


def rows(result: dict[str, Any]) -> list[str]:
    """Return a table of all cells' utility."""
    columns: list[Column[dict[str, Any]]] = [
        Column("what", lambda row: row["name"]),
        Column("perplexity", noir_report.perplexity),
        Column("next token right", noir_report.accuracy),
    ]
    return rows_table(columns, result["rows"])


def attack_rows(result: dict[str, Any]) -> list[str]:
    """Return a table of what attacks recover, in per cent."""
    return noir_report.outcomes_table(
        "%", [(row["name"], row["outcomes"]) for row in result["rows"] if row["outcomes"]]
    )


def table(result: dict[str, Any]) -> str:
    """Return the whole result as Markdown."""
    return "\n".join([circumstances(result), "", *rows(result), "", *attack_rows(result)])


def in_results(result: dict[str, Any], origin: str) -> list[str]:
    """Return the whole result as paragraphs of its page in docs/results."""
    tables = "\n".join(rows(result)), "\n".join(attack_rows(result))
    return [circumstances(result), tables[0], origin, tables[1], origin]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Half an hour: each cell is written at once, and the same command goes on."
    parser.add_argument(
        "--mechanism",
        choices=vocabulary.MECHANISMS,
        default=MECHANISM,
        help="of the codebook (default: %(default)s)",
    )
    parser.add_argument(
        "--epsilon",
        type=float,
        metavar="E",
        default=EPSILON,
        help="of a feature (default: %(default)g)",
    )
    commands.add_number(parser, "--rounds", ROUNDS, f"of tuning, {BATCH} x {LENGTH} tokens each")
    parser.add_argument(
        "--learning-rate",
        type=float,
        metavar="R",
        default=LEARNING_RATE,
        help="Adam's (default: %(default)g)",
    )
    parser.add_argument(
        "--attacks",
        type=commands.names,
        metavar="NAME,...",
        default=list(ATTACKS),
        help=f"of {', '.join(suite.ATTACKS)} (default: {','.join(ATTACKS)})",
    )
    commands.add_number(parser, "--texts", TEXTS, "that are attacked")
    commands.add_number(parser, "--seed", 0, "of all draws but LoRA's", "S")
    commands.add_cluster(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--texts", options.texts, 4)
    commands.check_range("--rounds", options.rounds, 1)
    if unknown := set(options.attacks) - set(suite.ATTACKS):
        raise InputError(
            f"--attacks: there is no {min(unknown)!r}; choose from {', '.join(suite.ATTACKS)}"
        )
    attacks.check_codebook(options.mechanism, options.epsilon)
    if not 0 < options.learning_rate <= 1:
        raise InputError(
            f"--learning-rate must be above 0 and at most 1, found {options.learning_rate:g}"
        )
    plan = PartsPlan(
        options.mechanism,
        options.epsilon,
        options.rounds,
        options.learning_rate,
        options.attacks,
        options.texts,
        options.seed,
    )
    model = commands.private_model(options)
    result = commands.resumed(options, plan, lambda *how: measure(model, plan, *how))
    show_table(table(result))
