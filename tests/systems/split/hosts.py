"""A tiny public model, its split, texts, and views of them, for tests of what a host reads."""

from __future__ import annotations

import jax
import numpy as np

from models.family import ModelConfig, family_of
from models.gpt2 import GPT2Config
from models.llama import LlamaConfig
from models.split import Split
from spu_llm.systems.split.attacks.views import HostView, Public, Texts
from spu_llm.systems.split.ends import client_ends, table_of

VOCAB, LENGTH, TEXTS, ONES = 48, 12, 10, Split(1, 1)
GPT2 = GPT2Config(VOCAB, n_positions=16, n_embd=32, n_layer=3, n_head=2)
LLAMA = LlamaConfig(
    VOCAB,
    max_position_embeddings=16,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def params_of(config: ModelConfig) -> dict:
    """Larger than at the start of training, so that every block counts."""
    params = family_of(config).init(config, jax.random.key(1))
    return jax.tree.map(lambda w: 6 * w if w.ndim > 1 else w, params)


def zipf_texts(count: int, seed: int, length: int = LENGTH) -> list[list[int]]:
    """Tokens alone, each by a distribution that public text shares: token t with 1 / (t + 2)."""
    chances = 1 / np.arange(2, VOCAB + 2)
    source = np.random.default_rng(seed)
    return source.choice(VOCAB, (count, length), p=chances / chances.sum()).tolist()


def public_of(config: ModelConfig, split: Split = ONES) -> Public:
    weights = family_of(config).fold(params_of(config), config)
    return Public(config, weights, split, zipf_texts(200, 1))


def secret_front(config: ModelConfig, split: Split = ONES) -> dict:
    """Return a front with a codebook as INDVocab's is at the paper's epsilon: columns drawn from
    the table's own (§7, oracle 5).
    """
    params = params_of(config)
    table, source = table_of(params, config), np.random.default_rng(7)
    drawn = np.stack([source.choice(column, len(column)) for column in table.T], axis=1)
    return client_ends(params, config, split, drawn)[0]  # type: ignore[return-value]


def random_view(seed: int, like: HostView) -> HostView:
    """Return a view as of masked words, decoded as fixed point: huge numbers of any sign."""
    source = np.random.default_rng(seed)

    def words(shape: tuple[int, ...]) -> np.ndarray:
        signed = source.integers(-(2**63), 2**63, shape).astype(np.float64)
        return (signed / 2**18).astype(np.float32)

    return HostView([words(rows.shape) for rows in like.rows])


def right(guess: Texts, truth: Texts) -> float:
    return float(np.mean(np.asarray(guess) == np.asarray(truth)))
