"""What a provider serves is a plug-in: a system of one folder and one line (`stub/toy_system`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.service import programs
from spu_llm.service.client import Server, run_as_client
from spu_llm.service.provider import ServeOptions, serve
from spu_llm.systems.decoding.records import COMPLETION, ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.program import Nothing
from spu_llm.systems.served import ServedSystem
from tests.kit.pair import Pair
from tests.kit.processes import STUB


@contextmanager
def provider(model: Path, system: ServedSystem) -> Iterator[Server]:
    """Yield a provider of one session in this process, its worker in another; what ended it is
    raised.
    """
    options = ServeOptions.rehearsal(model, system=system)
    ports: Queue[int] = Queue()
    errors: list[Exception] = []

    def run() -> None:
        try:
            serve(options, lambda line: None, ports.put)
        except Exception as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Server("127.0.0.1", ports.get(timeout=60), "local")
    finally:
        thread.join(60)
    if errors:
        raise errors[0]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the toy system, registered; its workers find it where this process does."""
    monkeypatch.syspath_prepend(str(STUB))
    monkeypatch.setitem(programs.SERVED, "larger", "toy_system.program:PROGRAM")
    program, served = map(import_module, ("toy_system.program", "toy_system.served"))
    return SimpleNamespace(program=program.PROGRAM, guess=program.Guess, number=served.Number)


@pytest.mark.parametrize("guess", [pytest.param(41, marks=pytest.mark.slow), 43])
def test_a_system_of_one_folder_and_one_line_is_served(pair: Pair, toy: Any, guess: int) -> None:
    with provider(pair.private, toy.number(42)) as server:
        outcome, _ = run_as_client(server, toy.program, Nothing(), toy.guess(guess))
    assert outcome.result["larger"] is (guess > 42)
    opened = "whose number is larger: 1 x 64 bit in 1 openings"
    assert outcome.result["learned"] == {
        "client": ["whose number is larger", opened],
        "provider": [],
    }


def test_a_provider_without_the_system_refuses_its_program(pair: Pair, toy: Any) -> None:
    with pytest.raises(InputError, match="no number to compare with"):
        with provider(pair.private, ServedSystem()) as server:
            run_as_client(server, toy.program, Nothing(), toy.guess(1))


@pytest.mark.slow
def test_a_system_beside_a_model_leaves_its_completions(pair: Pair, toy: Any) -> None:
    tokenizer = Tokenizer.load(pair.private)
    inputs: Any = ClientInputs(tokenizer.encode("ab"), str(pair.private))
    request = Request(len(inputs.prompt), 1, 0, temperature=0.0)
    with provider(pair.private, toy.number(42)) as server:
        outcome, _ = run_as_client(
            server, COMPLETION, request, inputs, tokenizer=tokenizer, reads=[pair.private]
        )
    assert len(outcome.result["token_ids"]) == 1
