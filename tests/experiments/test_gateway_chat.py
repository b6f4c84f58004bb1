"""The study of chats through the gateway: its table and its criterion."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.gateway import chatting
from spu_llm.app import cli


def row(turn: int, *, stocked: bool, first_text: float = 3.0, **more: Any) -> dict[str, Any]:
    cost = {
        "seconds": {"prefill": 2.0, "decode": 4.0, "offline": 0.5},
        "bytes": {"online": 3_000_000, "offline": 50_000_000},
    }
    return {
        "chat": 0,
        "stocked": stocked,
        "turn": turn,
        "prepared": 20.0,
        "how": "answered",
        "message": "",
        "first_text": first_text,
        "seconds": 8.0,
        "prompt_tokens": 30,
        "cached_tokens": 10,
        "tokens": 16,
        "cost": cost,
        **more,
    }


def test_a_table_has_each_turn_and_the_criterion() -> None:
    rows = [row(turn, stocked=stocked) for turn in (0, 1) for stocked in (True, False)]
    text = chatting.table({"rows": rows})
    assert "| 1, 2 | ready | 10, 20, 16 | 3 | 2 | 1.50 | 4 | 0.5 | 8 | 2 | 3, 50 | 20 |" in text
    assert "not stocked: first text, s: 3 (3 to 3); tokens a second: 2 (2 to 2)" in text
    assert "2 at most: 1.50 (median of 2 turns; 1.50 at most): holds" in text
    rows[0]["first_text"] = 4.5
    assert "2.25 at most): does not hold" in chatting.table({"rows": rows})
    rows[1]["first_text"] = 100.0  # not stocked
    assert "2.25 at most): does not hold" in chatting.table({"rows": rows})


def test_a_turn_without_an_answer_is_a_failure() -> None:
    rows = [row(0, stocked=True), row(1, stocked=True, how="error", message="the peer has gone")]
    assert chatting.failures({"rows": rows}) == ["chat 1, turn 2: error: the peer has gone"]
    assert "1, 2" not in chatting.table({"rows": rows})


@pytest.mark.parametrize(
    "option", ["--chats 3", "--turns 6", "--answer-tokens 0", "--ahead-turn 8", "--network moon"]
)
def test_options_out_of_range(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", "gateway-chat", *option.split()])
    assert end.value.code == 2 and "Traceback" not in capsys.readouterr().err
