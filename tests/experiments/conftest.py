"""A tiny model pair for the studies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_pair


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of the private and the public model."""
    return make_pair(tmp_path_factory.mktemp("tiny"))
