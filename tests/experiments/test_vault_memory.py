"""The study of a vault's memory: what it computes is what a vault keeps, and its table."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from experiments.confidential import vault_memory
from experiments.confidential.study import row_bytes
from experiments.confidential.vault_memory import (
    LENGTH,
    SECRET,
    MemoryCell,
    MemoryPlan,
    cells_of,
    kept_rows,
    prompts_of,
)
from models.family import family_of
from spu_llm.systems.confidential.compact import Compact
from spu_llm.systems.confidential.held import Held
from tests.kit.models import LLAMA, tiny_params


@pytest.mark.parametrize("compact", [False, True])
def test_a_vault_keeps_as_many_rows_as_are_computed(compact: bool) -> None:
    config = LLAMA.with_layers(2)
    cell = MemoryCell("shipped", 3, compact)
    prompts, secret = prompts_of(cell, config.vocab_size)
    assert len(prompts) == 4 and {len(row) for row in prompts} == {LENGTH}
    around = np.delete(np.array(prompts), secret, axis=1)
    assert len(secret) == SECRET and (around == around[0]).all()
    held = Compact(config, prompts, [], secret, 0) if compact else Held(config, prompts)
    held.fill(family_of(config).fold(tiny_params(config, 1), config))
    if isinstance(held, Compact):
        kept = held.floats
    else:
        kept = sum(a.size for a in (*held._keys, *held._values))
    assert 4 * kept == kept_rows(cell) * row_bytes(config)


def test_each_number_of_fakes_is_exact_and_compact() -> None:
    cells = cells_of(MemoryPlan((0, 8), (0,)))
    assert cells == [
        MemoryCell("shipped", 0, False),
        MemoryCell("shipped", 8, False),
        MemoryCell("shipped", 8, True),
        MemoryCell("larger", 0, False),
    ]


def test_the_table_compares_with_a_vault_without_fakes() -> None:
    rows = [
        {**asdict(cell), "computed": 2e6, "rss": 0, "pss": 0, "own": own, "peak": 9e6}
        for cell, own in zip(cells_of(MemoryPlan((0, 8), ())), (3e6, 7e6, 4e6), strict=True)
    ]
    lines = vault_memory.table({"rows": rows}).splitlines()
    assert lines[2] == "| shipped | 0 | exact | 2 MB | 3 MB | – | 9 MB |"
    assert lines[3] == "| shipped | 8 | exact | 2 MB | 7 MB | 4 MB | 9 MB |"
    assert lines[4] == "| shipped | 8 | compact | 2 MB | 4 MB | 1 MB | 9 MB |"
