"""A tiny model pair for the studies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.chats import chatting
from tests.kit.models import make_pair


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of the private and the public model."""
    return make_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def chat_model(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the private model's directory, as one that chats."""
    return chatting(tiny_pair[0], tmp_path_factory.mktemp("chat") / "model")
