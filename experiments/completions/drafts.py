"""How many drafts stay, by what drafts: n-grams of the text, a draft model, or both.

In plaintext, since drafting is the client's in the clear and verification on shares follows the
same rule: a model of this machine's is sampled from by speculative sampling (`verification.plain`),
of five prompts whose answers repeat much of them and five whose answers do not. A model with a chat
template gets them as chats. What a step costs on shares is not in it: tokens a step say how many
steps a text takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.report import Column, rows_table
from models.chat import Message
from models.draft import Drafter, Proposer
from models.family import ModelConfig, Params
from models.hf import load_model
from models.ngrams import Ngrams
from models.text_format import TextFormat
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.plain import Plain
from spu_llm.api.defaults import DRAFT_LENGTH, shipped
from spu_llm.app.printing import show_table
from spu_llm.core.machine import machine
from spu_llm.core.prg import Prg

TEXTS = Path(__file__).parents[1] / "data" / "drafts_texts.json"
TEMPERATURES = (0.0, 0.7)


class LazyLogits:
    """The model's logits at the places of a step, made when they are asked for, and kept: those
    after a rejection never are.
    """

    def __init__(self, model: Proposer, text: list[int], drafts: list[int]) -> None:
        self._model, self._text, self._drafts = model, text, drafts
        self.made: dict[int, np.ndarray] = {}

    def __getitem__(self, place: int) -> np.ndarray:
        if place not in self.made:
            self.made[place] = self._model.logits(self._text + self._drafts[:place])
        return self.made[place]


@dataclass(frozen=True)
class DraftedText:
    """Counts of one drafted text."""

    tokens: int
    steps: int
    drafted: int
    accepted: int
    places: int  # of drafts that were decided: up to the first rejection of each step
    overlap: float  # sum over these of sum_x min(p(x), q(x)), the chance that a draft stays
    likeliest: int  # drafts at these that are the model's likeliest token


def run(
    model: Proposer,
    drafter: Proposer,
    prompt: list[int],
    ends: frozenset[int],
    tokens: int,
    drafts: int,
    sampling: Sampling,
    seed: int,
) -> DraftedText:
    """Write up to so many tokens after a prompt; the first one is the prefill's."""
    rule = Plain(sampling)
    streams = Streams(Prg.from_seed(seed, "drafts"), Prg.from_seed(seed, "sampling"))
    made: list[int] = []
    steps = accepted = places = likeliest = 0
    overlap = 0.0

    def step(count: int) -> None:
        nonlocal accepted, places, overlap, likeliest
        text = prompt + made
        proposed, q = drafter.propose(text, count, lambda z, at: rule.propose(z, at, streams))
        rows: Any = LazyLogits(model, text, proposed)
        k, token = rule.resolve(rows, proposed, q, lambda: float(streams.sampling.uniform(())))
        made.extend([*proposed[:k], token])
        accepted += k
        for place, logits in rows.made.items():
            if place < count:
                places += 1
                likeliest += int(proposed[place] == int(np.argmax(logits)))
                overlap += float(np.minimum(sampling.distribution(logits), q[place]).sum())

    step(0)
    while len(made) < tokens and not ends & set(made):
        step(drafts)
        steps += 1
    return DraftedText(len(made), steps, drafts * steps, accepted, places, overlap, likeliest)


def prompts_of(text: TextFormat) -> Iterator[tuple[str, list[int]]]:
    """Yield each prompt's kind, and its tokens."""
    texts = json.loads(TEXTS.read_text(encoding="utf-8"))
    kinds = texts["code" if text.template is None else "chats"]
    for kind, prompts in kinds.items():
        for prompt in prompts:
            if text.template is not None:
                prompt = text.template.render([Message("user", prompt)])
            yield kind, [*text.tokenizer.encode(prompt), *text.after_prompt]


def for_prompts(model: tuple[ModelConfig, Params], rows: int) -> Callable[[list[int]], Drafter]:
    """Return what makes a model ready to write after a prompt, in one shape for all prompts: the
    model itself, or with the prompt encoded.
    """
    config, params = model
    if config.encodes:
        return lambda prompt: Drafter(config, params, rows, prompt[:-1])
    drafter = Drafter(config, params, rows)
    return lambda prompt: drafter


def measure(
    directory: Path, draft_model: Path | None, tokens: int, drafts: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Make the runs of each kind of prompt, drafter and temperature."""
    text = TextFormat.of_model(directory)
    prompts = list(prompts_of(text))
    rows = max(len(prompt) for _, prompt in prompts) + tokens + drafts
    private = load_model(directory, encoders=True)
    small = None if draft_model is None else load_model(draft_model, encoders=True)
    size, measured = private[0].vocab_size, []
    of_model, of_small = for_prompts(private, rows), small and for_prompts(small, rows)
    ways: dict[str, Callable[[list[int]], Proposer]] = {"n-grams": lambda prompt: Ngrams(size)}
    if of_small is not None:
        ways["the draft model"] = of_small
        ways["both"] = lambda prompt: Ngrams(size, of_small(prompt))
    for temperature in TEMPERATURES:
        for way, drafter_of in ways.items():
            for number, (kind, prompt) in enumerate(prompts):
                say(f"{way} at {temperature:g}: prompt {number + 1} of {len(prompts)}")
                one = run(
                    of_model(prompt),
                    drafter_of(prompt),
                    prompt,
                    text.tokenizer.eos_ids,
                    tokens,
                    drafts,
                    Sampling(temperature),
                    number,
                )
                measured.append(
                    {"kind": kind, "way": way, "temperature": temperature, **asdict(one)}
                )
    return measured


def _tokens_a_step(runs: list[dict[str, Any]]) -> str:
    """Write the mean over prompts, the least and the most; texts that were over with their first
    token do not count.
    """
    each = [(run["tokens"] - 1) / run["steps"] for run in runs if run["steps"]]
    return f"{np.mean(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def _accepted(runs: list[dict[str, Any]]) -> str:
    drafted = sum(run["drafted"] for run in runs)
    return f"{sum(run['accepted'] for run in runs) / max(1, drafted):.0%}"


def _acceptance(runs: list[dict[str, Any]]) -> str:
    """Write the acceptance rate: how likely a draft stays, on average over places."""
    return f"{sum(run['overlap'] for run in runs) / max(1, sum(run['places'] for run in runs)):.2f}"


def _likeliest(runs: list[dict[str, Any]]) -> str:
    """Write how often a draft that was looked at is the model's likeliest token."""
    if any("likeliest" not in run for run in runs):
        return "–"
    return (
        f"{sum(run['likeliest'] for run in runs) / max(1, sum(run['places'] for run in runs)):.2f}"
    )


COLUMNS: Sequence[Column[list[dict[str, Any]]]] = (
    Column("prompts", lambda runs: runs[0]["kind"]),
    Column("drafts by", lambda runs: runs[0]["way"]),
    Column("temperature", lambda runs: f"{runs[0]['temperature']:g}"),
    Column("tokens", lambda runs: str(sum(run["tokens"] for run in runs))),
    Column("tokens a step", _tokens_a_step),
    Column("drafts that stay", _accepted),
    Column("acceptance rate", _acceptance),
    Column("drafts that are the likeliest token", _likeliest),
)


def table(runs: list[dict[str, Any]]) -> str:
    """Return a table with a row for each kind of prompt, drafter and temperature."""
    alike: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for run in runs:
        alike.setdefault((run["kind"], run["way"], run["temperature"]), []).append(run)
    return "\n".join(rows_table(COLUMNS, alike.values()))


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_common(parser)
    commands.add_draft_model(parser)
    commands.add_number(parser, "--tokens", 96, "of each text, at most")
    commands.add_number(parser, "--draft-length", DRAFT_LENGTH, "drafts a step", "G")


def command(options: argparse.Namespace) -> None:
    """Print the table, and write all runs to `--json`."""
    commands.check_range("--tokens", options.tokens, 2)
    commands.check_range("--draft-length", options.draft_length, 1, 16)
    commands.check_folders(options)
    directory, draft_model = commands.private_model(options), options.draft_model
    if options.model is None and draft_model is None:
        draft_model = shipped("public")
    if draft_model is not None:
        commands.check_tokenizer(directory, draft_model)
    tokens, drafts = options.tokens, options.draft_length
    runs = commands.with_progress(
        "writing texts", lambda say: measure(directory, draft_model, tokens, drafts, say)
    )
    show_table(table(runs))
    result = {
        "runs": runs,
        "machine": asdict(machine()),
        "config": {
            "model": directory.name,
            "tokens": options.tokens,
            "draft_length": options.draft_length,
        },
    }
    commands.write(options, result)
