"""What a split takes off a step: the issue's aims for the shipped private model, split 1,1."""

from __future__ import annotations

import pytest

from experiments.split import cost as split_cost
from models.hf import load_config
from models.split import Split
from spu_llm.api.defaults import shipped


@pytest.mark.slow
def test_the_middle_alone_takes_less_than_half() -> None:
    """A drafted step of 8 positions: at most 0.5 of the seconds online on lan, and at most 0.4 of
    the correlated randomness, however that is counted.
    """
    result = split_cost.compared(load_config(shipped("private")), Split(1, 1))
    actual = split_cost.shares(result)
    assert actual["seconds"] <= 0.5
    assert max(actual[name] for name in ("stored", "offline bytes", "offline seconds")) <= 0.4
    assert [line.count("|") for line in split_cost.table(result).splitlines()] == [11] * 6
