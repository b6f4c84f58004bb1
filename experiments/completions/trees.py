"""Whether trees of drafts pay: tokens a step of one chain against several that begin apart, at
equal numbers of drafted positions.

In plaintext: under one noise, or greedily, the text is the same whatever the drafts are
(`spu_llm.systems.decoding.branching.Chains`), so it is written once, and each shape of tree walks
through it. What a step verifies counts, also past the place where the walk ends. M chains of d
drafts take 1 + M d positions of a secure forward, as one chain of M d does, but M (d + 1) rows of a
verification where that takes M d + 1. Drafts are those of a completion by default: n-grams of the
text where they are sure, else the public model's.

Under the rule `token` the drafts of the first place are siblings without replacement
(`experiments.completions.siblings`), each with a chain behind it; every tree writes its own text,
and drafts are the public model's alone. There is no such verification on shares.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.prompts import TEMPERATURE, read_prompts
from experiments.common.report import Column, rows_table
from experiments.completions import siblings
from models.draft import Drafter, Proposer
from models.hf import load_model
from models.ngrams import Ngrams
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling, Streams, draw
from protocols.verification.race import Race
from spu_llm.app.printing import show_table
from spu_llm.core.machine import machine
from spu_llm.core.prg import Prg
from spu_llm.systems.decoding.branching import drafted

POSITIONS = (4, 8, 16)
CHAINS = (1, 2, 4)
TEMPERATURES = (0.0, TEMPERATURE)


@dataclass(frozen=True)
class Tree:
    """So many chains of drafts, each of so many."""

    chains: int
    drafts: int


TREES = [Tree(chains, n // chains) for n in POSITIONS for chains in CHAINS]
RACE, SIBLINGS = "race", "token"


def written(
    model: Proposer,
    rule: Race,
    prompt: list[int],
    tokens: int,
    own: Streams,
    ends: frozenset[int] = frozenset(),
) -> list[int]:
    """Return the text after a prompt that the noise decides: `tokens` tokens, or up to its end."""
    text = list(prompt)
    while len(text) < len(prompt) + tokens and not ends & set(text[len(prompt) :]):
        text.append(rule.propose(model.logits(text), len(text), own)[0])
    return text[len(prompt) :]


def walk(
    tree: Tree,
    text: Sequence[int],
    tokens: int,
    prompt: list[int],
    drafter: Proposer,
    rule: Race,
    own: Streams,
) -> list[int]:
    """Return the tokens of each step after the first token, which the prefill gives, until there
    are `tokens` of the text, which goes on behind them for as long as a step may.
    """
    made: list[int] = []
    while (at := 1 + sum(made)) < min(tokens, len(text)):
        before, rest = [*prompt, *text[:at]], text[at:]
        branches = drafted(
            drafter, rule, before, tree.drafts, [own] * tree.chains, apart=tree.chains > 1
        )
        made.append(1 + max(_held(branch.drafts, rest) for branch in branches))
    return made


def write(
    tree: Tree,
    tokens: int,
    prompt: list[int],
    model: Proposer,
    drafter: Proposer,
    own: Streams,
    ends: frozenset[int] = frozenset(),
) -> list[int]:
    """Return the tokens of each step under the rule `token`, until there are `tokens` of a text or
    it ends; the first token is the prefill's.
    """
    sampling = Sampling(TEMPERATURE)
    first = draw(sampling.distribution(model.logits(prompt)), float(own.sampling.uniform(())))
    text = [*prompt, first]
    made: list[int] = []
    while 1 + sum(made) < tokens and not ends & set(text[len(prompt) :]):
        verified = siblings.step(text, model, drafter, tree.chains, tree.drafts, sampling, own)
        made.append(len(verified))
        text += verified
    return made


def _held(drafts: Sequence[int], rest: Sequence[int]) -> int:
    """Return how many of the drafts, from the first on, the text has."""
    length = min(len(drafts), len(rest))
    apart = np.flatnonzero(np.asarray(drafts[:length]) != np.asarray(rest[:length]))
    return int(apart[0]) if apart.size else length


def measure(
    directory: Path, draft_model: Path, tokens: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Write a text after each prompt, greedily and sampled; let every tree walk through it."""
    tokenizer = Tokenizer.load(directory)
    prompts = [tokenizer.encode(prompt.text) for prompt in read_prompts()]
    most = max(tree.drafts for tree in TREES)
    rows = max(map(len, prompts)) + tokens + 2 * most
    config, params = load_model(directory)
    model, small = Drafter(config, params, rows), Drafter(*load_model(draft_model), rows)
    ends = tokenizer.eos_ids
    made = []
    for temperature in TEMPERATURES:
        rule = Race(Sampling(temperature), temperature > 0)
        for number, prompt in enumerate(prompts):
            say(f"prompt {number + 1} of {len(prompts)} at {temperature:g}")
            own = Streams(Prg.from_seed(number, "drafts"), Prg.from_seed(number, "sampling"))
            long = min(tokens + most, config.context - len(prompt) - most)
            text = written(model, rule, prompt, long, own, ends)
            for tree in TREES:
                drafter = Ngrams(config.vocab_size, small)
                each = walk(tree, text, tokens, prompt, drafter, rule, own)
                made.append(_record(RACE, temperature, number, tree, each))
    for number, prompt in enumerate(prompts):
        say(f"prompt {number + 1} of {len(prompts)} by siblings")
        for tree in TREES:
            own = Streams(Prg.from_seed(number, "drafts"), Prg.from_seed(number, "sampling"))
            each = write(tree, tokens, prompt, model, small, own, ends)
            made.append(_record(SIBLINGS, TEMPERATURE, number, tree, each))
    return made


def _record(
    rule: str, temperature: float, prompt: int, tree: Tree, each: Sequence[int]
) -> dict[str, Any]:
    counts = {"tokens": sum(each), "steps": len(each)}
    return {"rule": rule, "temperature": temperature, "prompt": prompt, **counts, **asdict(tree)}


def table(result: dict[str, Any]) -> str:
    """Return tokens a step in the mean over all texts, as Markdown."""
    runs = result["runs"]

    def rate(rule: str, positions: int, chains: int, temperature: float) -> float:
        some = [
            run
            for run in runs
            if (run["rule"], run["temperature"]) == (rule, temperature)
            and (run["chains"], run["drafts"]) == (chains, positions // chains)
        ]
        return float(sum(run["tokens"] for run in some) / sum(run["steps"] for run in some))

    def column(chains: int) -> Column[tuple[str, float, int]]:
        name = "one chain" if chains == 1 else f"{chains} chains"
        return Column(name, lambda row: f"{rate(row[0], row[2], chains, row[1]):.2f}")

    columns: list[Column[tuple[str, float, int]]] = [
        Column("rule", lambda row: row[0]),
        Column("temperature", lambda row: f"{row[1]:g}"),
        Column("drafted positions", lambda row: str(row[2])),
        *map(column, CHAINS),
    ]
    ways = [*((RACE, t) for t in TEMPERATURES), (SIBLINGS, TEMPERATURE)]
    return "\n".join(rows_table(columns, [(*way, n) for way in ways for n in POSITIONS]))


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_common(parser)
    commands.add_draft_model(parser)
    commands.add_number(parser, "--tokens", 64, "of each text")


def command(options: argparse.Namespace) -> None:
    """Print the table, and write all runs to `--json`."""
    commands.check_range("--tokens", options.tokens, 2)
    commands.check_folders(options)
    directory, draft_model = commands.pair(options)
    commands.check_tokenizer(directory, draft_model)
    runs = commands.with_progress(
        "writing texts", lambda say: measure(directory, draft_model, options.tokens, say)
    )
    result = {
        "runs": runs,
        "machine": asdict(machine()),
        "config": {"model": directory.name, "draft_model": draft_model.name},
    }
    show_table(table(result))
    commands.write(options, result)
