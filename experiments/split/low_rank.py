"""The client's ends tuned by LoRA in place of their weights (the paper's Q10)."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.family import ModelConfig, Params
from models.split import back_texts, front_texts
from spu_llm.core.prg import Prg
from spu_llm.systems.split.ends import adapted, draw_lora
from spu_llm.systems.split.tuning import ClientHalf, stepped


class LowRankClient(ClientHalf):
    """A client's half that tunes LoRA of every matrix of its blocks and of its head, and leaves the
    weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        front: Params,
        back: Params,
        labels: np.ndarray,
        learning_rate: float,
        rank: int,
        prg: Prg,
    ) -> None:
        """Prepare the client's half with fresh LoRA of this rank."""
        self.config, self._tunes_front = config, True
        self._labels = np.asarray(labels, np.int32)
        self._whole_front, self._whole_back = jax.device_put((front, back))
        self._table = self._whole_front  # all that rounds leave as it is
        self.weights: Any = jax.device_put(
            {
                "front": draw_lora(front["blocks"], rank, prg.child("front")),
                "back": draw_lora([*back["blocks"], _head(back)], rank, prg.child("back")),
            }
        )
        self.state: Any = optax.adam(learning_rate).init(self.weights)
        self._forward, loss, alone, self._step = _steps(config, learning_rate)
        self._loss, self._alone = partial(loss, self._whole_back), partial(alone, self._whole_back)

    def front_weights(self) -> Params:
        """Return all folded weights of the front, with LoRA in them."""
        return _front(self._whole_front, self.weights["front"])

    def back_weights(self) -> Params:
        """Return all folded weights of the back, with LoRA in them."""
        return _back(self._whole_back, self.weights["back"])


def _head(back: Params) -> Params:
    return {"head": {"weight": back["head"]["weight"]}}


def _front(front: Params, lora: Any) -> Params:
    return {**front, "blocks": adapted(front["blocks"], lora)}


def _back(back: Params, lora: Any) -> Params:
    *blocks, last = adapted([*back["blocks"], _head(back)], lora)
    return {**back, "blocks": blocks, "head": {**back["head"], **last["head"]}}


@functools.cache
def _steps(config: ModelConfig, learning_rate: float) -> tuple[Any, ...]:
    """Compile what `ClientHalf` has of each model: the front and its pull-back, the loss with
    gradients and without, and a step.
    """

    def front(lora: Any, whole: Params, tokens: Any) -> Any:
        return jax.vjp(lambda lora: front_texts(_front(whole, lora), config, tokens), lora)

    def loss(whole: Params, lora: Any, y: Any, labels: Any) -> Any:
        logits = back_texts(_back(whole, lora), config, y)
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def step(weights: Any, state: Any, pull: Any, of_x: Any, of_back: Any) -> Any:
        gradient = {"front": pull(of_x)[0], "back": of_back}
        count = of_x.shape[0] * of_x.shape[1]
        return stepped(config, learning_rate, gradient, count, state, weights)

    with_gradients = jax.value_and_grad(loss, argnums=(1, 2))
    return jax.jit(front), jax.jit(with_gradients), jax.jit(loss), jax.jit(step)
