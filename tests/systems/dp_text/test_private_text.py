"""`spu-llm dp`: a corpus by every method, its statement, going on, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spu_llm.app import cli
from spu_llm.systems.dp_text.corpus import METHODS
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S, eventually
from tests.kit.processes import ERROR, Start

SECRET = "zebra"
Dp = Callable[..., list[str]]


@pytest.fixture
def dp(pair: Pair, tmp_path: Path) -> Dp:
    """Return the arguments of a run on ten references, B = 4, with some options changed."""
    lines = [{"text": f"{SECRET} {i} alpha beta"} for i in range(10)]
    lines[3] = {"text": ""}
    path = tmp_path / "references.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def arguments(*more: str, **change: str | None) -> list[str]:
        options = {
            "model": str(pair.private),
            "references": str(path),
            "query": "def read(path):",
            "epsilon": "5",
            "batch": "4",
            "texts": "2",
            "out": str(tmp_path / "out.jsonl"),
            "max_new_tokens": "4",
            "reference_tokens": "16",
            **change,
        }
        given = [(f"--{name.replace('_', '-')}", v) for name, v in options.items() if v is not None]
        return ["dp", "generate", *(part for pair in given for part in pair), *more]

    return arguments


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    return int(end.value.code or 0)


def texts(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("method", METHODS)
def test_a_corpus_by_every_method(
    dp: Dp, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    epsilon = {"public-only": None, "amin-published": "900"}.get(method, "5")
    assert run(dp(method=method, epsilon=epsilon)) == 0
    out = tmp_path / "out.jsonl"
    made = texts(out)
    assert len(made) == 2 and all(set(t) == {"text", "tokens", "ended"} for t in made)
    assert all(len(text["tokens"]) <= 4 for text in made)
    said = json.loads((tmp_path / "out.jsonl.privacy.json").read_text())
    assert said["method"] == method and said["adjacency"] == "replace-by-null"
    assert said["public"] and said["not_protected"] and said["run"]["query"] == "def read(path):"
    spent = said["epsilon"]
    if method in ("adapmixed", "adapmixed-published", "amin-published"):
        assert spent is None and "guarantee" in said["guarantee"] + " guarantee"
        assert said["guarantee"] in capsys.readouterr().err
    elif method == "public-only":
        assert spent == said["rho"] == 0
    else:
        assert 4.9 < spent <= 5 and said["delta"] == 1e-6 and said["rho"] > 0.4
        # Only InvisibleInk's draws are exact.
        assert ("rounded" in said["guarantee"]) == (method in ("amin", "augpe"))
    # Nothing of the references is in what goes out, nor a digest that could be tried on them.
    ledger = json.loads((tmp_path / "out.jsonl.ledger").read_text())
    assert SECRET not in json.dumps([said, ledger]) and ledger["references"] not in str(said)
    assert (ledger["begun"], ledger["key"]) == (2, None)
    # Once more: there is nothing left to do, and nothing is changed.
    before = out.read_bytes()
    assert run(dp(method=method, epsilon=epsilon)) == 0 and out.read_bytes() == before


def test_a_text_of_the_shipped_model(dp: Dp, tmp_path: Path) -> None:
    assert run(dp("--centre", model=None, texts="1", batch="2", max_new_tokens="3")) == 0
    (made,) = texts(tmp_path / "out.jsonl")
    assert len(made["tokens"]) <= 3
    said = json.loads((tmp_path / "out.jsonl.privacy.json").read_text())
    assert said["parameters"]["centre"] and said["parameters"]["batch"] == 2


def test_references_that_are_there_or_not(dp: Dp, tmp_path: Path) -> None:
    """As many texts as are wanted; nothing that goes out says how many references there are."""
    arguments = dp(adjacency="add-or-remove", texts="4", batch="2")
    assert run(arguments) == 0
    assert len(texts(tmp_path / "out.jsonl")) == 4
    said = json.loads((tmp_path / "out.jsonl.privacy.json").read_text())
    assert said["adjacency_means"] == "one reference is there, or is not"
    assert 4.9 < said["epsilon"] <= 5
    assert not any("how many references" in words for words in said["public"])
    nobody = tmp_path / "nobody.jsonl"
    nobody.write_text("")
    none = dp(adjacency="add-or-remove", references=str(nobody), out=str(tmp_path / "none.jsonl"))
    assert run(none) == 0 and len(texts(tmp_path / "none.jsonl")) == 2
    assert run(["dp", "account", "--epsilon", "5", "--adjacency", "add-or-remove"]) == 0


@pytest.mark.slow
def test_interrupted_it_goes_on(dp: Dp, start: Start, tmp_path: Path) -> None:
    references = tmp_path / "references.jsonl"
    references.write_text(8 * references.read_text())
    change = {"batch": "1", "texts": "80", "max_new_tokens": "12"}
    out = tmp_path / "out.jsonl"
    first = start(*dp(**change))
    assert eventually(lambda: out.exists() and out.read_bytes().count(b"\n") >= 1, RUN_S)
    first.send(signal.SIGINT)
    first.assert_failed(130, "interrupted", within_s=RUN_S)
    kept = out.read_text()
    whole = kept[: kept.rfind("\n") + 1]
    ledger = json.loads((tmp_path / "out.jsonl.ledger").read_text())
    assert 80 > ledger["begun"] >= whole.count("\n") and ledger["spent"]["epsilon"] <= 5
    assert (tmp_path / "out.jsonl.privacy.json").exists()  # before anything was drawn
    assert run(dp(**change)) == 0
    assert out.read_text().startswith(whole) and len(texts(out)) == 80


def test_other_parameters_are_refused(
    dp: Dp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(dp(texts="1")) == 0
    capsys.readouterr()
    changes: list[tuple[list[str], dict[str, str], str]] = [
        ([], {"epsilon": "4"}, "epsilon 5.0, not 4.0"),
        ([], {"texts": "2"}, "texts 1, not 2"),
        ([], {"query": "x"}, "query"),
        (["--centre"], {}, "centre False, not True"),
        ([], {"adjacency": "replace-one"}, "adjacency"),
        ([], {"method": "amin"}, "method"),
    ]
    for more, change, words in changes:
        assert run(dp(*more, **{"texts": "1", **change})) == 2
        printed = capsys.readouterr()
        (line,) = (line for line in printed.err.splitlines() if line.startswith(ERROR))
        assert words in line and "give another --out" in line and printed.out == ""
    references = tmp_path / "references.jsonl"
    references.write_text(references.read_text().replace("beta", "gamma"))
    assert run(dp(texts="1")) == 2 and "other references" in capsys.readouterr().err


BAD = {
    "epsilon": ({"epsilon": "0"}, "epsilon must be above 0"),
    "no epsilon": ({"epsilon": None}, "invisibleink needs --epsilon"),
    "nan": ({"epsilon": "nan"}, "epsilon must be above 0"),
    "delta": ({"delta": "1"}, "delta must be above 0"),
    "batch": ({"batch": "0"}, "the batch must be 1 to"),
    "texts": ({"texts": "4"}, "10 references make 3 batches of 4"),
    "no texts": ({"texts": "0"}, "--texts must be 1 to 3"),
    "tokens": ({"max_new_tokens": "0"}, "the number of new tokens must be 1"),
    "too many": ({"max_new_tokens": "60"}, "the model has 64 positions"),
    "temperature": ({"temperature": "0"}, "the temperature must be 0.05"),
    "top-k": ({"top_k": "-1"}, "--top-k must be 0"),
    "adjacency": ({"adjacency": "of-friends"}, "invalid choice"),
    "any number": ({"adjacency": "add-or-remove", "method": "amin"}, "not of amin"),
    "of augpe": ({"adjacency": "add-or-remove", "method": "augpe"}, "not of augpe"),
    "no text": ({"adjacency": "add-or-remove", "texts": "0"}, "--texts must be 1 to 1000000"),
    "method": ({"method": "nobody"}, "there is no method 'nobody'"),
    "infeasible": ({"method": "amin-published"}, "infeasible at epsilon 5"),
    "references": ({"references": "nowhere.jsonl"}, "nowhere.jsonl"),
    "out": ({"out": "nowhere/out.jsonl"}, "is not a directory"),
    "public delta": ({"method": "public-only", "delta": "2"}, "delta must be above 0"),
    "query": ({"query": "caf\udce9"}, "not valid UTF-8"),
    "special": ({"out": "/dev/null"}, "no plain file"),
    "model": ({"model": "nowhere"}, "nowhere"),
    "reference tokens": ({"reference_tokens": "2"}, "8 or more"),
}


@pytest.mark.parametrize("change,words", BAD.values(), ids=list(BAD))
def test_bad_input_is_one_line_and_spends_nothing(
    dp: Dp, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], words: str
) -> None:
    assert run(dp(**change)) == 2
    printed = capsys.readouterr()
    (line,) = (line for line in printed.err.splitlines() if line.startswith(ERROR))
    assert words in line and printed.out == "" and "Traceback" not in printed.err
    assert not os.path.exists(tmp_path / "out.jsonl.ledger")
    assert not os.path.exists(tmp_path / "out.jsonl.privacy.json")


def test_account_answers_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "account.json"
    common = ["dp", "account", "--batch", "7", "--temperature", "1.2", "--max-new-tokens", "500"]
    assert run([*common, "--json", str(path)]) == 0
    table = capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [round(row["clip"], 2) for row in rows] == [0.08, 0.23, 0.36, 0.66]  # table 12
    assert "0.659125" in table and "1.53928" in table
    clips = [part for row in rows for part in ("--clip", repr(row["clip"]))]
    assert run([*common, *clips, "--json", str(path)]) == 0
    again = json.loads(path.read_text())["rows"]
    assert [row["epsilon"] for row in again] == pytest.approx([1, 3, 5, 10], rel=1e-9)
    # Of texts that read the same references, all together; of other adjacencies.
    assert run([*common, "--epsilon", "10", "--runs", "4", "--json", str(path)]) == 0
    (four,) = json.loads(path.read_text())["rows"]
    assert four["clip"] == pytest.approx(rows[3]["clip"] / 2, rel=1e-6)
    assert run([*common, "--epsilon", "10", "--adjacency", "zero-out", "--json", str(path)]) == 0
    (zero,) = json.loads(path.read_text())["rows"]
    assert zero["clip"] == pytest.approx(rows[3]["clip"] / 2, rel=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--clip", "-1"], "clip norm"),
        (["--epsilon", "0"], "epsilon"),
        (["--runs", "0"], "--runs"),
        (["--delta", "0"], "delta"),
        (["--epsilon", "1", "--clip", "1"], "not allowed"),
    ],
)
def test_account_refuses(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dp", "account", *options]) == 2
    assert words in capsys.readouterr().err
