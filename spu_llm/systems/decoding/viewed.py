"""What both parties hold of the first layer's attention: a prefill and a few steps of a completion,
whose workers tell of their own shares. For attacks, which try what one of them learns from its own,
and what both would from all.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.family import ModelConfig
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.variants import verifier
from spu_llm.compiler.plan import OpCall
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, Arith, Value
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.completion import held_weights
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.program import Job, Program, Send

VERIFIER = verifier("token", Sampling(1.0))
_SCOPE = "attention/attention"


@dataclass(frozen=True)
class ViewedRequest:
    """Lengths of prompts, one after the other, and steps of one token each after every one."""

    prompt_tokens: tuple[int, ...]
    steps: int

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when prompts and steps do not fit the model."""
        if self.steps < 0 or min(self.prompt_tokens, default=0) < 1:
            raise InputError("there is nothing to run")
        rows = max(self.prompt_tokens) + self.steps
        if rows > config.context:
            raise InputError(f"{rows} tokens do not fit this model")


@dataclass(frozen=True)
class ViewedInputs:
    """`tokens`: what the steps after each prompt are given."""

    prompts: list[list[int]]
    tokens: list[list[int]]


PROGRAM = Program("viewed", __name__, ViewedRequest, ViewedInputs, check=ViewedRequest.check)


def run(session: PartySession, job: Job[ViewedRequest, ViewedInputs], send: Send) -> dict[str, Any]:
    """Run the prompts and steps, and after each forward send an event "seen" with this party's
    shares, in the words of `_Noted`, and how many rows it had.
    """
    config, asked = job.model, job.request
    own = Prg.from_os()
    streams = Streams(own.child("drafting"), own.child("sampling"))
    noted = _Noted()
    session.executor.on_op = noted.hear
    with session.meter.in_phase("offline"):
        weights = held_weights(session, config, job)

    def inputs(decoder: Decoder) -> JudgeInputs:
        def drafted() -> list[Any]:
            return [VERIFIER.client_input([], np.zeros((0, config.vocab_size)), 0, streams)]

        return decoder.inputs(1, own, drafted)

    def ids(work: Any, count: int, *at: int) -> Any:
        return session.private(CLIENT, work, (1, count), np.int32, *at)

    for i, length in enumerate(asked.prompt_tokens):
        send("stage", name=f"prompt {i + 1} of {len(asked.prompt_tokens)}")
        layout = SessionShape(config, (length,), (length + asked.steps,))
        decoder = Decoder(session, layout, VERIFIER, weights)
        prompt = ids(lambda i: [job.client.prompts[i]], length, i)
        decoder.prefill(prompt, inputs(decoder))
        send("seen", rows=length, **noted.taken())
        for step in range(asked.steps):
            token = ids(lambda i, step: [[job.client.tokens[i][step]]], 1, i, step)
            # Every row stays: both know the positions, more than a completion's default shows.
            decoder.step(token, inputs(decoder), np.ones((1, 1), bool))
            send("seen", rows=1, **noted.taken())
    return {"learned": session.ledger.learned()}


class _Noted:
    """The words uint64 of this party's shares in the first attention of a forward:

    query   [kv head, group * row, head_dim], scaled
    shift   [kv head * group * row]: the largest coarse score, `bits` of `shift_bits`
    mass    [kv head * group * row]: the sum of the weights
    out     [kv head * group * row, head_dim]
    """

    def __init__(self) -> None:
        self._words: dict[str, np.ndarray] = {}
        self._bits = 0

    def hear(self, call: OpCall, operands: Sequence[Value], results: Sequence[Value]) -> None:
        if not call.scope.endswith(_SCOPE) or "out" in self._words:
            return
        if call.op.name == "times_rows":
            self._note("query", operands[0])
        elif call.op.name == "maximum":
            self._note("shift", results[0])
        elif call.op.name == "narrow" and "shift" in self._words:
            self._note("mass", operands[0])
        elif call.op.name in ("scale_rows", "field_scale_rows"):
            self._note("out", results[0])

    def _note(self, name: str, value: Value) -> None:
        assert isinstance(value, Arith)
        if name not in self._words:
            self._words[name] = value.words
            self._bits = value.bits if name == "shift" else self._bits

    def taken(self) -> dict[str, Any]:
        """Return the words as fields of an event, and forget them."""
        words, self._words = self._words, {}
        assert len(words) == 4, f"the first attention showed {sorted(words)} alone"
        return {
            "words": {n: base64.b64encode(w.tobytes()).decode("ascii") for n, w in words.items()},
            "shapes": {n: list(w.shape) for n, w in words.items()},
            "shift_bits": self._bits,
        }
