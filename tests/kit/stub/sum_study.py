"""A program without text and without SPU: both parties learn the sum of their numbers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from models.family import ModelConfig
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.service.plain_session import PlainSession
from spu_llm.systems.program import Job, Program, Send


@dataclass(frozen=True)
class SumRequest:
    times: int
    words: tuple[str, ...]

    def check(self, model: ModelConfig) -> None:
        if self.times > model.context:
            raise InputError(f"at most {model.context} times, found {self.times}")


@dataclass(frozen=True)
class SumInputs:
    numbers: list[int]
    label: str | None = None


PROGRAM = Program(
    "sum", __name__, SumRequest, SumInputs, check=SumRequest.check, text=False, spu=None
)


def run(session: PlainSession, job: Job[SumRequest, SumInputs], send: Send) -> dict[str, Any]:
    own = sum(job.client.numbers) if session.rank == CLIENT else len(job.provider.model_dir)
    peers = 0
    for i in range(job.request.times):
        session.channel.send(own.to_bytes(8, "little"))
        peers = int.from_bytes(session.channel.recv(), "little")
        send("exchanged", number=i)
    session.ledger.declare(PROVIDER, "the client's sum")
    return {
        "sum": own + peers,
        "messages": session.channel.traffic.messages,
        "with_spu": "spu" in sys.modules,
        "learned": session.ledger.learned(),
    }
