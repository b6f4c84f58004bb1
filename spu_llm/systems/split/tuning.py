"""STuning (NOIR, algorithm 1; §2.4 of the digest): the client tunes its ends through the middle.

A round, with a batch of texts [b, n + 1] of the client's:

1. C: rows of the front, x [b, n, d], of tokens 0 .. n - 1 (teacher forcing).   C -> S: x
2. S: y [b, n, d], the middle of x, with its LoRA.                              S -> C: y
3. C: logits, and the cross entropy with the labels tau(token 1 .. n), which stay with it.
                                                                                C -> S: dL/dy
4. S: LoRA takes a step, if there is one.                                       S -> C: dL/dx
5. C: front and back take a step. The codebook stays as it was drawn.

L is here the sum over all tokens of the batch, so that rows of dL/dy are of a size whatever the
batch is; steps are by the mean. Both halves are plain functions of bytes: between processes they
stand at the ends of a channel, in one process the host's half is called in place (`Loopback`).

Semi-honest. What both check of messages is their shape, and that they, and what a step makes of
them, are finite numbers. A host that deviates answers with y and dL/dx of its choice:

- It decides whether the front becomes secret at all: with dL/dx = 0 in every round it stays the
  public one, behind the codebook alone. Other gradients train front and back to ends of its own,
  such as rows that are easier to read. The client sees losses, and nothing else of it.
- It may withhold the last answer of a round, or end a session. The client then does the rounds
  since it last saved again, with the same batches and from the same weights, and the host may
  answer with another y: of the same labels it gets gradients at several points of its choice.

A client that deviates asks the middle, and its LoRA, whatever it likes; the LoRA is its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.family import ModelConfig, Params, family_of
from models.split import Split, back_texts, front_texts, middle_texts
from spu_llm.core.channel import Channel
from spu_llm.core.errors import WireError
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.systems.split.boundary import Boundary, Kind
from spu_llm.systems.split.ends import adapted, client_ends, draw_lora, with_table, without_table
from spu_llm.systems.split.modes import ENDS

# What the host sees of a round: Kind.UP or Kind.GRADIENT_UP, the round, float32 [b, n, d].
OnSeen = Callable[[Kind, int, np.ndarray], None]


class Batches:
    """Windows of a text, drawn by a keyed stream: the same for a round whenever it is asked for."""

    def __init__(self, tokens: np.ndarray, batch: int, length: int, key: bytes) -> None:
        """Prepare windows of `tokens`: int [m], m > length, all texts one after the other."""
        assert len(key) == KEY_BYTES and len(tokens) > length
        self._tokens, self._batch, self._length = np.asarray(tokens, np.int32), batch, length
        self._prg = Prg(key)

    def windows(self, number: int) -> np.ndarray:
        """Return the tokens int32 [batch, length + 1] of a round."""
        places = len(self._tokens) - self._length
        words = self._prg.child(f"round {number}").words((self._batch,))
        starts = (words % np.uint64(places)).astype(np.int64)
        return self._tokens[starts[:, None] + np.arange(self._length + 1)]


class ClientHalf:
    """Front and back, which are tuned by Adam, and the codebook, which is not; the back alone where
    `tuned` says so: messages are the same in number and size.
    """

    def __init__(
        self,
        config: ModelConfig,
        front: Params,
        back: Params,
        labels: np.ndarray,
        learning_rate: float,
        tuned: str = ENDS,
    ) -> None:
        """Prepare the client's half with a fresh state of Adam; `labels`: tau, int [vocab]."""
        self.config, self._tunes_front = config, tuned == ENDS
        front, table = without_table(front, config)
        self._labels = np.asarray(labels, np.int32)
        self._table = jax.device_put(table)
        self.weights: Any = jax.device_put({"front": front, "back": back})
        self.state: Any = optax.adam(learning_rate).init(self.weights)
        steps = _client_steps(config, learning_rate)
        self._forward, self._loss, self._alone, self._step = steps

    def front_weights(self) -> Params:
        """Return all folded weights of the front."""
        return with_table(self.weights["front"], self._table, self.config)

    def round(
        self, channel: Channel, boundary: Boundary, number: int, windows: np.ndarray
    ) -> float:
        """Run one round on windows int [b, n + 1] and return the mean loss of a token, in nats.
        WireError, and nothing of the round stays, where what the host sends leaves no finite
        numbers.
        """
        b, n = windows.shape[0], windows.shape[1] - 1
        # 1.
        tokens = np.asarray(windows[:, :-1], np.int32)
        x, pull = self._forward(self.weights["front"], self._table, tokens)
        boundary.send(channel, Kind.UP, number, np.asarray(x))
        # 2.
        y = boundary.recv(channel, Kind.DOWN, number, b, n)
        # 3.
        labels = self._labels[windows[:, 1:]]
        loss, (of_back, of_y) = self._loss(self.weights["back"], y, labels)
        _check_finite((loss, of_y), "rows", number)
        boundary.send(channel, Kind.GRADIENT_UP, number, np.asarray(of_y))
        # 4.
        of_x = boundary.recv(channel, Kind.GRADIENT_DOWN, number, b, n)
        # 5.
        if not self._tunes_front:  # Adam leaves what has never had a gradient
            of_x = np.zeros_like(of_x)
        weights, state = self._step(self.weights, self.state, pull, of_x, of_back)
        _check_finite((weights, state), "gradients", number)
        self.weights, self.state = weights, state
        return float(loss) / (b * n)

    def loss(self, middle: Callable[[Any], Any], windows: np.ndarray) -> float:
        """Return a token's mean loss on windows int [b, n + 1] with this middle, without a step."""
        x, _ = self._forward(self.weights["front"], self._table, windows[:, :-1])
        labels = self._labels[windows[:, 1:]]
        return float(self._alone(self.weights["back"], middle(x), labels)) / labels.size


@jax.jit
def _finite(tree: Any) -> Any:
    """Return whether all values are finite: finite gradients may still leave others, in Adam's
    squares first.
    """
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _check_finite(tree: Any, what: str, number: int) -> None:
    if not _finite(tree):
        raise WireError(
            f"in round {number} of the tuning the provider's {what} make what is tuned no finite "
            "numbers; --secrets are as they were: give the command again, or, if it always ends "
            "like this, begin in another directory with a lower --learning-rate"
        )


@functools.cache
def _client_steps(config: ModelConfig, learning_rate: float) -> tuple[Any, ...]:
    """Compile the client's steps: x and how its gradient is pulled back to what is tuned of the
    front; the loss with gradients by the back and by y, and without; a step of both.
    """

    def front(tuned: Params, table: Any, tokens: Any) -> Any:
        def rows(tuned: Params) -> Any:
            return front_texts(with_table(tuned, table, config), config, tokens)

        return jax.vjp(rows, tuned)

    def loss(back: Params, y: Any, labels: Any) -> Any:
        logits = back_texts(back, config, y)
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def step(weights: Any, state: Any, pull: Any, of_x: Any, of_back: Any) -> Any:
        count = of_x.shape[0] * of_x.shape[1]
        gradient = {"front": pull(of_x)[0], "back": of_back}
        return stepped(config, learning_rate, gradient, count, state, weights)

    with_gradients = jax.value_and_grad(loss, argnums=(0, 1))
    return jax.jit(front), jax.jit(with_gradients), jax.jit(loss), jax.jit(step)


@functools.cache
def _host_steps(config: ModelConfig, learning_rate: float) -> tuple[Any, Any]:
    """Compile the host's steps: y and how its gradient is pulled back to LoRA and x, and a step of
    LoRA by these.
    """

    def middle(blocks: Any, lora: Any, x: Any) -> Any:
        def rows(lora: Any, x: Any) -> Any:
            return middle_texts(adapted(blocks, lora), config, x)

        return jax.vjp(rows, lora, x)

    def step(lora: Any, state: Any, pull: Any, of_y: Any) -> Any:
        of_lora, of_x = pull(of_y)
        count = of_y.shape[0] * of_y.shape[1]
        return of_x, *stepped(config, learning_rate, of_lora, count, state, lora)

    return jax.jit(middle), jax.jit(step)


# Matrices of all families that fold 2^-stream_shift: they add to the residual stream.
_INTO_STREAM = {"out", "down", "proj", "wpe"}


def stepped(
    config: ModelConfig, learning_rate: float, gradient: Any, count: int, state: Any, weights: Any
) -> Any:
    """Return weights and state after a step by the mean over `count` tokens. Adam's steps have one
    size whatever the gradient's is, so that of a matrix which is folded with 2^-stream_shift is
    that much smaller: the model moves as it would without the shift.
    """

    def scaled(path: Any, change: Any) -> Any:
        names = {getattr(key, "key", None) for key in path}
        if not names & _INTO_STREAM or "a" in names:  # of LoRA's a b, b alone has the scale
            return change
        return change * 2.0**-config.stream_shift

    mean = jax.tree.map(lambda g: g / count, gradient)
    change, state = optax.adam(learning_rate).update(mean, state, weights)
    change = jax.tree_util.tree_map_with_path(scaled, change)
    return optax.apply_updates(weights, change), state


class HostHalf:
    """The middle, whose weights stay, with LoRA, which Adam tunes, or without ([])."""

    def __init__(
        self,
        config: ModelConfig,
        blocks: list[Params],
        boundary: Boundary,
        lora: list[dict[str, Params]],
        learning_rate: float,
    ) -> None:
        self._boundary = boundary
        self._blocks = jax.device_put(blocks)
        self.lora: Any = jax.device_put(lora)
        self.state: Any = optax.adam(learning_rate).init(self.lora)
        self._forward, self._step = _host_steps(config, learning_rate)

    @staticmethod
    def of(
        config: ModelConfig,
        blocks: list[Params],
        boundary: Boundary,
        rank: int,
        learning_rate: float,
    ) -> HostHalf:
        """Make the host's half before the first round, with fresh LoRA of this rank; 0: none."""
        lora = draw_lora(blocks, rank, Prg.from_os()) if rank else []
        return HostHalf(config, blocks, boundary, lora, learning_rate)

    def middle(self, x: Any) -> Any:
        """Compute y [b, n, d] of x [b, n, d]."""
        return self._forward(self._blocks, self.lora, x)[0]

    def blocks(self) -> list[Params]:
        """Return the middle's blocks, with LoRA in them."""
        blocks: list[Params] = jax.device_get(adapted(self._blocks, self.lora))
        return blocks

    def round(
        self, number: int, batch: int, length: int, on_seen: OnSeen = lambda *seen: None
    ) -> Round:
        """Begin a round of this number, with `batch` texts of `length` tokens each."""
        return Round(self, number, batch, length, on_seen)


class Round:
    """The host's half of a round: two messages of the client's, each with its answer."""

    def __init__(
        self, host: HostHalf, number: int, batch: int, length: int, on_seen: OnSeen
    ) -> None:
        self._host, self._number, self._shape = host, number, (batch, length)
        self._on_seen = on_seen
        self._pull: Any = None
        self.over = False

    def answer(self, data: bytes) -> bytes:
        """Answer the client's next message; WireError for anything but what comes next."""
        host, number = self._host, self._number
        boundary = host._boundary
        if self.over:
            raise WireError(f"round {number} of the tuning is over")
        if self._pull is None:
            x = boundary.decode(data, Kind.UP, number, *self._shape)
            self._on_seen(Kind.UP, number, x)
            y, self._pull = host._forward(host._blocks, host.lora, x)
            return boundary.encode(Kind.DOWN, number, np.asarray(y))
        of_y = boundary.decode(data, Kind.GRADIENT_UP, number, *self._shape)
        self._on_seen(Kind.GRADIENT_UP, number, of_y)
        of_x, lora, state = host._step(host.lora, host.state, self._pull, of_y)
        if not _finite((of_x, lora, state)):
            raise WireError(
                f"in round {number} of the tuning the client's gradients leave no finite numbers; "
                "if they always do, its --learning-rate is too high"
            )
        host.lora, host.state, self.over = lora, state, True
        return boundary.encode(Kind.GRADIENT_DOWN, number, np.asarray(of_x))


class Loopback:
    """The host's half at the other end of a channel without a wire."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._answer = b""

    def send(self, data: bytes) -> None:
        self._answer = self._round.answer(data)

    def recv(self) -> bytes:
        return self._answer


def tune(
    client: ClientHalf,
    host: HostHalf,
    boundary: Boundary,
    batches: Batches,
    rounds: range,
    on_seen: OnSeen = lambda *seen: None,
    on_round: Callable[[int, float], None] = lambda *_: None,
) -> list[float]:
    """Run these rounds in one process, and return their losses. `on_seen` gets what the host
    receives, `on_round` each round's number and loss.
    """
    losses = []
    for number in rounds:
        windows = batches.windows(number)
        round_ = host.round(number, windows.shape[0], windows.shape[1] - 1, on_seen)
        losses.append(client.round(Loopback(round_), boundary, number, windows))
        on_round(number, losses[-1])
    return losses


def halves(
    params: Params,
    config: ModelConfig,
    split: Split,
    *,
    codebook: np.ndarray | None,
    labels: np.ndarray,
    boundary: Boundary,
    learning_rate: float,
    rank: int = 0,
    tuned: str = ENDS,
) -> tuple[ClientHalf, HostHalf]:
    """Make both halves of a model that is not folded, before the first round. `codebook`: None
    leaves the token table. `rank`: of LoRA.
    """
    front, back = client_ends(params, config, split, codebook)
    blocks = split.parts(family_of(config).fold(params, config))[1]
    client = ClientHalf(config, front, back, labels, learning_rate, tuned)
    return client, HostHalf.of(config, blocks, boundary, rank, learning_rate)
