"""Processes of the study of confidential prompting that the product has none of: a model's owner
who sees every prompt, and an engine of vault mode that can be stopped between prefill and decoding.

They talk in lines of JSON with the study (`experiments.confidential.systems`), and end when
it does. Their arithmetic is vault mode's: the same engine, the same prefill.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from models.family import ModelConfig
from models.hf import load_folded
from models.partials import Partial
from models.stages import stages_of
from spu_llm.app.printing import tell
from spu_llm.core.errors import PeerError
from spu_llm.core.freed import give_back
from spu_llm.systems.confidential.engine import Engine, Spent
from spu_llm.systems.confidential.held import Held
from spu_llm.vault.engine import EngineOptions, serve

GATE_S = 25.0  # between a prefill and the first step; a vault waits somewhat longer


class Nobody:
    """No lane has keys and values elsewhere."""

    def ask(self, layer: int, query: np.ndarray) -> None:
        self._shape = query.shape

    def answer(self, layer: int) -> Partial:
        none = np.zeros(self._shape[:-1], np.float32)
        return Partial(np.zeros(self._shape, np.float32), none, none)


def texts(
    engine: Engine, prompts: Sequence[Sequence[int]], count: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the next token of every prompt, greedy, `count` times, with the logits [lane, vocab]
    that it is drawn from. Prompts are of one length, and all their rows are the engine's.
    """
    config, length = engine.config, len(prompts[0])
    held = Held(config, prompts, range(length))
    logits = held.fill(engine.weights)
    lanes = [engine.join() for _ in prompts]
    try:
        for lane in lanes:
            engine.place(lane, length)
        for layer in range(config.layers):
            keys, values = held.migrated(layer)
            for i, lane in enumerate(lanes):
                engine.give(lane, layer, keys[i], values[i])
        del held, keys, values
        for left in reversed(range(count)):
            tokens = [int(token) for token in logits.argmax(axis=-1)]
            yield tokens, logits
            if left:
                logits = engine.step(lanes, tokens, Nobody())
    finally:
        for lane in lanes:
            engine.leave(lane)


def compiled(config: ModelConfig, weights: Any, lanes: int) -> None:
    """Compile every piece of a step for every number of lanes up to this one."""
    stages, count = stages_of(config), 1
    while True:
        zeros = np.zeros(count, np.int32)
        x = stages.embed(weights, zeros, zeros)
        block = weights["blocks"][0]
        query = stages.ask(block, x, zeros).query
        stages.head(weights, stages.answer(block, x, np.zeros(query.shape, np.float32)))
        if count >= lanes:
            return
        count *= 2


def engine_of(model: Path, lanes: int) -> Engine:
    """Return an engine with this model, its weights folded."""
    config, weights = load_folded(model)
    give_back()
    return Engine(config, weights, lanes)


# ---- the processes


def main() -> None:
    """Run the process that the command line names: ROLE MODEL LANES."""
    role, model, lanes = sys.argv[1:]
    {"owner": _owner, "engine": _engine}[role](Path(model), int(lanes))


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _heard() -> Iterator[dict[str, Any]]:
    """Yield what the study says, until it ends."""
    for line in iter(sys.stdin.readline, ""):
        yield json.loads(line)


def _owner(model: Path, lanes: int) -> None:
    """Run a model's owner: told `prompts` and `count`, it says `tokens` step by step; `go` opens
    the second step.
    """
    engine = engine_of(model, lanes)
    compiled(engine.config, engine.weights, lanes)
    _say(ready=True)
    heard = _heard()
    for asked in heard:
        for i, (tokens, _) in enumerate(texts(engine, asked["prompts"], asked["count"])):
            _say(tokens=tokens)
            if i == 0:
                next(heard)


class _Gated(Engine):
    """Steps wait while the gate is shut, so that all prompts are there before the first one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate, self.steps = threading.Event(), 0

    def step(self, *args: Any) -> np.ndarray:
        if not self.gate.wait(GATE_S):
            raise PeerError("the study has not opened the gate")
        logits = super().step(*args)
        self.steps += 1
        return logits


def _engine(model: Path, lanes: int) -> None:
    """Run `spu-llm vault serve --insecure` with a gate: told `shut`, `go`, or `spent`, it says what
    the steps since it was shut were spent on.
    """
    made: list[_Gated] = []

    def make(config: ModelConfig, weights: Any, room: int) -> Engine:
        compiled(config, weights, room)
        made.append(_Gated(config, weights, room))
        return made[0]

    def serving() -> None:
        options = EngineOptions(model, "127.0.0.1", 0, lanes, None)
        serve(options, tell, lambda port: _say(port=port), make)

    threading.Thread(target=serving, daemon=True).start()
    for asked in _heard():
        (engine,) = made
        if asked["what"] == "shut":
            engine.gate.clear()
            engine.spent, engine.steps = Spent(), 0
        elif asked["what"] == "go":
            engine.gate.set()
        else:
            _say(steps=engine.steps, **asdict(engine.spent))
