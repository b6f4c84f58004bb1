"""How useful references are, without sampling: how likely real texts are with them.

A real text's tokens are given one after another, and the distribution of each (`mechanism`, over
the whole vocabulary, temperature 1) is that of the public model, or of B references beside it,
clipped for epsilon or not at all. References are those that stand where the text's file does
(`Corpus.beside`). The nats saved per token are what a generator can learn from B references in this
way; differences are of the same tokens, so that few texts suffice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.dp_text import metrics
from experiments.dp_text.inputs import Corpus
from models.family import ModelConfig, Params, logits
from spu_llm.systems.dp_text.mechanism import LARGEST, clipped_sum, mean_logits, probabilities
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.prompts import Prompts

TEXTS = 60


def savings(
    config: ModelConfig,
    params: Params,
    prompts: Prompts,
    corpus: Corpus,
    epsilons: Sequence[float],
    batches: Sequence[int],
    tokens: int,
    delta: float,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return a row for each batch and epsilon (None: not clipped): the clip norm, nats per token of
    the public model, and what references save of them, each with half its interval, over texts.
    """
    step = max(1, len(corpus.real) // TEXTS)  # evenly over all files
    numbers = range(0, len(corpus.real), step)[:TEXTS]
    most = max(batches)
    budgets = [(b, e, _clip(b, e, tokens, delta)) for b in batches for e in (*epsilons, None)]
    run = functools.partial(_logits(config), jax.device_put(params))
    public: list[float] = []
    saved: list[list[float]] = [[] for _ in budgets]
    for done, number in enumerate(numbers):
        say(f"worth of references: text {done + 1} of {len(numbers)}")
        text = prompts.tokenizer.encode(corpus.real[number], goes_on=True)[:tokens]
        rows = [prompts.public, *map(prompts.private, corpus.beside(number, most))]
        logits = _rows(run, rows, text, prompts.room + tokens)
        public.append(_nats(logits[0], logits[0], text))
        for (batch, _, clip), of in zip(budgets, saved, strict=True):
            with_references = [
                mean_logits(own, clipped_sum(own, others, np.ones(batch, bool), clip), batch)
                for own, others in zip(
                    logits[0], np.moveaxis(logits[1 : 1 + batch], 0, 1), strict=True
                )
            ]
            of.append(public[-1] - _nats(logits[0], np.array(with_references), text))
    return [
        {
            "batch": batch,
            "epsilon": epsilon,
            "clip": clip if epsilon else None,
            "public": metrics.mean(public),
            "saved": metrics.mean(of),
        }
        for (batch, epsilon, clip), of in zip(budgets, saved, strict=True)
    ]


def _clip(batch: int, epsilon: float | None, tokens: int, delta: float) -> float:
    if epsilon is None:
        return LARGEST
    return Parameters.for_budget(
        epsilon, delta, batch=batch, temperature=1.0, max_new_tokens=tokens
    ).clip


def _logits(config: ModelConfig) -> Callable[[Params, np.ndarray], jax.Array]:
    """Return a function that computes the logits [row, token, vocab] of rows of tokens."""

    def one(params: Params, tokens: jax.Array) -> jax.Array:
        return logits(params, config, tokens)

    return jax.jit(jax.vmap(one, in_axes=(None, 0)))


def _rows(run: Any, prompts: Sequence[list[int]], text: list[int], room: int) -> np.ndarray:
    """Return the logits float32 [prompt, token of the text, vocab] that the text's tokens were
    drawn from.
    """
    rows = np.zeros((len(prompts), room), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt) + len(text)] = [*prompt, *text]
    logits = np.asarray(run(rows))
    return np.stack(
        [out[len(prompt) - 1 :][: len(text)] for out, prompt in zip(logits, prompts, strict=True)]
    )


def _nats(public: np.ndarray, mean: np.ndarray, text: list[int]) -> float:
    """Return the nats per token of the text."""
    distributions = [
        probabilities(own, row, 1.0)[t] for own, row, t in zip(public, mean, text, strict=True)
    ]
    return float(-np.log(distributions).mean())
