"""What the host of a middle sees, and what everybody knows.

Views are made here from the client's weights, in this process: the functions that a client runs
(`models.split`), without the wire between. What a provider received in a session is the same kind
of array, and goes into `HostView` as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from models.family import ModelConfig, Params, family_of
from models.split import Split, back_texts, front_texts, middle_texts
from models.tokenizer import Tokenizer

BATCH = 16  # texts that go through a part together

Texts = Sequence[Sequence[int]]
Middle = Callable[[Array], Array]  # rows [b, n, d] to what comes back

# Compiled once for each model and shape.
front_of, middle_of, back_of = (
    jax.jit(part, static_argnums=1) for part in (front_texts, middle_texts, back_texts)
)


@dataclass(frozen=True)
class HostView:
    """rows: of each text the boundary rows float32 [n, d] that came. From tuning, of other texts
    that the host tells apart: their boundary rows, and gradients dL/dy [n, d] of the loss by what
    it returned. The labels of a tuning text are the tokens after each of its n.
    """

    rows: list[np.ndarray]
    gradients: list[np.ndarray] | None = None
    tuning_rows: list[np.ndarray] | None = None


@dataclass(frozen=True, eq=False)
class Public:
    """The open model, folded, how it is split, and text like the client's, in tokens."""

    config: ModelConfig
    weights: Params
    split: Split
    texts: list[list[int]]
    tokenizer: Tokenizer | None = None

    @property
    def parts(self) -> tuple[Params, list[Params], Params]:
        """Return front, middle and back."""
        return self.split.parts(self.weights)

    @property
    def table(self) -> np.ndarray:
        """Return the embeddings [vocab, d] of tokens, on the scale of folded weights."""
        return np.asarray(family_of(self.config).embeddings(self.weights)[0])

    @property
    def middle(self) -> Middle:
        """Return the middle as an honest host runs it."""
        blocks = self.parts[1]
        return lambda x: middle_of(blocks, self.config, x)

    def returned(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Compute what the middle makes of the rows of each text."""
        return by_batch(self.middle, rows)

    def front(self, texts: Texts) -> list[np.ndarray]:
        """Compute the rows that texts would have had without a secret."""
        return of_front(self.parts[0], self.config, texts)

    def logits(self, returned: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Compute the logits [n, vocab] of what came back, by the public back."""
        back = self.parts[2]
        return by_batch(lambda y: back_of(back, self.config, y), returned)


def by_batch(part: Callable[[Array], Array], texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run a part of a model on texts of any lengths: returns float32 arrays of their own lengths.
    Rows that fill up come last, and nothing before sees them.
    """
    if not texts:
        return []
    longest = max(len(text) for text in texts)
    rows: list[np.ndarray] = []
    for at in range(0, len(texts), BATCH):
        some = texts[at : at + BATCH]
        room = np.zeros((min(BATCH, len(texts)), longest, *some[0].shape[1:]), some[0].dtype)
        for i, text in enumerate(some):
            room[i, : len(text)] = text
        made = np.asarray(part(jnp.asarray(room)), np.float32)
        rows += [made[i, : len(text)] for i, text in enumerate(some)]
    return rows


def of_front(weights: Params, config: ModelConfig, texts: Texts) -> list[np.ndarray]:
    """Compute what the host receives of texts in modes plain and noir: `weights` are those of the
    front (`spu_llm.systems.split.ends`).
    """
    tokens = [np.asarray(text, np.int32) for text in texts]
    return by_batch(lambda t: front_of(weights, config, t), tokens)


def of_tuning(
    ends: tuple[Params, Params],
    config: ModelConfig,
    middle: Middle,
    texts: Texts,
    relabelled: np.ndarray | None = None,
) -> HostView:
    """Compute what the host sees of a round of tuning with `texts`, one sample each, by the
    client's front and back: rows of all tokens but the last, and dL/dy at what its `middle`
    returned, L the sum of cross-entropies of next tokens. relabelled: int [vocab], LTokenizer's
    label of each token.
    """
    front, back = ends
    rows = of_front(front, config, [text[:-1] for text in texts])
    returned = by_batch(middle, rows)
    labels = [jnp.asarray(text, jnp.int32) for text in labels_of(texts, relabelled)]
    gradients = [
        np.asarray(_gradient(y, of_text, back, config), np.float32)
        for y, of_text in zip(returned, labels, strict=True)
    ]
    return HostView([], gradients, rows)


def labels_of(texts: Texts, relabelled: np.ndarray | None = None) -> list[list[int]]:
    """Return the labels of tuning texts, as the client calls them."""
    if relabelled is None:
        return [list(text[1:]) for text in texts]
    return [relabelled[np.asarray(text[1:])].tolist() for text in texts]


def _loss(y: Array, labels: Array, back: Params, config: ModelConfig) -> Array:
    """Sum the cross-entropies of labels [n] by the back's logits of y [n, d]."""
    logits = back_texts(back, config, y[None])[0]
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


_gradient = jax.jit(jax.grad(_loss), static_argnums=3)
