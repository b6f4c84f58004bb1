"""The linear attack on the first layer: a prompt's tokens from its attention.

The first layer's keys k and values v depend on a token and its position p alone, and whoever owns
the weights computes them for all of them. An answer (A, m, gamma) to a query q says, for the
prompt's tokens x_p,

    sum_p e^(q k(x_p, p) - m) [v(x_p, p); 1] = gamma [A; 1],

which is linear in the indicator of x: H (d_h + 1) equations a query, for the one solution that has
one token at each position. Also q k(x_p, p) <= m, which leaves a part of the candidates.

Relaxed to weights of at least 0 that add up to one at each position, and solved by active sets
(Lawson and Hanson, Solving Least Squares Problems, chapter 23).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from models.family import ModelConfig
from models.stages import stages_of
from spu_llm.systems.confidential.attacks.views import LayerQueries

FLOAT32 = 1e-6  # relative error of answers in that arithmetic; rounding of scores grows with them
_BLOCK = 8  # candidates that are taken in at a time
_ROUNDS = 150


class Dictionary(NamedTuple):
    """Keys and values of the first layer, float32 [position, token, kv head, head_dim]."""

    keys: np.ndarray
    values: np.ndarray


class RecoveredTokens(NamedTuple):
    tokens: np.ndarray  # int [n]: the likeliest at each position
    residual: float  # of the equations, relative, in the relaxed solution


def dictionary(config: ModelConfig, weights: Any, positions: int) -> Dictionary:
    """Compute keys and values of all tokens at so many first positions; `weights` are folded."""
    stages, vocab = stages_of(config), config.vocab_size
    shape = positions, vocab, config.kv_heads, config.head_dim
    made = Dictionary(np.empty(shape, np.float32), np.empty(shape, np.float32))
    tokens = np.arange(vocab, dtype=np.int32)
    for position in range(positions):
        at = np.full(vocab, position, np.int32)
        asked = stages.ask(weights["blocks"][0], stages.embed(weights, tokens, at), at)
        made.keys[position], made.values[position] = asked.key, asked.value
    return made


def recover(made: Dictionary, asked: LayerQueries, error: float = FLOAT32) -> RecoveredTokens:
    """Recover the tokens at the positions that queries of the first layer were about. error: of the
    answers, relative to them.
    """
    system = _System(made, asked, error)
    chosen, weights = _active_set(system, error)
    n, vocab = asked.visible.shape[1], made.keys.shape[1]
    mass = np.zeros((n, vocab))
    mass[system.position[chosen], system.token[chosen]] = weights
    rest = system.target - system.columns(chosen).T @ weights
    # Where the relaxed solution has nothing, the candidate that agrees best with what is left.
    best = system.agreement(rest) / system.norms
    for position in np.flatnonzero(mass.max(axis=1) <= 0):
        here = np.flatnonzero(system.position == position)
        mass[position, system.token[here[best[here].argmax()]]] = 1
    residual = float(np.linalg.norm(rest) / np.linalg.norm(system.target))
    return RecoveredTokens(mass.argmax(axis=1), residual)


class _System:
    """The equations, divided by gamma, and one for each position: its weights add up to one.

    Columns are not stored: there are as many as candidates, and each is an outer product.
    """

    def __init__(self, made: Dictionary, asked: LayerQueries, error: float) -> None:
        t, n = asked.visible.shape
        vocab, _, size = made.keys.shape[1:]
        query, (out, shift, mass) = asked.query.astype(np.float64), asked.answer
        # [n, vocab, t, kv head, group]
        scores = np.einsum("pvhd,thgd->pvthg", made.keys[:n], query, optimize=True)
        slack = 10 * error * np.maximum(1, np.abs(shift, dtype=np.float64))
        seen = asked.visible.T[:, None, :, None, None]
        possible = (~seen | (scores <= shift + slack)).all((2, 3, 4))
        possible[~possible.any(axis=1)] = True  # of answers that are none
        self.position, self.token = np.nonzero(possible)
        excess = np.minimum(scores[possible] - shift, 1)
        masses = np.where(mass == 0, 1, mass).astype(np.float64)
        self._weights = np.exp(excess) / masses * asked.visible.T[self.position][:, :, None, None]
        self._values = made.values[self.position, self.token]
        one = np.ones((*out.shape[:-1], 1))
        self._equations = np.concatenate([out, one], axis=-1).shape
        answers = np.concatenate([out.astype(np.float64), one], axis=-1)
        self.target = np.concatenate([answers.ravel(), np.ones(n)])
        self._n = n
        lengths = np.square(self._values, dtype=np.float64).sum(axis=-1) + 1
        squares = np.einsum("cthg,ch->c", self._weights**2, lengths, optimize=True)
        self.norms = np.sqrt(squares + 1)

    def agreement(self, rest: np.ndarray) -> np.ndarray:
        """Return the products of all columns with a vector of the equations."""
        by_query = rest[: -self._n].reshape(self._equations)
        values = by_query[..., :-1].astype(np.float32)
        products = np.einsum("chd,thgd->cthg", self._values, values, optimize=True)
        products = (products + by_query[..., -1]) * self._weights
        return np.asarray(products.sum((1, 2, 3)) + rest[-self._n :][self.position])

    def columns(self, chosen: np.ndarray) -> np.ndarray:
        """Return the columns of these candidates, [candidate, equation]."""
        values = self._values[chosen].astype(np.float64)
        extended = np.concatenate([values, np.ones((*values.shape[:-1], 1))], axis=-1)
        columns = np.einsum("cthg,chd->cthgd", self._weights[chosen], extended)
        of_position = self.position[chosen][:, None] == np.arange(self._n)
        flat = columns.reshape(len(chosen), self.target.size - self._n)
        return np.concatenate([flat, of_position], axis=1)


def _active_set(system: _System, error: float) -> tuple[np.ndarray, np.ndarray]:
    """Solve the relaxed system by active sets: candidates with their weights, all positive."""
    chosen, x = np.zeros(0, int), np.zeros(0)
    columns = system.columns(chosen)
    size = np.linalg.norm(system.target)
    for _ in range(_ROUNDS):
        rest = system.target - columns.T @ x
        if np.linalg.norm(rest) <= error * size:
            break
        agreement = system.agreement(rest) / system.norms
        agreement[chosen] = -np.inf
        best = np.argpartition(-agreement, min(_BLOCK, len(agreement) - 1))[:_BLOCK]
        best = best[agreement[best] > 0]
        if not len(best):
            break
        chosen, x = np.append(chosen, best), np.append(x, np.zeros(len(best)))
        columns = np.concatenate([columns, system.columns(best)])
        while True:
            # On the way to the least squares of those chosen, who meets 0 leaves.
            goal = np.linalg.lstsq(columns.T, system.target, rcond=1e-12)[0]
            falling = goal <= 0
            if not falling.any():
                x = goal
                break
            steps = x[falling] / (x[falling] - goal[falling] + 1e-300)
            x = x + min(1.0, steps.min()) * (goal - x)
            stay = ~falling | (x > 1e-12)
            stay[np.flatnonzero(falling)[steps.argmin()]] = False
            chosen, x, columns = chosen[stay], x[stay], columns[stay]
    return chosen, x


def other_prompts_rate(guess: np.ndarray, others: np.ndarray) -> float:
    """Return how often tokens [n] are also right for other prompts [m, n], at their positions: what
    a guess is worth that knows of text, but not of this one.
    """
    return float((others == guess).mean())
