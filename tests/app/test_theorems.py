"""`watermark power` and `split bounds`: the papers' theorems as numbers, by commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spu_llm.app import cli
from tests.kit.command_line import refused

QWEN = "151936"


def printed(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> tuple[str, Any]:
    """Return what a command prints, and what it writes as JSON."""
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--json", str(file)])
    assert not end.value.code
    return capsys.readouterr().out, json.loads(file.read_text())


def test_power_of_a_mark(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Theorem 4.4's oracles (spec, 6), and Theorem 4.2's for candidates of one token alone (5)."""
    command = ["watermark", "power", "--tokens", "100", "--tokens", "250"]
    out, result = printed(
        capsys, tmp_path / "a.json", *command, "--candidates", "16", "--chunk", "50"
    )
    rows = result["rows"]
    assert [row["true_positives"] for row in rows] == pytest.approx([0.68649, 0.999988], abs=5e-6)
    assert [row["auc_at_least"] for row in rows] == [None, None]
    assert "68.65 %" in out and "–" in out and "0.9859" in out
    _, result = printed(capsys, tmp_path / "b.json", *command, "--candidates", "1024")
    assert [row["auc_at_least"] for row in result["rows"]] == pytest.approx(
        [0.9868, 0.9947], abs=5e-5
    )
    least = "--candidates", "16", "--entropy", "1.0"
    _, less = printed(capsys, tmp_path / "c.json", *command, *least)
    assert less["rows"][0]["auc_at_least"] < result["rows"][0]["auc_at_least"]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--tokens", "0", "must be 1 to"),
        ("--candidates", "1", "one marks nothing"),
        ("--chunk", "51", "the fewest --tokens, 50"),
        ("--alpha", "1", "between 0 and 1"),
        ("--alpha", "nan", "between 0 and 1"),
        ("--entropy", "2.8", "log 16 = 2.773"),
    ],
)
def test_power_refuses(
    capsys: pytest.CaptureFixture[str], option: str, value: str, words: str
) -> None:
    assert words in refused(capsys, "watermark", "power", option, value)


def test_bounds_of_a_split(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Oracles 6 and 7 of the spec: as stated, and as they hold."""
    command = ["split", "bounds", "--vocab-size", QWEN]
    out, result = printed(capsys, tmp_path / "a.json", *command)
    said = result["bounds"]
    assert said["token_stated"][1] == pytest.approx(0.74437, abs=5e-6)
    assert said["prompt_stated"] == pytest.approx(-5.13, abs=5e-3)
    assert said["neighbours_stated"] == pytest.approx(-12.98, abs=1e-2)
    assert said["prompt_holds"] == pytest.approx(0, abs=1e-9)
    assert "10^-5.13" in out and "10^-12.98" in out and "0.74437" in out
    _, result = printed(capsys, tmp_path / "b.json", *command, "--epsilon", "9")
    assert 10 ** result["bounds"]["prompt_holds"] == pytest.approx(9.5e-14, rel=0.01)
    _, result = printed(capsys, tmp_path / "c.json", *command, "--epsilon", "9", "--prior", "0.05")
    assert result["bounds"]["prompt_holds"] > -1, "frequent tokens are read all the same"


def test_bounds_are_of_a_model_s_vocabulary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An equation whose base is negative is said to be 0."""
    _, result = printed(capsys, tmp_path / "a.json", "split", "bounds")
    assert result["vocab"] > 1000
    tiny = ["--vocab-size", "3", "--epsilon", "1", "--advantage", "1"]
    out, result = printed(capsys, tmp_path / "b.json", "split", "bounds", *tiny)
    assert result["bounds"]["neighbours_stated"] is None and "inf" not in out


def test_what_mechanisms_spend_on_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Eq. 2 does not sum to one, and Theorem 1 does not hold: ARR spends more than it is given."""
    command = ["split", "spent", "--tokens", "64", "--epsilon", "0.01"]
    out, result = printed(capsys, tmp_path / "a.json", *command)
    spent = result["mechanisms"]
    assert spent["arr"]["most_sum"] < 1
    for name in ("arr-renormalised", "grr", "exponential"):
        assert spent[name]["least_sum"] == pytest.approx(1) == spent[name]["most_sum"]
    assert spent["grr"]["between"] == pytest.approx(0.01)
    assert spent["exponential"]["between"] <= 0.01 + 1e-12
    # What the proof is about, ratios within a token's row, is another thing than what is spent.
    assert spent["arr"]["between"] > 0.01 and spent["arr-renormalised"]["between"] > 0.01
    assert f"{spent['arr']['between']:.5g}" in out


@pytest.mark.parametrize(
    ("option", "value"),
    [("--tokens", "1"), ("--tokens", "5000"), ("--feature", "9999"), ("--epsilon", "nan")],
)
def test_spent_refuses(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    assert f"{option} must be" in refused(capsys, "split", "spent", option, value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--vocab-size", "1"),
        ("--epsilon", "nan"),
        ("--tokens", "0"),
        ("--share", "0"),
        ("--advantage", "-1"),
        ("--prior", "1"),
    ],
)
def test_bounds_refuse(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    assert f"{option} must be" in refused(capsys, "split", "bounds", option, value)
