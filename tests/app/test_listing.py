"""`spu-llm pool`: what lies in a directory, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spu_llm.app import cli
from tests.kit.dealing import GATE, TRIPLE
from tests.kit.pools import OTHER, PEER, session


def listed(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> tuple[str, str]:
    """Return what the command prints on both streams."""
    with pytest.raises(SystemExit) as end:
        cli.main(["pool", *args])
    assert end.value.code == code
    printed = capsys.readouterr()
    return printed.out, printed.err


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Return a client's, with correlated randomness for two providers."""
    directory = tmp_path / "pool"
    with session(directory, PEER) as first:
        first.prepare(TRIPLE, 20)
        first.prepare(GATE, 1)
        first.take(TRIPLE, 5)
    with session(directory, OTHER) as second:
        second.prepare(TRIPLE, 1)
    return directory


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_correlations_of_each_peer_is_listed(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = listed(capsys, str(pool))
    assert err == ""
    assert [line.split() for line in out.splitlines()] == [
        [str(pool / PEER)],
        ["correlations", "batches", "units", "left", "on", "disk"],
        ["gate", "1", "11", "0.0", "MB"],
        [*TRIPLE.name.split(), "2", "27", "0.0", "MB"],
        ["total", "3", "0.0", "MB"],
        [],
        [str(pool / OTHER)],
        ["correlations", "batches", "units", "left", "on", "disk"],
        [*TRIPLE.name.split(), "1", "16", "0.0", "MB"],
        ["total", "1", "0.0", "MB"],
        [],
        ["2", "peers,", "4", "batches,", "0.0", "MB", "on", "disk"],
    ]


def test_the_list_as_json(pool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "list.json"
    listed(capsys, str(pool), "--json", str(file))
    result = json.loads(file.read_text())
    first, second = result["peers"]
    assert (first["folder"], first["in_use"]) == (str(pool / PEER), False)
    assert second["folder"] == str(pool / OTHER)
    gates, triples = first["correlations"]
    assert (gates["kind"], gates["batches"], gates["units"]) == (GATE.name, 1, 11)
    assert (triples["kind"], triples["batches"], triples["units"]) == (TRIPLE.name, 2, 27)
    assert first["disk_bytes"] == size(pool / PEER) == gates["disk_bytes"] + triples["disk_bytes"]
    assert result["disk_bytes"] == first["disk_bytes"] + size(pool / OTHER)
    assert (first["batches"], result["batches"]) == (3, 4)


def test_a_session_is_told_and_not_disturbed(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with session(pool, PEER) as held:
        out, _ = listed(capsys, str(pool))
        lines = out.splitlines()
        assert lines[0] == f"{pool / PEER}, in use by a session: the figures change"
        assert str(pool / OTHER) in lines  # which nobody uses
        held.take(TRIPLE, 27)


def test_a_pool_without_correlations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with session(tmp_path / "pool", PEER):
        pass
    out, _ = listed(capsys, str(tmp_path / "pool"))
    assert out.splitlines()[-1] == "1 peer, 0 batches, 0.0 MB on disk"


def test_other_paths_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for name, said in (("none", "not a directory"), ("file", "not a directory"), (".", "no pool")):
        path = tmp_path / name
        out, err = listed(capsys, str(path), code=2)
        (line,) = err.splitlines()
        assert out == "" and str(path) in line and said in line and "--pool" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_folder_of_a_peer_alone_is_no_pool(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no pool" in listed(capsys, str(pool / PEER), code=2)[1]
