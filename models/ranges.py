"""What a model's activations can be, from its weights alone.

Functions on shares hold on public ranges. A norm in front bounds what a matrix can make of a row
(Cauchy-Schwarz: a row of d values with mean square 1 has length sqrt(d)), so the provider can tell
before anything runs whether its model stays inside. What no bound covers, the norms' own input, is
counted while it runs (`protocols.soundness`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from models.gpt2 import GPT2Config
from protocols.distribution import SPREAD
from protocols.nonlinear import LARGEST_ACTIVATION, LARGEST_SCORE
from spu_llm.errors import InputError


def check_ranges(weights: Any, config: GPT2Config) -> None:
    """InputError when activations of a model with these folded weights may leave a range."""
    _check_logits(weights["head"], config)
    for i, block in enumerate(weights["blocks"]):
        activation = _largest(block["fc"], config.n_embd)
        if not activation < LARGEST_ACTIVATION:
            raise InputError(
                f"layer {i}'s feed-forward inputs can reach {activation:.0f}; functions on shares "
                f"hold below {LARGEST_ACTIVATION}, so this model cannot be served"
            )
        score = _largest_score(block["qkv"], config)
        if not score < LARGEST_SCORE:
            raise InputError(
                f"layer {i}'s attention scores can reach {score:.0f}; functions on shares hold "
                f"below {LARGEST_SCORE}, so this model cannot be served"
            )


def _check_logits(head: Any, config: GPT2Config) -> None:
    spread = 2 * _largest(head, config.n_embd)
    if not spread < SPREAD:
        raise InputError(
            f"logits can spread over {spread:.0f} nats; verification on shares holds below "
            f"{SPREAD}, so this model cannot be served"
        )


def _largest(linear: Any, d: int) -> float:
    """Of any entry of x @ weight + bias, for |x| = sqrt(d)."""
    columns = np.linalg.norm(np.asarray(linear["weight"], np.float64), axis=0)
    return float(np.max(np.sqrt(d) * columns + np.abs(linear["bias"])))


def _largest_score(qkv: Any, config: GPT2Config) -> float:
    """Of q k^T for q = x W_q + b_q and k = y W_k + b_k with |x| = |y| = sqrt(d), in any head."""
    weight = np.asarray(qkv["weight"], np.float64)
    query, key, _ = np.split(weight, 3, axis=1)
    query_bias, key_bias, _ = np.split(np.asarray(qkv["bias"], np.float64), 3)
    root, largest = np.sqrt(config.n_embd), 0.0
    for head in range(config.n_head):
        at = slice(head * config.head_dim, (head + 1) * config.head_dim)
        (w_q, w_k), (b_q, b_k) = (query[:, at], key[:, at]), (query_bias[at], key_bias[at])
        # The largest singular value of W_q W_k^T, from two small matrices.
        product = np.linalg.qr(w_q)[1] @ np.linalg.qr(w_k)[1].T
        spectral = np.linalg.norm(product, 2)
        crossed = np.linalg.norm(w_q @ b_k) + np.linalg.norm(w_k @ b_q)
        largest = max(largest, config.n_embd * spectral + root * crossed + abs(b_q @ b_k))
    return float(largest)
