"""Whether the length of drafts should follow how many stayed: tokens per cost of a step, of fixed
lengths and of one chosen from step to step.

Only what both parties see may choose it: how many drafts of each step so far stayed, which a
session shows with `--show-progress` alone. The chosen length is the one with most tokens per cost
at the acceptance seen so far,

    a = (sum over steps of F^age k + 1.5) / (sum over steps of F^age (k + [k < G]) + 2)

for k of G drafts that stayed, F = 0.9 for each step since, and (1 - a^(G+1)) / (1 - a) tokens a
step. A step of n positions costs 1 + S (n - 1) / 16 of one of a single position: S is what 16
further ones add, as `experiment speedup` measured it online, network by network.

In plaintext, by speculative sampling, with the public model's drafts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.common import commands
from experiments.common.prompts import TEMPERATURE, read_prompts
from experiments.common.report import Column, rows_table
from experiments.completions.drafts import LazyLogits, prompts_of
from experiments.completions.speedup import expected
from models.draft import Drafter, Proposer
from models.hf import load_model
from models.text_format import TextFormat
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.plain import Plain
from spu_llm.app.printing import show_table
from spu_llm.core.machine import machine
from spu_llm.core.prg import Prg

LENGTHS = (1, 2, 4, 8, 16)
SLOPES = {"3000mbps-1ms": 1.1, "lan": 0.65, "200mbps-80ms": 0.25}
CHOSEN = 0  # in the place of a fixed length
_FORGETS, _STAYED, _DECIDED = 0.9, 1.5, 2.0


def cost(positions: int, slope: float) -> float:
    """Return the cost of a step of so many positions, in steps of one."""
    return 1 + slope * (positions - 1) / 16


@dataclass
class Chooser:
    """Chooses the length of the next step's drafts by how many stayed so far."""

    slope: float
    _stayed: float = field(default=_STAYED, init=False)
    _decided: float = field(default=_DECIDED, init=False)

    def length(self) -> int:
        """Return the length with the most tokens per cost."""
        a = self._stayed / self._decided
        return max(LENGTHS, key=lambda n: expected(a, n) / cost(n + 1, self.slope))

    def saw(self, stayed: int, drafts: int) -> None:
        """Take in how many of a step's drafts stayed."""
        decided = stayed + (stayed < drafts)
        self._stayed = _STAYED + _FORGETS * (self._stayed - _STAYED) + stayed
        self._decided = _DECIDED + _FORGETS * (self._decided - _DECIDED) + decided


def steps_of(
    model: Proposer,
    drafter: Proposer,
    prompt: list[int],
    ends: frozenset[int],
    tokens: int,
    chooser: Chooser | int,
    seed: int,
) -> list[tuple[int, int]]:
    """Return drafts and verified tokens of each step after the first token, of a text of up to so
    many tokens.
    """
    rule = Plain(Sampling(TEMPERATURE))
    streams = Streams(Prg.from_seed(seed, "drafts"), Prg.from_seed(seed, "sampling"))
    text, made = list(prompt), 0
    steps: list[tuple[int, int]] = []

    def step(count: int) -> int:
        proposed, q = drafter.propose(text, count, lambda z, at: rule.propose(z, at, streams))
        rows: Any = LazyLogits(model, text, proposed)
        k, token = rule.resolve(rows, proposed, q, lambda: float(streams.sampling.uniform(())))
        text.extend([*proposed[:k], token])
        return k

    step(0)
    while 1 + made < tokens and not ends & set(text[len(prompt) :]):
        length = chooser if isinstance(chooser, int) else chooser.length()
        stayed = step(length)
        if not isinstance(chooser, int):
            chooser.saw(stayed, length)
        steps.append((length, stayed + 1))
        made += stayed + 1
    return steps


def measure(
    directory: Path, draft_model: Path, tokens: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Write texts after each prompt with each fixed length, and with a chosen one by network."""
    text = TextFormat.of_model(directory)
    prompts = (
        [text.tokenizer.encode(prompt.text) for prompt in read_prompts()]
        if text.template is None
        else [prompt for _, prompt in prompts_of(text)]
    )
    rows = max(map(len, prompts)) + tokens + 2 * max(LENGTHS) + 2
    model, small = (Drafter(*load_model(path), rows) for path in (directory, draft_model))
    ways: list[tuple[int, str]] = [(n, "") for n in LENGTHS]
    ways += [(CHOSEN, network) for network in SLOPES]
    made = []
    for length, network in ways:
        for number, prompt in enumerate(prompts):
            say(f"{length or 'chosen lengths'} {network}: prompt {number + 1} of {len(prompts)}")
            way = length or Chooser(SLOPES[network])
            steps = steps_of(model, small, prompt, text.tokenizer.eos_ids, tokens, way, number)
            made.append({"length": length, "network": network, "prompt": number, "steps": steps})
    return made


def per_cost(runs: Sequence[dict[str, Any]], slope: float) -> float:
    """Return the cost of a token of some texts, in steps of one position."""
    steps = [step for run in runs for step in run["steps"]]
    return sum(cost(drafts + 1, slope) for drafts, _ in steps) / sum(n for _, n in steps)


def table(result: dict[str, Any]) -> str:
    """Return the cost of a token by network and length as Markdown."""

    def figure(length: int) -> Callable[[str], str]:
        def cell(network: str) -> str:
            some = [
                run
                for run in result["runs"]
                if run["length"] == length and run["network"] in ("", network)
            ]
            return f"{per_cost(some, SLOPES[network]):.3f}"

        return cell

    columns: list[Column[str]] = [
        Column("network", lambda network: network),
        *(Column(f"{n} drafts", figure(n)) for n in LENGTHS),
        Column("chosen step by step", figure(CHOSEN)),
    ]
    return "\n".join(rows_table(columns, SLOPES))


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_common(parser)
    commands.add_draft_model(parser)
    commands.add_number(parser, "--tokens", 96, "of each text")


def command(options: argparse.Namespace) -> None:
    """Print the table, and write all runs to `--json`."""
    commands.check_range("--tokens", options.tokens, 2)
    commands.check_folders(options)
    directory, draft_model = commands.pair(options)
    commands.check_tokenizer(directory, draft_model)
    runs = commands.with_progress(
        "writing texts", lambda say: measure(directory, draft_model, options.tokens, say)
    )
    show_table(table(result := {"runs": runs, "machine": asdict(machine())}))
    commands.write(options, result)
