"""How far correlated randomness goes, in words."""

from __future__ import annotations

from typing import Any

import pytest

from spu_llm.api.preparation import Tokens
from spu_llm.app.stock_tables import enough, made_line, prepared_table


def result(**changes: Any) -> dict[str, Any]:
    """Return the result of a `prepare` with seven drafts."""
    row = {"available_units": 2048, "made_units": 1024, "seconds": 1.5, "bytes": 3_000_000}
    row |= {"stored_bytes": 400_000}
    return {
        "steps": 12,
        "tokens": {"least": 13, "most": 97},
        "correlations": [row | {"kind": f"gate carry {i}"} for i in (1, 2)]
        + [row | {"kind": "pair"}],
        "lacking_bytes": 0,
        "room_bytes": {"client": None, "provider": None},
        "seconds": {"offline": 20.0},
        "bytes": {"offline": {"client_to_provider": 6_000_000, "provider_to_client": 3_000_000}},
        "config": {"request.prompt_tokens": 5},
    } | changes


def test_a_step_gives_one_token_more_than_drafts_stay() -> None:
    assert Tokens.of(12, 7) == Tokens(13, 97)
    assert Tokens.of(12, 0) == Tokens(13, 13)
    assert Tokens.of(0, 7) == Tokens(1, 1)


def test_the_stock_is_told_in_tokens() -> None:
    text = "enough for a prompt of 5 tokens and 12 secure steps: 13 tokens"
    assert enough(result()) == f"{text} if no draft stays, up to 97"
    assert enough(result(tokens={"least": 13, "most": 13})) == text


@pytest.mark.parametrize(
    ("client", "provider", "said"),
    [
        (9, None, "; --disk leaves no room for more"),
        (9, 9, "; --disk leaves no room for more"),
        (None, 2_500_000, "; the provider had room for 2.5 MB, not for more"),
        (2_500_001, 2_500_000, "; the provider had room for 2.5 MB, not for more"),
    ],
)
def test_whose_disk_is_full_is_told(client: int | None, provider: int | None, said: str) -> None:
    rooms = {"client": client, "provider": provider}
    assert enough(result(lacking_bytes=1, room_bytes=rooms)).endswith(said)
    assert said not in enough(result(room_bytes=rooms))


def test_what_was_made_is_told_by_kind_and_in_a_line() -> None:
    lines = prepared_table(result()).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["correlations", "units", "made", "seconds", "MB", "on", "disk"],
        ["gate", "carry", "(2", "kinds)", "4,096", "2,048", "3.0", "6.0", "0.8", "MB"],
        ["pair", "2,048", "1,024", "1.5", "3.0", "0.4", "MB"],
    ]
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[3:] == ["made in 20.0 s with 9.0 MB", enough(result())]
    assert (
        made_line(result())
        == f"made correlated randomness in 20.0 s with 9.0 MB: {enough(result())}"
    )


@pytest.mark.parametrize("made", [0, 1])
def test_a_line_says_when_nothing_was_made(made: int) -> None:
    rows = [row | {"made_units": made} for row in result()["correlations"]]
    assert made_line(result(correlations=rows)).startswith("made nothing: ") == (made == 0)
