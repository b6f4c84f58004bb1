"""Answers of tiny private models: what alignment's tests are made of."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.alignment import scripts
from models.alignment.answers import Answer, Origin
from models.alignment.writing import Drawn, Given, Script, Scripts, Writer
from models.family import ModelConfig, family_of, logits
from models.gpt2 import GPT2Config
from models.llama import LlamaConfig
from models.t5 import T5Config

V = 40
END = frozenset({0})
CONFIGS: list[ModelConfig] = [
    GPT2Config(V, n_positions=32, n_embd=8, n_layer=2, n_head=2),
    LlamaConfig(V, 32, 8, 16, 2, 2, 1),
]
T5_CONFIG = T5Config(V, 8, 4, 12, 1, 2, 2, n_positions=32)
ORIGIN = Origin("model", "asked", "tokenizer", 1.0, 5)
ORIGIN_OF_ALL = replace(ORIGIN, top_k=V)


def params_of(config: ModelConfig, seed: int = 0) -> Any:
    """Return random parameters whose distributions are far from flat."""
    drawn = family_of(config).init(config, jax.random.key(seed))
    return jax.tree.map(lambda w: np.asarray(16 * w if w.ndim > 1 else w), drawn)


@functools.partial(jax.jit, static_argnums=1)
def _padded_logits(params: Any, config: ModelConfig, tokens: Any) -> Any:
    return logits(params, config, tokens)


def logits_of(params: Any, config: ModelConfig, tokens: Any) -> np.ndarray:
    """Return a text's logits [token, V]. What follows it changes none of them, and so texts of all
    lengths take one compiled program.
    """
    padded = np.pad(tokens, (0, config.context - len(tokens)))
    return np.asarray(_padded_logits(params, config, jnp.asarray(padded)))[: len(tokens)]


def writer(config: ModelConfig, *, top_k: int = V, temperature: float = 1.0) -> Writer:
    return Writer(config, params_of(config), END, 4, 24, top_k, temperature)


def texts_of(made: Writer, scripts: Iterator[Script], seed: int = 0) -> list[Answer]:
    return made.round(Scripts(scripts), seed)


def answers_of(config: ModelConfig, rounds: int = 4, top_k: int = V) -> list[Answer]:
    made = writer(config, top_k=top_k)
    texts = itertools.repeat((Given([7]), Drawn(20)))
    return [one for seed in range(rounds) for one in texts_of(made, texts, seed)]


def t5_answers(count: int = 30, texts_of_lanes: int = 4) -> list[Answer]:
    made = Writer(T5_CONFIG, params_of(T5_CONFIG), END, texts_of_lanes, 9, V, 1.0)
    texts = scripts.of_sources([1 + i % 39 for i in range(6 * count + 5)], 6, (1, 0))
    assert len(texts) == count
    waiting, answers = Scripts(iter(texts)), []
    for seed in range(count):
        answers += made.round(waiting, seed)
    assert waiting.is_over
    return answers
