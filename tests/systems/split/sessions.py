"""Both halves of a split program in threads, and a tiny model to split."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.gpt2 import GPT2Config
from models.hf import load_model, save_model
from models.split import Split, ends_digest
from spu_llm.core.channel import Channel, MemoryChannel
from spu_llm.core.errors import PeerError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.service.plain_session import PlainSession
from spu_llm.systems.program import Job, Program, ProviderInputs
from spu_llm.systems.split.served import SplitModel
from tests.kit.models import VOCAB, endless, save_tokenizer, tiny_params

CONFIG = GPT2Config(VOCAB, n_positions=64, n_embd=16, n_layer=3, n_head=2)
SPLIT = Split(1, 1)


def make_model(directory: Path) -> Path:
    """Return a model of three blocks, and its tokenizer."""
    directory.mkdir(parents=True)
    save_model(directory, CONFIG, endless(tiny_params(CONFIG, 1)))
    save_tokenizer(directory)
    return directory


def digest(model: Path) -> str:
    return ends_digest(load_model(model)[1], SPLIT)


def served(model: Path, mode: str, tunings: Path | None = None) -> ProviderInputs:
    """Return what a provider brings."""
    config, params = load_model(model)
    system = SplitModel(mode, SPLIT, tunings)
    weights = system.place(params, config)
    return ProviderInputs(str(model), weights=weights, served=system.offer(tunings).served)


class Ended(Exception):
    """Stands for a process that is killed."""


class Fragile:
    """A channel whose owner is killed when it sends its message number `last`, or has received it;
    the peer hears of it.
    """

    def __init__(self, inner: MemoryChannel, last: int, *, receiving: bool) -> None:
        self._inner, self._last, self._receiving = inner, last, receiving
        self._sent = self._received = 0

    def send(self, data: bytes) -> None:
        self._sent += 1
        if not self._receiving and self._sent == self._last:
            self._die()
        self._inner.send(data)

    def recv(self) -> bytes:
        data = self._inner.recv()
        if data == b"":
            raise PeerError("the peer has ended")
        self._received += 1
        if self._receiving and self._received == self._last:
            self._die()
        return data

    def _die(self) -> None:
        raise Ended


def run_both(
    program: Program,
    request: Any,
    inputs: Any,
    held: ProviderInputs,
    wrap: Callable[[int, MemoryChannel], Any] = lambda rank, channel: channel,
    inside: Callable[[int, Channel], Channel] = lambda rank, channel: channel,
) -> tuple[list[Any], list[BaseException | None]]:
    """Results and errors of client and provider. `wrap` gets the wire, with what is sealed on it;
    `inside` what the programs themselves send and receive.
    """
    ends = MemoryChannel.pair()
    run = program.load()
    results: list[Any] = [None, None]
    errors: list[BaseException | None] = [None, None]
    jobs: list[Job[Any, Any]] = [
        Job(request, CONFIG, inputs, None),
        Job(request, CONFIG, None, held),
    ]

    def party(rank: int) -> None:
        try:
            session = PlainSession(rank, wrap(rank, ends[rank]), "session")
            session.channel.inner = inside(rank, session.channel.inner)
            results[rank] = run(session, jobs[rank], lambda event, **fields: None)
            session.close()
        except BaseException as exc:
            errors[rank] = exc
            ends[rank].send(b"")

    threads = [threading.Thread(target=party, args=(rank,)) for rank in (CLIENT, PROVIDER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors


def finished(results: list[Any], errors: list[BaseException | None]) -> list[Any]:
    """Return both results; a party's error otherwise."""
    for error in errors:
        if error is not None:
            raise error
    return results
