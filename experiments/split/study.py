"""What NOIR's secret codebook costs in utility, and what it keeps from the host: by mechanism and
epsilon, before and after tuning, beside tuning without protection, the untouched model, and noise
on embeddings (T2T, SnD).

All of the shipped private model, split, and real text: the standard library's source. Tuning reads
the files that the model was trained on; perplexity, next-token accuracy and what attacks recover
are of held-out files. Epsilon is given per feature, as eps / m: the paper's is 13 / 4096.

Attacks are the suite of `spu-llm attack noir` on what the host receives: rows of texts that begin
as held-out ones and go on as the model says, and rows and gradients of a round of tuning after the
last, on other held-out texts.
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

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from models.family import ModelConfig, Params
from models.hf import load_model
from models.split import Split
from models.tokenizer import Tokenizer
from models.training.corpus import CorpusFile, list_files, read_text
from spu_llm.app.printing import show_table
from spu_llm.attacks import split
from spu_llm.attacks.request import AttackConfig
from spu_llm.core.errors import InputError
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.systems.outcome import AttackOutcome
from spu_llm.systems.split import ltokenizer, vocabulary
from spu_llm.systems.split.attacks import suite, views
from spu_llm.systems.split.attacks.own_codebooks import Drawing
from spu_llm.systems.split.baselines import snd, t2t
from spu_llm.systems.split.baselines.noise import NOISES
from spu_llm.systems.split.boundary import Boundary
from spu_llm.systems.split.ends import client_ends, table_of
from spu_llm.systems.split.tuning import Batches, halves, tune

SPLIT = Split(1, 1)
PAPER = 13 / 4096  # epsilon of a feature
EPSILONS = (PAPER, 6.0, 9.0)
NONE = "none"
BASELINES = ("t2t", "snd spherical", "snd published")
_FITTED = 128  # public texts of SnD's denoiser
ROUNDS, BATCH, LENGTH, LEARNING_RATE = 300, 16, 64, 1e-3
TEXTS, EVALUATED = 20, 64  # attacked texts, and windows that perplexity is of


@dataclass(frozen=True)
class NoirPlan:
    """The study's settings. fully: mechanisms that all attacks are run on, not `attacks` alone."""

    mechanisms: Sequence[str] = (*vocabulary.MECHANISMS, *BASELINES)
    epsilons: Sequence[float] = EPSILONS
    rounds: int = ROUNDS
    attacks: Sequence[str] = tuple(suite.ATTACKS)
    texts: int = TEXTS
    seed: int = 0
    fully: Sequence[str] = ()

    def attacks_on(self, mechanism: str) -> tuple[str, ...]:
        return tuple(suite.ATTACKS if mechanism in self.fully else self.attacks)


@dataclass(frozen=True)
class NoirCell:
    """A mechanism at one epsilon. mechanism: "none" leaves table and labels. epsilon: of a feature;
    of the baselines, whose d_chi privacy is another definition, the eta that has the same number in
    all, epsilon m, as the paper compares them. rounds: of tuning.
    """

    mechanism: str
    epsilon: float | None
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.mechanism} {self.epsilon} {self.rounds}"


def cells(plan: NoirPlan) -> list[NoirCell]:
    """Return all cells in the order in which they are run: without tuning, too, where that says
    something.
    """
    planned = [NoirCell(NONE, None, 0), NoirCell(NONE, None, plan.rounds)]
    for mechanism in plan.mechanisms:
        for epsilon in plan.epsilons:
            tunings = (0,) if mechanism in BASELINES else (0, plan.rounds)
            planned += [NoirCell(mechanism, epsilon, rounds) for rounds in tunings]
    return planned


# ---- real text


@dataclass(frozen=True)
class Corpus:
    """Tokens of the files that the model was trained on, one after the other, and windows of
    held-out files, drawn from all of them alike.
    """

    known: np.ndarray
    evaluated: np.ndarray  # int32 [windows, LENGTH + 1]
    files: tuple[int, int]


def corpus(tokenizer: Tokenizer) -> Corpus:
    """Return the texts of the running interpreter's library."""
    known, held_out = library()
    tokens = tokens_of(tokenizer, known)
    chosen = drawn_windows(tokenizer, held_out, EVALUATED)
    return Corpus(tokens, chosen, (len(known), len(held_out)))


def library() -> tuple[list[CorpusFile], list[CorpusFile]]:
    """Return the files that the shipped models were trained on, and those that were held out."""
    files = list_files()
    return [f for f in files if not f.held_out], [f for f in files if f.held_out]


def tokens_of(tokenizer: Tokenizer, files: Sequence[CorpusFile]) -> np.ndarray:
    """Return the tokens of files, one after the other: int32."""
    return np.array([t for file in files for t in tokenizer.encode(read_text(file))], np.int32)


def drawn_windows(tokenizer: Tokenizer, files: Sequence[CorpusFile], count: int) -> np.ndarray:
    """Draw windows of all files alike, int32 [window, LENGTH + 1]: the same ones at every call."""
    windows: list[list[int]] = []
    for file in files:
        tokens = tokenizer.encode(read_text(file))
        starts = range(0, len(tokens) - LENGTH, LENGTH + 1)
        windows += [tokens[at : at + LENGTH + 1] for at in starts]
    order = np.random.default_rng(0).permutation(len(windows))[:count]
    return np.array([windows[i] for i in order], np.int32)


# ---- one cell


class Study:
    """The model, the text, and what all cells share."""

    def __init__(self, model: Path, plan: NoirPlan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.tokenizer = Tokenizer.load(model)
        self.config, self.params = load_model(model)
        self.corpus = corpus(self.tokenizer)
        self.attacker = split.Attacker(
            AttackConfig(model, plan.texts, plan.seed, say, tuple(plan.attacks), SPLIT)
        )
        self.public = self.attacker.setting.public

    def row(self, cell: NoirCell, say: Callable[[str], None]) -> dict[str, Any]:
        """Measure utility and attacks of a cell."""
        if cell.mechanism in BASELINES:
            return self.baseline(cell)
        config, vocab = self.config, self.config.vocab_size
        prg = Prg.from_seed(self.plan.seed, f"noir {cell.mechanism} {cell.epsilon}")
        codebook, labels, kept = None, np.arange(vocab), None
        if cell.epsilon is not None:
            drawn = drawn_codebook(self.params, config, cell.mechanism, cell.epsilon, prg)
            codebook, kept = drawn.table, float(drawn.kept.mean())
            labels = ltokenizer.Permutation.draw(vocab, prg.child("permutation")).forward
        boundary = Boundary(config.width, "float32")
        client, host = halves(
            self.params,
            config,
            SPLIT,
            codebook=codebook,
            labels=labels,
            boundary=boundary,
            learning_rate=LEARNING_RATE,
        )

        def on_round(number: int, loss: float) -> None:
            say(f"{cell.name}: round {number + 1} of {cell.rounds}, {loss:.2f} nats")

        batches = batches_of(self.corpus, prg)
        losses = tune(client, host, boundary, batches, range(cell.rounds), on_round=on_round)
        front, back = client.front_weights(), client.weights["back"]
        facts = {
            **asdict(cell),
            "kept": kept,
            "loss": losses[-1] if losses else None,
            **utility(
                config,
                _front_of(front, config, self.corpus.evaluated[:, :-1]),
                host.middle,
                back,
                self.corpus.evaluated,
                labels,
            ),
        }
        outcomes = []
        if cell.rounds or cell.mechanism == NONE:  # nobody generates with ends that are not tuned
            seen = split.Client(front, back, None)
            if cell.epsilon is not None:
                drawing = Drawing(cell.mechanism, cell.epsilon * config.width)
                seen = split.Client(front, back, labels, drawing)
            names = self.plan.attacks_on(cell.mechanism)
            outcomes = [as_dict(o) for o in self.attacker.outcomes(cell.name, seen, names)]
        return {**facts, "outcomes": outcomes}

    def inverters(self) -> dict[str, Any] | None:
        """Return what the inverters of A1, A3 and A4 find in public text without a codebook; None
        when the plan has none of the three.
        """
        if not {"a1", "a3", "a4"} & set(self.plan.attacks):
            return None
        trained = self.attacker.inverters
        steps = {"base_steps": trained.base.steps, "corrector_steps": trained.corrector.steps}
        return {**trained.on_public._asdict(), **steps}

    def baseline(self, cell: NoirCell) -> dict[str, Any]:
        """Measure noise on embeddings instead of a codebook; ends and middle are the public
        ones.
        """
        assert cell.epsilon is not None
        config, (front, _, back) = self.config, self.public.parts
        eta, table = cell.epsilon * config.width, table_of(self.params, config)
        prg = Prg.from_seed(self.plan.seed, f"noir {cell.mechanism} {cell.epsilon}")
        windows, attacked = self.corpus.evaluated, np.array(self.attacker.texts, np.int32)
        given, vocab = windows[:, :-1], np.arange(config.vocab_size)
        if cell.mechanism == "t2t":

            def texts(tokens: np.ndarray) -> np.ndarray:
                return t2t.replaced(tokens.ravel(), table, eta, prg).reshape(tokens.shape)

            changed, seen = texts(given), texts(attacked)
            kept = float((changed == given).mean())
            measured = utility(
                config, _front_of(front, config, changed), self.public.middle, back, windows, vocab
            )
            rows = views.of_front(front, config, seen.tolist())
        else:
            noise = cell.mechanism.removeprefix("snd ")
            noisy = partial(_noisy_front, self.params, config, table, eta, NOISES[noise], prg)
            known = np.array(self.public.texts[:_FITTED], np.int32)
            flat = partial(np.reshape, newshape=(-1, config.width))

            def seen_by_client(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
                x, drawn = noisy(tokens)
                return flat(np.asarray(self.public.middle(x))), flat(table[tokens]), flat(drawn)

            wanted = self.public.middle(_front_of(front, config, known))
            received, clean, drawn = seen_by_client(known)
            denoiser = snd.Denoiser.fit(received, clean, drawn, flat(np.asarray(wanted)))
            y = denoiser.rows(*seen_by_client(given)).reshape(*given.shape, config.width)
            measured = utility(
                config, jnp.asarray(y, jnp.float32), lambda y: y, back, windows, vocab
            )
            kept, rows = None, list(np.asarray(noisy(attacked)[0]))
        facts = {**asdict(cell), "kept": kept, "loss": None, **measured}
        outcomes = [as_dict(o) for o in self.attacker.of_rows(cell.name, rows)]
        return {**facts, "outcomes": outcomes}


def drawn_codebook(
    params: Params, config: ModelConfig, mechanism: str, epsilon: float, prg: Prg
) -> vocabulary.Codebook:
    """Draw a codebook of the model's table; epsilon: of a feature."""
    table = table_of(params, config)
    return vocabulary.draw(table, mechanism, epsilon * config.width, prg.child("codebook"))


def batches_of(texts: Corpus, prg: Prg) -> Batches:
    """Return the batches that a cell is tuned on."""
    key = prg.child("batches").words((KEY_BYTES // 8,)).tobytes()
    return Batches(texts.known, BATCH, LENGTH, key)


def _front_of(front: Params, config: ModelConfig, tokens: np.ndarray) -> Any:
    return views.front_of(front, config, jnp.asarray(tokens))


def _noisy_front(
    params: Params,
    config: ModelConfig,
    table: np.ndarray,
    eta: float,
    noise: Callable[[int, int, float, Prg], np.ndarray],
    prg: Prg,
    tokens: np.ndarray,
) -> tuple[Any, np.ndarray]:
    """Run SnD's front: return rows [b, n, d] of the front, and the noise [b, n, m] that went onto
    embeddings. Each occurrence of a token is a row of a table of its own.
    """
    b, n = tokens.shape
    drawn = noise(b * n, config.width, eta, prg).reshape(b, n, -1)
    at_once, rows = config.vocab_size // n, []
    for at in range(0, b, at_once):
        some, of = tokens[at : at + at_once], drawn[at : at + at_once]
        own = np.zeros((config.vocab_size, config.width), np.float32)
        own[: some.size] = (table[some] + of).reshape(some.size, -1)
        front, _ = client_ends(params, config, SPLIT, own)
        rows.append(_front_of(front, config, np.arange(some.size).reshape(some.shape)))
    return jnp.concatenate(rows), drawn


def utility(
    config: ModelConfig,
    x: Any,
    middle: Callable[[Any], Any],
    back: Params,
    windows: np.ndarray,
    labels: np.ndarray,
) -> dict[str, list[float]]:
    """Return perplexity and accuracy of the next token on windows [w, n + 1], whose rows at the
    boundary are x [w, n, d]; each with half its 95 % interval over windows (perplexity's in nats of
    its logarithm).
    """
    logits = np.asarray(views.back_of(back, config, middle(x)), np.float64)
    wanted = labels[windows[:, 1:]]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    nats = -np.take_along_axis(log_p, wanted[..., None], axis=-1)[..., 0].mean(axis=1)
    right = (logits.argmax(axis=-1) == wanted).mean(axis=1)

    def half(x: np.ndarray) -> float:
        return float(1.96 * x.std(ddof=1) / np.sqrt(len(x)))

    return {
        "perplexity": [float(np.exp(nats.mean())), half(nats)],
        "accuracy": [float(right.mean()), half(right)],
    }


def as_dict(outcome: AttackOutcome) -> dict[str, Any]:
    """Return an outcome as the result keeps it: a file of many of them is not to be large."""
    low, high = outcome.interval
    return {
        "attack": outcome.attack,
        "what": outcome.what,
        "tries": outcome.tries,
        "successes": outcome.successes,
        "chance": round(outcome.chance, 6),
        "notes": outcome.notes,
        "rate": round(outcome.rate, 6),
        "interval": [round(low, 6), round(high, 6)],
        "by_luck": round(outcome.by_luck, 6),
        "at_chance": outcome.at_chance,
    }


def measure(
    model: Path,
    plan: NoirPlan,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    done: Sequence[Any] = (),
    ray: str | None = None,
) -> dict[str, Any]:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    say("reading")
    study = Study(model, plan, say)
    result: dict[str, Any] = {
        "plan": asdict(plan),
        "rows": list(done),
        "corpus": {
            "known_files": study.corpus.files[0],
            "held_out_files": study.corpus.files[1],
            "windows": len(study.corpus.evaluated),
            "length": LENGTH,
            "tuning_tokens": plan.rounds * BATCH * LENGTH,
        },
    }
    return with_rows(result, all_cells(model, plan), say, keep, ray, study)


def all_cells(model: Path, plan: NoirPlan) -> Cells[Study, NoirCell]:
    """Return the study's cells."""
    return Cells(
        cells(plan),
        load=partial(Study, model.absolute(), plan),
        row=Study.row,
        key=lambda cell: cell.name,
        key_of=row_name,
        reads=(model.absolute(),),
        facts=lambda study: {"inverters": study.inverters()},
    )


def row_name(row: dict[str, Any]) -> str:
    return NoirCell(row["mechanism"], row["epsilon"], row["rounds"]).name


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "An hour: each cell is written at once, and the same command goes on."
    parser.add_argument(
        "--mechanisms",
        type=commands.names,
        metavar="NAME,...",
        default=list(NoirPlan.mechanisms),
        help=f"{', '.join(NoirPlan.mechanisms)} (default: all)",
    )
    parser.add_argument(
        "--epsilons",
        type=commands.fractions,
        metavar="E,...",
        default=EPSILONS,
        help="of a feature (default: the paper's 13 / 4096, 6, 9)",
    )
    parser.add_argument(
        "--attacks",
        type=commands.names,
        metavar="NAME,...",
        default=list(suite.ATTACKS),
        help=f"{', '.join(suite.ATTACKS)} (default: all)",
    )
    parser.add_argument(
        "--fully",
        type=commands.names,
        metavar="NAME,...",
        default=[],
        help="mechanisms that all attacks are run on",
    )
    commands.add_number(parser, "--rounds", ROUNDS, f"of tuning, {BATCH} x {LENGTH} tokens each")
    commands.add_number(parser, "--texts", TEXTS, "that are attacked")
    commands.add_number(parser, "--seed", 0, "of all draws", "S")
    commands.add_plot(parser, "draw accuracy and attacks against epsilon")
    commands.add_cluster(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    from experiments.split import report

    commands.check_folders(options)
    commands.check_range("--texts", options.texts, 4)
    commands.check_range("--rounds", options.rounds, 1)
    known_by = {
        "mechanisms": NoirPlan.mechanisms,
        "attacks": suite.ATTACKS,
        "fully": options.mechanisms,
    }
    for option, known in known_by.items():
        if unknown := set(getattr(options, option)) - set(known):
            raise InputError(
                f"--{option}: there is no {min(unknown)!r}; choose from {', '.join(known)}"
            )
    plan = NoirPlan(
        options.mechanisms,
        options.epsilons,
        options.rounds,
        options.attacks,
        options.texts,
        options.seed,
        options.fully,
    )
    model = commands.private_model(options)
    result = commands.resumed(options, plan, lambda *how: measure(model, plan, *how))
    show_table(report.table(result))
    if options.plot is not None:
        report.plot(result, options.plot)
