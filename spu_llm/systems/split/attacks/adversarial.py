"""A12: the host returns what it likes during tuning, and reads labels off the gradients.

Whatever it adapts (LoRA or more), the host of the middle chooses the rows y that the client's back
gets. One row, the same at all positions and far larger than what the back's blocks add to it, makes
the back its norm and head alone: gradients then tell of the label, not of the text.

1. y = `LARGE` times a fixed direction, at every position, in place of the middle's answer.
2. For each label l the host computes what the gradient would be at the public back.
3. The gradient that came is that of the nearest l, by cosine.

Under LTokenizer that is the secret label: equal tokens show, and what they are called, not what
they are.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.split import back_texts
from spu_llm.systems.split.attacks.views import HostView, Public

LARGE = 1e3  # times the size of rows that the honest middle returns: as much of texts is left


def middle(public: Public) -> Callable[[Array], Array]:
    """Return a middle that answers every row with one and the same row (step 1)."""
    row = jnp.asarray(_row(public))
    return lambda x: jnp.broadcast_to(row, x.shape)


def _row(public: Public) -> np.ndarray:
    rows = np.concatenate(public.returned(public.front(public.texts[:8])))
    size = LARGE * np.sqrt(np.square(rows).mean())
    signs = np.random.default_rng(0).choice([-1.0, 1.0], rows.shape[1])
    return np.asarray(size * (signs - signs.mean()), np.float32)


def attack(view: HostView, public: Public) -> list[list[int]]:
    """Return the label at each position of the tuning texts, as the client calls it (steps 2 and
    3). `view` is of tuning with `middle`.
    """
    assert view.gradients is not None
    candidates = _candidates(public)
    candidates /= np.linalg.norm(candidates, axis=1, keepdims=True) + 1e-300
    return [(g.astype(float) @ candidates.T).argmax(axis=1).tolist() for g in view.gradients]


def _candidates(public: Public) -> np.ndarray:
    """Compute the gradient [vocab, d] by y that each label has at the public back (step 2)."""
    back, row = public.parts[2], jnp.asarray(_row(public))

    def logits(y: Array) -> Array:
        return back_texts(back, public.config, y[None, None])[0, 0]

    slopes = np.asarray(jax.jit(jax.jacrev(logits))(row), float)
    chances = np.asarray(jax.nn.softmax(logits(row)), float)
    return chances @ slopes - slopes
