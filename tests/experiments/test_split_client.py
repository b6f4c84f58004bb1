"""What the client of a split model needs: each kind of work, and how it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.split import client
from models.gpt2 import GPT2Config
from models.hf import save_model
from models.split import Split
from tests.kit.models import VOCAB, save_tokenizer, tiny_params

CONFIG = GPT2Config(VOCAB, n_positions=128, n_embd=16, n_layer=3, n_head=2)
MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(tmp_path / "tiny", CONFIG, tiny_params(CONFIG, 1))
    save_tokenizer(tmp_path / "tiny")
    return tmp_path / "tiny"


PIECES = {
    client.TEXT: {"prompt": 2, "token": 2 * client.TOKENS},
    client.TUNING: {"round": 2},
    client.CODEBOOK: {"codebook": 2},
}


@pytest.mark.parametrize("kind", PIECES)
@pytest.mark.parametrize("split", [Split(1, 1), Split(3, 0)])
def test_each_kind_of_work_is_measured(model: Path, kind: str, split: Split) -> None:
    row = client.measured(model, kind, split, 2)
    assert {name: len(seconds) for name, seconds in row["seconds"].items()} == PIECES[kind]
    assert all(s > 0 for seconds in row["seconds"].values() for s in seconds)
    assert row["ready"] >= row["base"] > 50 * MIB and row["working"] > 50 * MIB


def test_the_whole_model_is_all_blocks_in_front() -> None:
    assert [*client.cells(CONFIG, Split(1, 1))] == [
        (client.TEXT, client.ENDS, (1, 1)),
        (client.TEXT, client.WHOLE, (3, 0)),
        (client.TUNING, client.ENDS, (1, 1)),
        (client.TUNING, client.WHOLE, (3, 0)),
        (client.CODEBOOK, client.ENDS, (1, 1)),
    ]


@pytest.mark.slow
def test_memory_is_of_a_process_of_its_own(model: Path) -> None:
    """What this process has had does not count."""
    held = bytearray(600 * MIB)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    own = client.measured(model, client.CODEBOOK, Split(1, 1), 2)
    of_process = client.apart(model, client.CODEBOOK, Split(1, 1), 2)
    assert own["base"] > 600 * MIB > of_process["ready"] > of_process["base"] > 50 * MIB


def test_the_table_has_medians_and_quartiles() -> None:
    row: dict[str, Any] = {
        "kind": client.TEXT,
        "part": client.ENDS,
        "base": 200e6,
        "ready": 450e6,
        "working": 300e6,
        "seconds": {"prompt": [2.0, 1.0, 3.0], "token": [0.01, 0.03, 0.02]},
    }
    result = {"model": "m", "split": [1, 4], "blocks": 30, "repeat": 3, "rows": [row]}
    lines = client.table(result).splitlines()
    assert "m: 1 + 4 of 30 blocks" in lines[0] and "done 3 times" in lines[0]
    assert lines[-1] == (
        "| a text | client's ends | 200 MB | 450 MB | 300 MB | "
        "prompt 2 s (1.5 s to 2.5 s), token 20 ms (15 ms to 25 ms) |"
    )
