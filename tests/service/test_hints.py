"""Hints of the weights, as commands keep them: of each provider apart, no more than is said."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from spu_llm.app import cli
from spu_llm.net import identity
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Command, Start, credentials

slow = pytest.mark.slow
CLIENTS = [
    ["demo"],
    ["generate", "--server", "h:1"],
    ["prepare", "--pool", "pool"],
    ["split", "generate", "--mode", "mpc", "--server", "h:1"],
    ["split", "prepare", "--mode", "mpc", "--server", "h:1", "--pool", "pool"],
    [
        "dp",
        "generate",
        "--server",
        "h:1",
        "--references",
        "r",
        "--query",
        "q",
        "--texts",
        "1",
        "--out",
        "o",
    ],
]


def hints_in(cache: Path, role: str) -> Path:
    return cache / "spu-llm" / "hints" / role


@pytest.mark.parametrize("command", CLIENTS, ids=lambda command: " ".join(command[:2]))
def test_every_command_of_a_client_bounds_its_hints(command: list[str]) -> None:
    given = [*command, "--hint-cache", "300"]
    options = cli.command_line().parse_args(given, argparse.Namespace(started=0.0))
    assert options.hint_cache == 300
    assert (
        cli.command_line().parse_args(command, argparse.Namespace(started=0.0)).hint_cache is None
    )


@pytest.mark.slow
@pytest.mark.parametrize("role", ["client", "provider"])
def test_a_worker_has_its_peers_hints_alone(
    start: Start, pair: Pair, tmp_path: Path, role: str
) -> None:
    """At the provider: those of the model that it serves, and their key."""
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("this kernel has no Landlock")

    def run(deed: str) -> str:
        stub = f"{role}:prefilling:{deed}" if deed else ""
        server = start(*pair.serve("--once"), stub=stub, XDG_CACHE_HOME=str(tmp_path))
        port = server.until_listening()
        client = start(*pair.generate(port), stub=stub, XDG_CACHE_HOME=str(tmp_path))
        client.wait(RUN_S)
        server.wait(RUN_S)
        return client.stderr + server.stderr

    run("")
    root = hints_in(tmp_path, role)
    (own,) = (path for path in root.iterdir() if path.is_dir())
    assert len(own.name) == 32 or own.name == "insecure"
    other = root / ("0" * 32)
    other.mkdir(mode=0o700)
    for folder in (own, other, root):
        (folder / "file").write_bytes(b"12345")
    deeds = [f"{at / 'file'} and to write {at / 'new'}" for at in (own, other, root)]
    said = "read 5 bytes; wrote 1 byte" + 4 * "; cannot read: Permission denied"
    assert said in run(f"tries {' and '.join(deeds)}")
    assert [(at / "new").exists() for at in (own, other, root)] == [True, False, False]


@pytest.mark.slow
def test_two_providers_certificates_have_two_folders(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    """Of one model, which the providers' side has one folder of."""
    for name in ("client", "one", "two"):
        identity.make(tmp_path / name, f"{name}.example", 1)
    collected = []
    for name in ("one", "two"):
        server = start(
            "serve",
            "--model",
            str(pair.private),
            "--listen",
            "127.0.0.1:0",
            "--once",
            *credentials(tmp_path / name, tmp_path / "client"),
            stub="",
            XDG_CACHE_HOME=str(tmp_path),
        )
        client = start(
            "generate",
            "--draft-model",
            str(pair.public),
            "--server",
            f"127.0.0.1:{server.until_listening()}",
            *credentials(tmp_path / "client", tmp_path / name),
            stub="",
            XDG_CACHE_HOME=str(tmp_path),
        )
        assert client.wait(RUN_S) == 0 and server.wait(END_S) == 0, client.stderr
        collected.append({path.name for path in hints_in(tmp_path, "client").iterdir()})
    assert len(collected[0]) == 1 and len(collected[1]) == 2 and collected[0] < collected[1]
    assert len(list(hints_in(tmp_path, "provider").iterdir())) == 1


@pytest.fixture
def demo(start: Start, pair: Pair, tmp_path: Path) -> Callable[[str], Command]:
    def run(megabytes: str) -> Command:
        options = ["--hint-cache", megabytes, "--max-new-tokens", "1", "--standard"]
        return start(*pair.demo, *options, XDG_CACHE_HOME=str(tmp_path))

    return run


@pytest.mark.slow
def test_a_model_whose_hints_do_not_fit_is_refused(
    demo: Callable[[str], Command], tmp_path: Path
) -> None:
    """Before they are fetched."""
    nothing = demo("0")
    assert nothing.wait(END_S) == 2
    assert "--hint-cache must be 1 or more, in MB, found 0" in nothing.stderr
    refused = demo("1")
    assert refused.wait(RUN_S) == 2
    (line,) = refused.errors
    assert "but all hints together may take 1 MB here; give --hint-cache" in line
    assert not list((hints_in(tmp_path, "client") / "insecure").iterdir())


@slow
def test_the_number_that_is_asked_for_does(demo: Callable[[str], Command], tmp_path: Path) -> None:
    """It, and no smaller one; another layout's files go."""
    refused, root = demo("1"), hints_in(tmp_path, "client")
    assert refused.wait(RUN_S) == 2
    least = int(refused.errors[0].rpartition("--hint-cache ")[2].removesuffix(" or more"))
    assert demo(str(least - 1)).wait(RUN_S) == 2 and not list((root / "insecure").iterdir())
    (root / f"{'0' * 64}.hint").touch(0o600)
    accepted = demo(str(least))
    assert accepted.wait(RUN_S) == 0, accepted.stderr
    kept = sum(path.stat().st_size for path in (root / "insecure").iterdir())
    assert (least - 1) * 10**6 < kept <= least * 10**6
    assert {path.name for path in root.iterdir()} == {"insecure", "lock"}
