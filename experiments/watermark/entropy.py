"""Detection against length and entropy, on answers of a chat model ("A Watermark for Black-Box
Language Models", figure 1, top and bottom left; §5.5.3).

Prompts are chats up to their last answer, and "Write a short essay about ..."; each has an unmarked
answer and one of every method, under a key of its own, as published (without a history). The paper
has answers of 250 to 300 tokens, without the end of text for the first 250; here no answer ends.
AUC is of the first T tokens against unmarked answers of the same length under keys of nobody's.

The entropy of a prompt is the mean entropy of the next-token distributions along its whole unmarked
answer, in nats, as in the paper. The paper's buckets are 0.25 nats wide, of 5,233 prompts, and mix
lengths of 25 to 250 tokens; here prompts are in four groups of one size, at one length and mixed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, rows_table
from experiments.watermark import metrics, scores
from experiments.watermark.essays import ASKED, TOPICS
from experiments.watermark.long import GROUPS, by_entropy
from experiments.watermark.padded import PaddedLanes, side_by_side
from experiments.watermark.plan import AARONSON, GREEN, KUDITIPUDI, RANDOM
from experiments.watermark.report import around, name_of, percent
from experiments.watermark.study import figures, packed
from experiments.watermark.texts import Author, Method, Written, write
from models.chat import Message, Template
from models.tokenizer import Tokenizer
from spu_llm.app.calibration_texts import messages_in
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError

LENGTHS = (25, 50, 75, 100, 150, 200, 250, 300)
MIXED = (25, 50, 75, 100, 150, 200, 250)  # the paper's
AT = (50, 100)  # tokens at which groups of prompts are compared
MOST = 80  # tokens of a prompt
# In the order in which they are run.
CORE = (Method("flat", 2), Method("flat", 16), AARONSON, GREEN[1], KUDITIPUDI)
# Last, and at the first temperature alone.
ONCE = (GREEN[0], Method("flat", 4), Method("flat", 1024))
ORDER = (RANDOM, *(Method("flat", m) for m in (2, 4, 16, 1024)), AARONSON, *GREEN[:2], KUDITIPUDI)
Row = dict[str, Any]
Say = Callable[[str], None]
Cell = tuple[float, Method]


@dataclass(frozen=True)
class EntropyPlan:
    """The study's settings. null_keys: keys that each unmarked text is scored under."""

    model: str
    chats: tuple[str, ...]
    texts: int = 64
    tokens: int = 300
    temperatures: tuple[float, ...] = (1.0, 0.5)
    null_keys: int = 6
    seed: int = 0

    @property
    def lengths(self) -> list[int]:
        return [n for n in LENGTHS if n < self.tokens] + [self.tokens]


# ---- texts


def prompts_of(model: Path, chats: Sequence[Path], count: int) -> list[list[int]]:
    """Return the tokens of `count` prompts, from each file and of essays in turn. InputError where
    there are fewer that are short enough.
    """
    template, tokenizer = Template.load(model), Tokenizer.load(model)
    sources = [[_asked(messages) for _, messages in messages_in(path, None)] for path in chats]
    sources.append([[Message("user", ASKED.format(topic))] for topic in TOPICS])
    in_turn = [one for group in itertools.zip_longest(*sources) for one in group if one]
    tokens = [tokenizer.encode(template.render(messages)) for messages in in_turn]
    prompts = [one for one in tokens if len(one) <= MOST][:count]
    if len(prompts) < count:
        raise InputError(f"--texts must be {len(prompts)} or fewer: so many prompts there are")
    return prompts


def _asked(messages: list[Message]) -> list[Message]:
    """Return a chat without the answer that it ends with."""
    return messages[:-1] if messages[-1].role == "assistant" else messages


class Unmarked:
    """Unmarked texts at one temperature, their scores under other keys, and their entropy: nats a
    token [prompt].
    """

    def __init__(self, study: Answers, temperature: float) -> None:
        authors = study.authors(RANDOM, f"{temperature} unmarked")
        self.written = study.written(RANDOM, authors, temperature)
        self.texts = [study.again(tokens) for tokens in self.written.tokens]
        self.nulls = scores.Nulls(
            [[text] for text in self.texts], study.plan.null_keys, study.vocab, study.plan.seed
        )
        self.entropy = self.written.entropy.mean(axis=1)


class Answers:
    """A chat model, its prompts, and unmarked answers at each temperature."""

    def __init__(self, model: Path, chats: Sequence[Path], plan: EntropyPlan, say: Say) -> None:
        self.plan, self.say, self._title = plan, say, ""
        self.tokenizer = Tokenizer.load(model)
        self.vocab, self._never = self.tokenizer.vocab_size, sorted(self.tokenizer.eos_ids)
        self.prompts = side_by_side(prompts_of(model, chats, plan.texts))
        self._lanes = PaddedLanes(model, self._look)
        room = self._lanes.config.context - self.prompts.shape[1]
        if plan.tokens > room:
            raise InputError(
                f"--tokens must be {room} or fewer: the model has "
                f"{self._lanes.config.context} positions"
            )
        self._unmarked: dict[float, Unmarked] = {}

    def _look(self, columns: int) -> None:
        self.say(f"{self._title}, token {columns - self.prompts.shape[1] + 1}")

    def unmarked(self, temperature: float) -> Unmarked:
        if temperature not in self._unmarked:
            self._unmarked[temperature] = Unmarked(self, temperature)
        return self._unmarked[temperature]

    def authors(self, method: Method, label: str) -> list[Author]:
        """Return an author for each prompt, with a key of its own."""
        return [
            Author.of(method, self.plan.seed, f"entropy {label} text {j}")
            for j in range(len(self.prompts))
        ]

    def written(self, method: Method, authors: Sequence[Author], temperature: float) -> Written:
        """Write an answer to each prompt."""
        self._title = f"temperature {temperature:g}, {name_of(asdict(method))}"
        return write(
            method, authors, self._lanes, self.prompts, self.plan.tokens, temperature, self._never
        )

    def again(self, tokens: Sequence[int] | np.ndarray) -> list[int]:
        """Detokenise a text, and tokenise it again."""
        return scores.retokenised(self.tokenizer, [int(token) for token in tokens])

    # ---- a cell

    def row(self, cell: Cell) -> Row:
        """Return what is measured of a method at a temperature."""
        temperature, method = cell
        unmarked = self.unmarked(temperature)
        facts: Row = {"temperature": temperature, **asdict(method)}
        if method == RANDOM:
            return facts | _facts(unmarked.written, unmarked.texts) | self._calibrated(unmarked)
        authors = self.authors(method, f"{temperature} {method}")
        written = self.written(method, authors, temperature)
        texts = [self.again(tokens) for tokens in written.tokens]
        self.say(f"{self._title}: scores")
        lengths, kind = self.plan.lengths, scores.KINDS[method.name][0]
        of = scores.scores_of(method, kind, authors, texts, lengths, unmarked.nulls, self.vocab)
        nulls = [unmarked.nulls.scores(kind, n) for n in lengths]
        return {
            **facts,
            **_facts(written, texts),
            "score": kind,
            "by_length": {
                str(n): figures(of[:, [i]], nulls[i], tpr=False) for i, n in enumerate(lengths)
            },
            "by_entropy": compared(unmarked.entropy, of, nulls, lengths),
            "scores": packed(of),
        }

    def _calibrated(self, unmarked: Unmarked) -> Row:
        """Return how many unmarked texts have small p-values, and the entropy of each."""
        rates = {}
        for kind in ("sum", "fisher"):
            p = 10.0 ** -unmarked.nulls.scores(kind, self.plan.tokens)
            rates[kind] = metrics.mean((p <= 0.01).mean(axis=1))
        count = len(unmarked.texts) * self.plan.null_keys
        return {"false": rates, "false_of": count, "entropy": packed(unmarked.entropy)}


def _facts(written: Written, texts: Sequence[list[int]]) -> Row:
    """Return the entropy of texts, how far they lie above it, the share of their n-grams that did
    not stand in the same text before, and the fewest tokens of a text that is tokenised again.
    """
    fresh = [len(set(_grams(text))) / len(text) for text in texts]
    return {
        "texts": len(texts),
        "nats": metrics.mean(written.entropy.mean(axis=1)),
        "excess_bits": metrics.mean((written.nats - written.entropy).mean(axis=1) / np.log(2)),
        "fresh": metrics.mean(np.array(fresh)),
        "fewest": min(map(len, texts)),
    }


def _grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[max(0, i - scores.NGRAM + 1) : i + 1]) for i in range(len(tokens))]


def compared(
    entropy: np.ndarray, of: np.ndarray, nulls: Sequence[np.ndarray], lengths: Sequence[int]
) -> Row:
    """Compare prompts by their entropy [prompt], at each length of AT and for MIXED ones together:
    AUC in groups, AUC of the upper half of prompts less that of the lower, and the correlation of
    entropy and score. of: scores [prompt, length] of marked texts; nulls: of unmarked ones, for
    each length [prompt, key].
    """
    order = np.argsort(entropy, kind="stable")
    halves = order[len(order) // 2 :], order[: len(order) // 2]
    sets = {str(n): [n] for n in AT if n in lengths}
    sets["mixed"] = [n for n in MIXED if n in lengths]
    result = {}
    for name, chosen in sets.items():
        columns = [list(lengths).index(n) for n in chosen]
        mine, others = of[:, columns], [nulls[i] for i in columns]
        together = np.concatenate(others, axis=1)
        upper, lower = ((mine[half], together[half]) for half in halves)
        result[name] = {
            "groups": by_entropy(entropy, mine, others),
            "halves": metrics.difference(metrics.auc, upper, lower),
        }
        if len(chosen) == 1:
            result[name]["correlation"] = metrics.correlation(entropy, mine[:, 0])
    return result


# ---- cells


def measure(
    model: Path,
    chats: Sequence[Path],
    plan: EntropyPlan,
    say: Say,
    keep: Callable[[Row], None] = lambda result: None,
    done: Sequence[Row] = (),
    ray: str | None = None,
) -> Row:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: Row = {"plan": asdict(plan), "rows": list(done)}
    return with_rows(result, all_cells(model, chats, plan), say, keep, ray)


def all_cells(model: Path, chats: Sequence[Path], plan: EntropyPlan) -> Cells[Answers, Cell]:
    """Return the study's cells: temperature and method."""
    model, files = model.absolute(), tuple(path.absolute() for path in chats)
    return Cells(
        [
            *itertools.product(plan.temperatures, (RANDOM, *CORE)),
            *itertools.product(plan.temperatures[:1], ONCE),
        ],
        load=functools.partial(Answers, model, files, plan),
        row=lambda study, cell, say: study.row(cell),
        key=lambda cell: cell,
        key_of=lambda row: (row["temperature"], method_of(row)),
        reads=(model, *files),
    )


def method_of(row: Row) -> Method:
    return Method(**{name: row[name] for name in asdict(RANDOM)})


# ---- the report


def _ordered(result: Row, *, marked: bool) -> list[Row]:
    """Return rows by temperature and in the order of tables, without unmarked texts if `marked`."""
    temperatures = list(result["plan"]["temperatures"])
    chosen = [row for row in result["rows"] if not marked or method_of(row) != RANDOM]
    places = {method: i for i, method in enumerate(ORDER)}
    return sorted(
        chosen, key=lambda row: (temperatures.index(row["temperature"]), places[method_of(row)])
    )


def _beginning() -> list[Column[Row]]:
    return [Column("method", name_of), Column("temperature", lambda row: f"{row['temperature']:g}")]


def text_rows(result: Row) -> list[str]:
    """Return a table of the texts themselves."""

    def false(row: Row, kind: str) -> str:
        return percent(row["false"][kind]) if "false" in row else "–"

    columns: list[Column[Row]] = [
        *_beginning(),
        Column("texts", lambda row: str(row["texts"])),
        Column("nats a token", lambda row: "{:.2f} ({:.2f} to {:.2f})".format(*row["nats"])),
        Column("above entropy, bits a token", lambda row: around(row["excess_bits"], 3)),
        Column("n-grams that come first, %", lambda row: percent(row["fresh"])),
        Column("p of 0.01 or less, %: sum", lambda row: false(row, "sum")),
        Column("Fisher's", lambda row: false(row, "fisher")),
    ]
    return rows_table(columns, _ordered(result, marked=False))


def length_rows(result: Row) -> list[str]:
    """Return a table of AUC and pAUC by length."""
    rows = _ordered(result, marked=True)

    def at(length: str, figure: str) -> Callable[[Row], str]:
        return lambda row: percent(row["by_length"][length][figure])

    lengths = list(rows[0]["by_length"]) if rows else []
    columns: list[Column[Row]] = [
        *_beginning(),
        *(Column(f"AUC, %, at {n} tokens" if n == "25" else n, at(n, "auc")) for n in lengths),
        *(Column(f"pAUC, %, at {n}", at(n, "pauc")) for n in lengths[-1:]),
    ]
    return rows_table(columns, rows)


def entropy_rows(result: Row, name: str) -> list[str]:
    """Return a table of AUC by the entropy of prompts, at one length or mixed ones (`name`)."""
    rows = [row for row in _ordered(result, marked=True) if name in row["by_entropy"]]

    def group(i: int) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            of = row["by_entropy"][name]["groups"][i]
            low, high = of["nats"]
            return f"{percent(of['auc'])}; {low:.2f} to {high:.2f}"

        return text

    def correlation(row: Row) -> str:
        return around(row["by_entropy"][name]["correlation"], 2)

    columns: list[Column[Row]] = [
        Column(
            f"AUC, %, {name} tokens; nats a token"
            if name.isdigit()
            else "AUC, %, lengths mixed; nats a token",
            name_of,
        ),
        Column("temperature", lambda row: f"{row['temperature']:g}"),
        *(Column(f"quarter {i + 1}", group(i)) for i in range(GROUPS)),
        Column("upper half less lower", lambda row: _points(row["by_entropy"][name]["halves"])),
        *([Column("entropy and score", correlation)] if name.isdigit() else []),
    ]
    return rows_table(columns, rows)


def _points(interval: Sequence[float]) -> str:
    """Write a difference of shares and its interval, in percentage points."""
    return around([100 * x for x in interval], 1)


def _tables(result: Row) -> list[list[str]]:
    names = [*map(str, AT), "mixed"]
    tables = [text_rows(result), length_rows(result)]
    return [rows for rows in (*tables, *(entropy_rows(result, name) for name in names)) if rows]


def table(result: Row) -> str:
    """Return the whole result as Markdown."""
    return "\n\n".join("\n".join(rows) for rows in _tables(result))


def in_results(result: Row, origin: str) -> list[str]:
    """Return the whole result as paragraphs of its page in docs/results."""
    return [text for rows in _tables(result) for text in ("\n".join(rows), origin)]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each cell is written at once, and the same command goes on."
    parser.add_argument(
        "--chats",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON Lines, as for calibrate: chats that --model, which needs a chat template, "
        f"answers, beside essays; those of more than {MOST} tokens are left out",
    )
    commands.add_number(parser, "--texts", EntropyPlan.texts, "of a method")
    commands.add_number(parser, "--tokens", EntropyPlan.tokens, "of a text", "T")
    parser.add_argument(
        "--temperatures",
        type=commands.fractions,
        metavar="T,...",
        default=EntropyPlan.temperatures,
        help="default: 1,0.5; the methods that take longest or say least are at the first alone",
    )
    commands.add_number(parser, "--seed", 0, "of all draws", "S")
    commands.add_cluster(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--texts", options.texts, 2 * GROUPS)
    commands.check_range("--tokens", options.tokens, AT[0])
    if not all(0.05 <= t <= 5 for t in options.temperatures):
        raise InputError(f"--temperatures must be 0.05 to 5, found {min(options.temperatures)}")
    model = commands.private_model(options)
    plan = EntropyPlan(
        model.name,
        tuple(path.name for path in options.chats),
        options.texts,
        options.tokens,
        tuple(options.temperatures),
        seed=options.seed,
    )
    result = commands.resumed(options, plan, lambda *how: measure(model, options.chats, plan, *how))
    show_table(table(result))
