"""A gateway before a client of the provider that is made up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spu_llm.gateway import kept, running
from tests.gateway.fakes import Fake, Talk, served


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def port(fake: Fake) -> Iterator[int]:
    with served(fake) as at:
        yield at


@pytest.fixture
def talks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Talk]]:
    monkeypatch.setattr(kept, "Conversation", Talk)
    monkeypatch.setattr(Talk, "made", [])
    yield Talk.made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SPARE_AFTER_S", 0.05)
