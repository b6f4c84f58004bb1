"""What the study of watermarks measures: its methods, sizes and cells."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.common import commands
from experiments.watermark.texts import Method
from spu_llm.core.errors import InputError
from spu_llm.systems.watermark.cdfs import FAMILIES

PROMPT_TOKENS = 24
TEXTS, TOKENS, SAMPLES, NULL_KEYS = 64, 150, 2, 6
TEMPERATURES = (1.0, 0.5)
LENGTHS = (25, 50, 75, 100, 150)
POOLED = (25, 50, 100)
JUDGED = 100  # tokens of the main table, of edits and of distortion
AGAIN = 10  # tokens of a second text of the same prompt and key
FORGED, SEEN, FORGED_TOKENS = 32, (1, 8, 64), (25, 50, 100)
ROUNDS = 4  # parts in which the texts of one key are written
DRAFTS = (2, 4)

RANDOM, GREEDY, FORGERY = Method("random"), Method("greedy"), Method("forgery", 16)
MARK, CHUNKED, RACE = Method("flat", 16), Method("flat", 4, 10), Method("race")
PLAIN_RACE, KUDITIPUDI = Method("plain-race"), Method("kuditipudi")
AARONSON, WHITE_BOX = Method("aaronson"), Method("white-box")
GREEN = tuple(Method("kirchenbauer", delta=delta) for delta in (0.5, 2.0, 4.0))
NESTED = Method("recursive", 2, keys=2)
LARGE = Method("flat", 16, 10)
OTHER_FAMILIES = tuple(replace(CHUNKED, family=family) for family in FAMILIES[1:])


def both(method: Method) -> tuple[Method, Method]:
    """Return a method as published, and with a history."""
    return method, replace(method, history=True)


# In the order in which they are run: what is asked first, then the others, then dear ones, which
# are run at the first temperature alone.
CORE = (
    RANDOM,
    GREEDY,
    *both(MARK),
    *both(RACE),
    PLAIN_RACE,
    AARONSON,
    GREEN[1],
    KUDITIPUDI,
    *both(FORGERY),
)
REST = (
    *both(CHUNKED),
    *both(Method("flat", 2)),
    *both(Method("flat", 4)),
    *both(NESTED),
    GREEN[0],
    GREEN[2],
)
ONCE = (WHITE_BOX, LARGE, *OTHER_FAMILIES)
# In the order of tables.
ORDER = (
    RANDOM,
    GREEDY,
    AARONSON,
    *GREEN,
    KUDITIPUDI,
    *both(Method("flat", 2)),
    *both(Method("flat", 4)),
    *both(MARK),
    WHITE_BOX,
    *both(NESTED),
    *both(CHUNKED),
    LARGE,
    PLAIN_RACE,
    *both(RACE),
)
LONG = (RANDOM, MARK, RACE, GREEN[1])  # as long as texts are; others end at `JUDGED`
EDITED = (MARK, CHUNKED, RACE, GREEN[1], KUDITIPUDI)  # all edits, at the first temperature
SCORED = (MARK, CHUNKED, *OTHER_FAMILIES)  # by all scores


def share_of(method: Method) -> int:
    """Return how many times fewer texts a method has: costly ones have fewer."""
    if method in (LARGE, WHITE_BOX):
        return 4
    return 2 if method.k > 1 else 1


@dataclass(frozen=True)
class WatermarkPlan:
    """The study's settings. samples: unmarked texts of a prompt; null_keys: keys that each of them
    is scored under.
    """

    texts: int = TEXTS
    tokens: int = TOKENS
    temperatures: Sequence[float] = TEMPERATURES
    samples: int = SAMPLES
    null_keys: int = NULL_KEYS
    seed: int = 0


def add_plan(parser: argparse.ArgumentParser, words: str, tokens: int) -> None:
    """Add the options of a study's plan. words: what its texts are of; tokens: the default."""
    commands.add_number(parser, "--texts", TEXTS, words)
    commands.add_number(parser, "--tokens", tokens, "of a text", "T")
    parser.add_argument(
        "--temperatures",
        type=commands.fractions,
        metavar="T,...",
        default=TEMPERATURES,
        help="default: 1,0.5",
    )
    commands.add_number(parser, "--seed", 0, "of all draws", "S")
    commands.add_draft_model(parser)


def plan_of(options: argparse.Namespace, least: int) -> WatermarkPlan:
    """Return the plan that the options ask for; InputError for what cannot be measured, with texts
    of fewer tokens than `least`, too.
    """
    commands.check_range("--texts", options.texts, 4)
    commands.check_range("--tokens", options.tokens, least)
    if not all(0.05 <= t <= 5 for t in options.temperatures):
        raise InputError(f"--temperatures must be 0.05 to 5, found {min(options.temperatures)}")
    return WatermarkPlan(options.texts, options.tokens, options.temperatures, seed=options.seed)


@dataclass(frozen=True)
class WatermarkCell:
    temperature: float
    method: Method

    @property
    def name(self) -> str:
        return f"{self.temperature} {json.dumps(asdict(self.method))}"


def cells(plan: WatermarkPlan) -> list[WatermarkCell]:
    """Return all cells, in the order in which they are run."""
    first = plan.temperatures[:1]
    return [
        WatermarkCell(temperature, method)
        for methods, at in ((CORE, plan.temperatures), (REST, plan.temperatures), (ONCE, first))
        for temperature in at
        for method in methods
    ]


def cell_of(row: dict[str, Any]) -> WatermarkCell:
    """Return the cell that a row of the result is of."""
    of = {name: row[name] for name in asdict(MARK)}
    return WatermarkCell(row["temperature"], Method(**of))
