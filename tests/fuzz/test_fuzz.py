"""Every parser on a few hundred inputs; `python -m tests.fuzz` goes on for as long as one likes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.core.errors import ManifestMismatch, PeerError, PoolError
from tests.fuzz.changing import changed
from tests.fuzz.targets import SEEDS, TARGETS

REFUSED = Path(__file__).parents[1] / "vectors" / "refused" / "wire.json"
ROUNDS = 300


def test_every_target_takes_its_seed() -> None:
    """But for that of who lacks the key."""
    assert TARGETS.keys() == SEEDS.keys()
    assert {name for name in TARGETS if not TARGETS[name](SEEDS[name]())} == {"sealed"}


@pytest.mark.parametrize("name", TARGETS)
def test_changed_bytes_are_taken_or_refused(name: str) -> None:
    source, seed = random.Random(name), SEEDS[name]()
    inputs = [seed, b"", *(changed(seed, source) for _ in range(ROUNDS))]
    taken = sum(map(TARGETS[name], inputs))
    assert taken < ROUNDS / 2, "it refuses next to nothing"


@settings(max_examples=100)
@given(data=st.binary(max_size=200), name=st.sampled_from(sorted(TARGETS)))
def test_any_bytes_are_taken_or_refused(data: bytes, name: str) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("vector", json.loads(REFUSED.read_text()), ids=lambda v: v["name"])
def test_recorded_bytes_are_refused(vector: dict[str, str]) -> None:
    """For implementations in other languages, too: what each of these must not take, and why."""
    from tests.fuzz import refusing

    with pytest.raises((PeerError, PoolError, ManifestMismatch), match=vector["why"]):
        refusing.PARSERS[vector["parser"]](bytes.fromhex(vector["bytes"]))
