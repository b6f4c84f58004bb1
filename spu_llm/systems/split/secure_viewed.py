"""What the provider really receives of the boundary rows when the middle runs on shares: a prefill
and a few steps of texts, whose worker tells of the words that came. The client's worker tells of
the words that they hide. For attacks, which try what can be read off the former, and show on the
latter that they would read them.

The client's rows x stay with it: the first norm is its own work, and what comes is the norm's
result in fixed point under a mask of the client's, uniform over the words whose lowest SPARE_BITS
bits are zero, as those of every result are, in the one message of the first product
(`protocols.arithmetic.product`, `linear`; `spu_llm.offline.silent.ring`).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.ends import Ends
from models.family import ModelConfig, Params
from models.hf import load_model
from models.split import Split
from protocols.arithmetic.product import LIFT
from protocols.bits.convert import as_arith
from spu_llm.compiler.plan import OpCall
from spu_llm.core.channel import Channel
from spu_llm.core.values import CLIENT, PROVIDER, Value
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding import viewed
from spu_llm.systems.decoding.completion import held_weights
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.program import Job, Program, Send
from spu_llm.systems.split.middle import Middle, OpenRows

_NOTHING = JudgeInputs(None, None)


@dataclass(frozen=True)
class ViewedMiddleRequest(viewed.ViewedRequest):
    """Lengths of prompts and steps, as `viewed.ViewedRequest` has them, and the blocks of a split
    model's front and back.
    """

    front: int
    back: int

    @property
    def split(self) -> Split:
        return Split(self.front, self.back)

    def check(self, config: ModelConfig) -> None:
        """Raise InputError when the texts or the split do not fit the model."""
        self.split.check(config)
        super().check(config)


@dataclass(frozen=True)
class ViewedMiddleInputs:
    """texts: each a prompt and the tokens of its steps."""

    texts: list[list[int]]
    model_dir: str


PROGRAM = Program(
    "viewed-split",
    __name__,
    ViewedMiddleRequest,
    ViewedMiddleInputs,
    check=ViewedMiddleRequest.check,
)


def run(
    session: PartySession, job: Job[ViewedMiddleRequest, ViewedMiddleInputs], send: Send
) -> dict[str, Any]:
    """Run the texts. After each text both send an event "seen" with `words`, uint64 [n, d] in
    base64 (`first_words`).
    """
    config, asked = job.model, job.request
    with session.meter.in_phase("offline"):
        weights = held_weights(session, config, job, Middle(asked.split))
    params, texts = None, None
    if session.rank == CLIENT:
        params, texts = load_model(Path(job.client.model_dir))[1], job.client.texts
    for i, length in enumerate(asked.prompt_tokens):
        send("stage", name=f"text {i + 1} of {len(asked.prompt_tokens)}")
        text = None if texts is None else texts[i]
        of_text = params, text, length, asked.steps
        words = first_words(session, config, asked.split, weights, *of_text)
        seen = base64.b64encode(words.tobytes()).decode("ascii")
        send("seen", words=seen, shape=list(words.shape))
    return {"learned": session.ledger.learned()}


def first_words(
    session: PartySession,
    config: ModelConfig,
    split: Split,
    weights: Any,
    params: Params | None,
    text: Sequence[int] | None,
    prompt: int,
    steps: int,
) -> np.ndarray:
    """Return, of the first product of each forward of one text, the words uint64
    [prompt + steps, d] that the provider received; at the client, who brings its parameters and the
    text, the words that were under its masks.
    """
    rows = prompt + steps
    layout = SessionShape(config, (prompt,), (rows,), part=Middle(split))
    decoder = Decoder(session, layout, OpenRows(), weights)
    ends = None if params is None else Ends(config, params, split, rows)

    def up(at: int, count: int) -> Any:
        given = layout.rows_in(count)

        def rows_of() -> Any:
            assert ends is not None and text is not None
            return ends.up(text[at : at + count], at)[None]

        return session.private(CLIENT, rows_of, given.shape, given.dtype)

    words = []
    for at, count in [(0, prompt), *((prompt + i, 1) for i in range(steps))]:
        given = up(at, count)
        phase = session.meter.in_phase("decode" if at else "prefill")
        with phase, _Noted(session) as noted:
            if not at:
                decoder.prefill(given, _NOTHING)
            else:
                # Every row stays: both know the positions.
                decoder.step(given, _NOTHING, np.ones((1, 1), bool))
        words.append(noted.words(count, config.width))
    return np.concatenate(words)


def as_rows(words: np.ndarray, frac_bits: int) -> np.ndarray:
    """Return the rows float32 [n, d] that words stand for in fixed point, as the first product
    takes them.
    """
    return (words.view(np.int64) * 2.0 ** -(frac_bits + LIFT)).astype(np.float32)


class _Noted:
    """The first product of a forward. At the provider the first message that comes, but for those
    of what is made for it on the way; at the client the words that it hides, lifted.
    """

    def __init__(self, session: PartySession) -> None:
        self._party, self._meter, self._executor = session.party, session.meter, session.executor
        self._first, self._hidden = b"", b""

    def words(self, count: int, width: int) -> np.ndarray:
        """Return the words uint64 [count, width] of this party."""
        data = self._first if self._party.rank == PROVIDER else self._hidden
        assert len(data) == 8 * count * width, "the first message is not of the first product"
        return np.frombuffer(data, np.uint64).reshape(count, width)

    def __enter__(self) -> _Noted:
        self._channel: Channel = self._party.channel
        self._party.channel, self._executor.on_op = self, self._hear
        return self

    def __exit__(self, *exc: object) -> None:
        self._party.channel, self._executor.on_op = self._channel, lambda *call: None

    def _hear(self, call: OpCall, operands: Sequence[Value], results: Sequence[Value]) -> None:
        if self._party.rank == CLIENT and not self._hidden and call.op.name == "linear":
            share = as_arith(self._party, operands[0])
            self._hidden = (share.words << np.uint64(LIFT)).tobytes()

    def send(self, data: bytes) -> None:
        self._channel.send(data)

    def recv(self) -> bytes:
        data = self._channel.recv()
        if not self._first and self._meter.phase != "offline":
            self._first = data
        return data
