"""The program, as supervisors know it and as workers run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from models.family import ModelConfig
from protocols.functions.argmax import argmax
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import InputError
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.program import Job, Nothing, Program, ProviderInputs, Send

BITS = 20  # of a number


@dataclass(frozen=True)
class Guess:
    """The client's number."""

    number: int


@dataclass(frozen=True)
class Secret:
    """The provider's number."""

    number: int


def admit(request: Nothing, held: ProviderInputs, model: ModelConfig) -> None:
    if held.served.read(Secret) is None:
        raise InputError("the provider has no number to compare with")


PROGRAM = Program("larger", __name__, inputs=Guess, text=False, admit=admit)


def _larger(guess: Array, secret: Array) -> Array:
    place = argmax(jnp.stack([guess, secret])[None], bits=BITS)
    return reveal(place, to=Owner.CLIENT, label="whose number is larger")


LARGER = SecureFunction(_larger, (Owner.CLIENT, Owner.PROVIDER), "larger")


def run(session: PartySession, job: Job[Nothing, Guess], send: Send) -> dict[str, Any]:
    session.ledger.declare(CLIENT, "whose number is larger")

    def secret() -> int:
        own = job.provider.served.read(Secret)
        assert own is not None
        return own.number

    guess = session.private(CLIENT, lambda: job.client.number, (), np.int32)
    place = session.get(
        session.call(LARGER, guess, session.private(PROVIDER, secret, (), np.int32))
    )
    learned = session.ledger.learned()
    return {"learned": learned, "larger": None if place is None else bool(place[0] == 0)}
