"""What was spent is never more than the ledger says, wherever a run is killed; and goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text import ledger_file
from tests.kit.paths import ROOT
from tests.systems.dp_text.killed import DRAWS, POINTS, REFERENCES, RUN, SPENDS, TEXTS

Run = dict[str, Any]


def ran(out: Path, witness: Path, point: str, together: int) -> int:
    program = [sys.executable, "-m", "tests.systems.dp_text.killed"]
    command = [*program, str(out), str(witness), point, str(together)]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode


def ledger_of(out: Path) -> dict[str, Any]:
    path = ledger_file.ledger_path(out)
    return json.loads(path.read_text()) if path.exists() else {"begun": 0, "spent": None}


def drawn(witness: Path) -> dict[int, list[str]]:
    """Return what the draws of each text were, over all runs."""
    collected: dict[int, list[str]] = {}
    for line in witness.read_text().splitlines() if witness.exists() else []:
        number, word = line.split()
        collected.setdefault(int(number), []).append(word)
    return collected


def check_nothing_is_unreported(out: Path, witness: Path) -> None:
    """Texts whose draws began are in the ledger; each has one stream, however often it was begun,
    so that what is learned from it is learned once.
    """
    ledger, words = ledger_of(out), drawn(witness)
    assert set(words) <= set(range(ledger["begun"]))
    assert not words or ledger["spent"] == SPENDS
    for of_text in words.values():
        assert len(set(of_text)) <= DRAWS


@pytest.mark.parametrize("together", [1, 2])
def test_killed_anywhere_it_goes_on(tmp_path: Path, together: int) -> None:
    """One corpus, whose run is killed at every point in turn, and then finished."""
    out, witness = tmp_path / "out.jsonl", tmp_path / "witness"
    before: list[str] = []
    for at, point in enumerate(POINTS):
        last = point == "never"
        code = ran(out, witness, f"{point}:{1 if at % 2 else 2}", together)
        assert code == (0 if last else -signal.SIGKILL), point
        check_nothing_is_unreported(out, witness)
        lines = out.read_text().splitlines()
        assert lines[: len(before)] == before, point  # what was written stays
        before = lines if out.read_text().endswith("\n") else lines[:-1]
    texts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [text["text"] for text in texts] == [f"text {i}" for i in range(TEXTS)]
    # A text is that of its stream, also where it was begun twice.
    words = drawn(witness)
    assert any(len(of_text) > DRAWS for of_text in words.values())
    for number, text in enumerate(texts):
        assert {str(word) for word in text["words"]} == set(words[number])
    assert ledger_of(out)["key"] is None and ledger_of(out)["begun"] == TEXTS
    assert ran(out, witness, "draw:1", together) == 0  # there is nothing left to do


def record_afterwards(file: ledger_file.CorpusFile, make: Any, witness: Path) -> None:
    """Broken: a text is entered when it is there."""
    texts = make(range(file.done, file.done + 1), Prg.from_os())
    file.begin()
    file.add(texts)


def test_the_check_finds_a_ledger_that_is_written_afterwards(tmp_path: Path) -> None:
    out, witness = tmp_path / "out.jsonl", tmp_path / "witness"

    def make(numbers: range, prg: Prg) -> list[dict[str, Any]]:
        witness.write_text(f"{numbers.start} {int(prg.words((1,))[0])}\n")
        raise KeyboardInterrupt  # in place of the kill

    with pytest.raises(KeyboardInterrupt), opened(out) as file:
        record_afterwards(file, make, witness)
    with pytest.raises(AssertionError):
        check_nothing_is_unreported(out, witness)


# ---- what is refused


def opened(
    out: Path, run: Run = RUN, references: list[str] = REFERENCES, spends: Run = SPENDS
) -> Any:
    return ledger_file.opened(out, run, references, spends)


def make(numbers: range, prg: Prg) -> list[dict[str, Any]]:
    return [{"number": number} for number in numbers]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Path]:
    """Yield a corpus of two texts, and a third one that was begun."""
    out = tmp_path / "out.jsonl"
    with opened(out) as file:
        ledger_file.write(file, 2, make)
        file.begin()
    yield out


def test_a_run_goes_on_where_it_was(begun: Path) -> None:
    heard: list[int] = []
    with opened(begun) as file:
        assert (file.done, file.begun) == (2, 3)
        ledger_file.write(file, 4, make, on_text=heard.append)
    assert heard == [2, 3, 4]
    assert len(begun.read_text().splitlines()) == 4
    mode = ledger_file.ledger_path(begun).stat().st_mode
    assert mode & 0o077 == 0


def test_a_text_of_a_version_that_draws_otherwise_is_refused(begun: Path) -> None:
    """Its key makes another text now, and what was released of it is not known."""
    path = ledger_file.ledger_path(begun)
    state = json.loads(path.read_text())
    del state["draws"]
    path.write_text(json.dumps(state))
    with opened(begun) as file:
        with pytest.raises(InputError, match="draws otherwise"):
            ledger_file.write(file, 4, make)
        file.begin(0)  # without its key, a text is given up
        file.add([{"lost": True}])
    with opened(begun) as file:
        ledger_file.write(file, 4, make)
        assert file.done == 4


def refused(out: Path, words: str, **change: Any) -> None:
    before = out.read_bytes()
    with pytest.raises(InputError, match=words) as error, opened(out, **change):
        pass
    assert "\n" not in str(error.value) and out.read_bytes() == before


def test_other_parameters_references_and_prices_are_refused(begun: Path) -> None:
    refused(begun, "begun with epsilon 5.0, not 4.0", run={**RUN, "epsilon": 4.0})
    refused(begun, "begun with query None, not 'def'", run={**RUN, "query": "def"})
    refused(begun, "other references", references=["one", "secret"])
    refused(begun, "other references", references=["onetwo"])
    refused(begun, "another price", spends={**SPENDS, "rho": 0.1})


def test_changed_files_are_refused(begun: Path, tmp_path: Path) -> None:
    ledger = ledger_file.ledger_path(begun)
    whole = ledger.read_text()
    text = begun.read_text()
    begun.write_text(text.splitlines(keepends=True)[0])
    refused(begun, "has 1 texts, and its ledger says that 3")
    begun.write_text(text * 2)
    refused(begun, "has 4 texts")
    begun.write_text(text)
    for bad in ("", "{", "[]", whole.replace('"begun": 3', '"begun": "3"')):
        ledger.write_text(bad)
        refused(begun, "cannot be read")
    ledger.write_text(whole.replace(json.loads(whole)["key"], "00"))
    refused(begun, "cannot be read")
    ledger.unlink()
    refused(begun, "there already, without a ledger")
    ledger.write_text(whole)
    with opened(begun) as file:
        assert file.begun == 3


def test_one_run_at_a_time(begun: Path) -> None:
    with opened(begun):
        refused(begun, "being written by another run")
    with opened(begun):
        pass


def test_who_lost_the_file_leaves_the_ledger_to_the_next(tmp_path: Path) -> None:
    """FILE is moved away or deleted under a run, and the command repeated meanwhile: two runs on
    one ledger would draw a text each of the same references, and account for one.
    """
    out = tmp_path / "out.jsonl"
    with opened(out) as first:
        same = first.begin().words((2,)).tolist()
        out.rename(tmp_path / "away.jsonl")
        with pytest.raises(InputError, match="cannot write"):  # there is none
            first.begin()
            first.add(make(range(1), Prg.from_os()))
        with opened(out) as second:
            assert second.begin().words((2,)).tolist() == same
            second.add(make(range(1), Prg.from_os()))
            second.begin()
            with pytest.raises(InputError, match="was replaced"):
                first.begin()
        assert ledger_of(out)["begun"] == 2


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "nowhere" / "out.jsonl"):
        with pytest.raises(InputError, match="cannot write"), opened(out):
            pass


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(InputError, match="no plain file"), opened(Path("/dev/null")):
        pass


def test_several_texts_at_once_are_begun_and_made_together(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out) as file:
        first = file.begin(3).words((2,)).tolist()
        assert file.begun == 3
    with opened(out) as file:
        assert file.begin(3).words((2,)).tolist() == first
        file.add([{"n": i} for i in range(3)])
        assert (file.done, file.begun) == (3, 3)
    lines = out.read_text()
    # Two of them had been written.
    state = ledger_of(out)
    state["key"] = "11" * 32
    ledger_file.ledger_path(out).write_text(json.dumps(state))
    out.write_text("".join(lines.splitlines(keepends=True)[:2]))
    with opened(out) as file:
        assert file.begin(3).words((1,)).shape == (1,)
        file.add([{"n": i} for i in range(3)])
    assert out.read_text() == lines
