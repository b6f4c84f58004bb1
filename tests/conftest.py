"""Shared fixtures. Every test runs JAX with this project's settings, whatever the environment's."""

from __future__ import annotations

from collections.abc import Iterator

from spu_llm.core.jax_settings import settle

settle()

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from spu_llm.runtime.simulation import Simulation  # noqa: E402
from tests.kit.pair import pair, start, start_shared  # noqa: E402

__all__ = ["pair", "start", "start_shared"]

# Compilation makes the first example slow and times on shared machines mean little.
settings.register_profile("spu-llm", deadline=None)
settings.load_profile("spu-llm")


@pytest.fixture(scope="session", autouse=True)
def hints_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands keep hints in a place of their own, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def simulation() -> Iterator[Simulation]:
    """Yield both parties as threads on real Cheetah; set up once, since oblivious transfer is."""
    with Simulation() as running:
        yield running


@pytest.fixture(scope="module")
def own_simulation() -> Iterator[Simulation]:
    """Yield one for a file's weights alone: a session has one matrix of a name and a shape, so in
    `simulation` those of `tests.systems.decoding.test_generate` are the only ones that are named as
    theirs.
    """
    with Simulation() as running:
        yield running
