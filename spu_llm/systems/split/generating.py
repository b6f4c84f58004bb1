"""The program `split-generate`: texts, a round trip a token, with the middle in the clear.

1. C: tokens through the front, by the codebook in noir.  C -> S: rows, first of the whole prompt,
   then of the last token.
2. S: the middle.  S -> C: as many rows.
3. C: the back, the last row's logits; a label is drawn; tau^-1 of it is the next token (NOIR §2.5).

Each part keeps keys and values of its own blocks. The client ends a text: the provider cannot read
an end off rows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import split as parts
from models.cache import Block, rows_after
from models.family import ModelConfig, Params, weight_shapes
from models.hf import load_model
from models.resident import mapped
from models.stops import Stops
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Sampling, draw
from spu_llm.core.channel import CountingChannel, Traffic
from spu_llm.core.errors import InputError, WireError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.systems.decoding.emitted import Emitted
from spu_llm.systems.program import Job, ProviderInputs, Send
from spu_llm.systems.split.boundary import Boundary, Kind
from spu_llm.systems.split.ends import check_same_shape, client_ends, with_table, without_table
from spu_llm.systems.split.records import (
    GenerateInputs,
    GenerateRequest,
    SplitServed,
    declare_generation,
)
from spu_llm.systems.split.state import ClientSecrets, Tunings
from spu_llm.systems.split.tuning import HostHalf

PHASES = ("prefill", "decode")
_AT_ONCE = 32  # rows: a part is compiled for one, and for multiples of that


def run(session: Any, job: Job[GenerateRequest, GenerateInputs], send: Send) -> dict[str, Any]:
    """Generate all texts; the client's result has them, in their order."""
    request = job.request
    declare_generation(session.ledger, request)
    boundary = request.boundary(job.model)
    if session.rank == CLIENT:
        texts = _Client(job, boundary, session.channel, send).texts()
    else:
        texts = _host(job, boundary, session.channel)
    return {**texts, "learned": session.ledger.learned()}


class Cached:
    """A part of a model with a cache of its own, for one text at a time: `models.split.front`,
    `middle` or `back`.
    """

    def __init__(
        self,
        part: Callable[..., Any],
        weights: Any,
        config: ModelConfig,
        layers: int,
        capacity: int,
    ) -> None:
        """Prepare a part with a cache of its own `layers`; `capacity`: rows of the longest text."""
        # What only fills up is written past the text.
        self._positions = -(-capacity // _AT_ONCE) * _AT_ONCE + _AT_ONCE
        config_of = config.with_layers(layers) if layers else None
        self._empty = Block((), ())
        if config_of is not None:
            self._empty = config_of.empty_cache(self._positions)
        self._weights = jax.device_put(weights)
        self._step = _compiled(part, config, self._positions)
        self.begin()

    def begin(self) -> None:
        """Begin another text."""
        self._cache, self._length = self._empty, 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Compute what comes out for the text's next tokens int [n], or rows float32 [n, d]."""
        n = len(x)
        more = 0 if n == 1 else -n % _AT_ONCE
        filled = np.pad(x, ((0, more), *((0, 0) for _ in x.shape[1:])))
        out, self._cache = self._step(self._weights, filled, self._cache, np.int32(self._length))
        self._length += n
        return np.asarray(out[:n])


@functools.cache
def _compiled(part: Callable[..., Any], config: ModelConfig, positions: int) -> Any:
    """Compile step(weights, x, cache, length) of a part whose cache has `positions` rows."""

    def step(weights: Any, x: Any, cache: Block, length: Any) -> Any:
        rows = rows_after(length, x.shape[0], positions)
        # Rows that only fill up may stand past the context.
        rows = rows._replace(positions=jnp.minimum(rows.positions, config.context - 1))
        return part(weights, config, x, rows, cache)

    return jax.jit(step)


# ---- the client


class _Client:
    """Both ends, and the text between them."""

    def __init__(
        self,
        job: Job[GenerateRequest, GenerateInputs],
        boundary: Boundary,
        channel: CountingChannel,
        send: Send,
    ) -> None:
        self._request, self._inputs, self._config = job.request, job.client, job.model
        self._boundary, self._channel, self._send = boundary, channel, send
        send("stage", name="loading the model")
        params = own_params(Path(self._inputs.model_dir), job)
        front, back, self._tokens = _ends(params, job)
        request, split = self._request, self._request.split
        capacity = max(request.capacity(self._config, n) for n in request.prompt_tokens)
        self._front = Cached(parts.front, front, self._config, split.front, capacity)
        self._back = Cached(parts.back, back, self._config, split.back, capacity)
        self._tokenizer = Tokenizer.load(Path(self._inputs.model_dir))
        seed = self._inputs.seed
        self._prg = Prg.from_os() if seed is None else Prg.from_seed(seed, "sampling")
        self._number = 0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._traffic = dict.fromkeys(PHASES, Traffic())

    def texts(self) -> dict[str, Any]:
        """Generate the texts of all prompts."""
        prompts = self._inputs.prompts
        if [len(prompt) for prompt in prompts] != list(self._request.prompt_tokens):
            raise InputError("the prompts have other lengths than the request says")
        texts = []
        for number, prompt in enumerate(prompts, 1):
            texts.append(self._text(number, prompt))
        return {
            "texts": texts,
            "seconds": self._seconds,
            "traffic": {phase: asdict(traffic) for phase, traffic in self._traffic.items()},
        }

    def _text(self, number: int, prompt: list[int]) -> dict[str, Any]:
        emitted = Emitted(
            self._tokenizer,
            Stops.of(self._inputs.stop, self._tokenizer),
            lambda text, drafted: self._send("text", text=text),
        )
        limit = self._request.limit(self._config, len(prompt))
        of = f" of text {number}" if len(self._request.prompt_tokens) > 1 else ""
        self._send("stage", name=f"prefilling {len(prompt)} tokens{of}")
        self._front.begin()
        self._back.begin()
        steps, fresh = 0, prompt
        while not emitted.finish_reason:
            phase = "decode" if steps else "prefill"
            started, before = time.perf_counter(), self._channel.traffic
            emitted.add([self._next(fresh)], limit)
            fresh, steps = emitted.tokens[-1:], steps + 1
            if emitted.finish_reason:
                self._boundary.send_end(self._channel, self._number)
                self._number += 1
            self._seconds[phase] += time.perf_counter() - started
            self._traffic[phase] += self._channel.traffic.since(before)
            self._send("token", tokens=len(emitted.tokens))
        return {
            "text": emitted.text,
            "token_ids": emitted.tokens,
            "finish_reason": emitted.finish_reason,
            "steps": steps - 1,
        }

    def _next(self, tokens: list[int]) -> int:
        """Draw the token after these, which the parts have not seen."""
        x = self._front(np.array(tokens, np.int32))
        self._boundary.send(self._channel, Kind.UP, self._number, x[None])
        y = self._boundary.recv(self._channel, Kind.DOWN, self._number, 1, len(tokens))
        self._number += 1
        logits = self._back(y[0])[-1]
        return int(self._tokens[sampled(logits, self._inputs.sampling, self._prg)])


def sampled(logits: np.ndarray, sampling: Sampling, prg: Prg) -> int:
    """Draw an index from logits [vocab]."""
    if sampling.greedy:
        return int(np.argmax(logits))
    return draw(sampling.distribution(logits), float(prg.uniform(())))


def own_params(directory: Path, job: Job[Any, Any]) -> Params:
    """Load the client's model, which is the session's; InputError when it has another shape."""
    config, params = load_model(directory)
    check_same_shape(config, job.model)
    return params


def _ends(
    params: Params, job: Job[GenerateRequest, GenerateInputs]
) -> tuple[Params, Params, np.ndarray]:
    """Return the weights of front and back, and tau^-1: the token of every label."""
    config, split = job.model, job.request.split
    if not job.client.secrets:
        return *client_ends(params, config, split), np.arange(config.vocab_size)
    secrets = ClientSecrets.load(Path(job.client.secrets), config)
    front, _ = client_ends(params, config, split, secrets.codebook)
    _, table = without_table(front, config)
    tokens = np.argsort(secrets.permutation)
    return with_table(secrets.front, table, config), secrets.back, tokens


# ---- the provider


def middle_of(job: Job[Any, Any]) -> list[Params]:
    """Return the folded weights of the middle's blocks, which a provider has in memory already."""
    held: ProviderInputs = job.provider
    assert held.weights is not None
    shapes = job.request.split.parts(weight_shapes(job.model))[1]
    blocks: list[Params] = mapped(held.weights, shapes)
    return blocks


def tunings_of(job: Job[Any, Any]) -> Tunings | None:
    """Return the provider's folder of the request's tuning, or None for a request without LoRA."""
    request, served = job.request, job.provider.served.read(SplitServed)
    if not request.lora:
        return None
    assert served is not None and served.tunings is not None
    return Tunings(Path(served.tunings), request.tuning)


def _host(
    job: Job[GenerateRequest, GenerateInputs], boundary: Boundary, channel: CountingChannel
) -> dict[str, Any]:
    request, config = job.request, job.model
    blocks = middle_of(job)
    if (tunings := tunings_of(job)) is not None:
        half = HostHalf.of(config, blocks, boundary, request.lora, 1.0)
        tunings.give(half, request.lora, request.round)
        blocks = half.blocks()
    capacity = max(request.capacity(config, n) for n in request.prompt_tokens)
    middle = Cached(parts.middle, blocks, config, request.split.middle(config), capacity)
    number = 0
    for prompt in request.prompt_tokens:
        middle.begin()
        steps, fresh = 0, prompt
        while (x := boundary.recv_rows(channel, number, 1, fresh)) is not None:
            if steps == request.limit(config, prompt):
                raise WireError("the client goes on with a text that is at its limit")
            boundary.send(channel, Kind.DOWN, number, middle(x[0])[None])
            number, steps, fresh = number + 1, steps + 1, 1
        number += 1
    return {}
