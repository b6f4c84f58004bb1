"""`spu-llm doctor`: what is well, what is not, and the exit code."""

from __future__ import annotations

import json
import os
import socket
from datetime import datetime, timezone
from pathlib import Path

import pytest

from spu_llm.app.commands import doctor
from spu_llm.app.commands.doctor import FAILURE, OK, WARNING, Finding
from spu_llm.core.errors import InputError
from spu_llm.net import identity
from spu_llm.net.identity import CERTIFICATE
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S
from tests.kit.processes import Start, credentials


def test_a_healthy_machine(start: Start, pair: Pair, tmp_path: Path) -> None:
    identity.make(tmp_path / "me", "me.example", 30)
    identity.make(tmp_path / "you", "you.example", 3)
    file = tmp_path / "found.json"
    command = start(
        "doctor",
        *credentials(tmp_path / "me", tmp_path / "you"),
        "--listen",
        "127.0.0.1:0",
        "--model",
        str(pair.private),
        "--pool",
        str(tmp_path / "pool"),
        "--json",
        str(file),
    )
    assert command.wait(RUN_S) == 0, command.stderr
    content = {f["what"]: f for f in json.loads(file.read_text())["findings"]}
    assert list(content) == [
        "python",
        "processor",
        "packages",
        "settings",
        "memory",
        "namespace",
        "confined",
        "clock",
        "own certificate",
        "trusted peer",
        "listen",
        "model",
        "pool",
    ]
    assert content.pop("trusted peer")["level"] == WARNING  # in three days
    assert {content.pop(what)["level"] for what in ("namespace", "confined")} <= {OK, WARNING}
    assert all(f["level"] == OK for f in content.values()), content
    assert len(command.stdout.splitlines()) == 13 and "me.example" in command.stdout


def test_whatever_is_wrong_is_said_and_ends_with_one(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        command = start(
            "doctor",
            "--identity",
            "nothing",
            "--trust",
            "nobody.pem",
            "--listen",
            taken,
            "--model",
            "nowhere",
        )
        assert command.wait(RUN_S) == 1
    assert command.errors == ["not ready: certificates, listen, model"]
    for said in ("there is no nothing/cert.pem", "in use", "nowhere"):
        assert said in command.stdout, command.stdout
    assert start("doctor", "--trust", "f").wait(RUN_S) == 2


def test_whether_a_provider_lets_one_in(start: Start, pair: Pair, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("client", "provider", "stranger")}
    for name, folder in folders.items():
        identity.make(folder, f"{name}.example", 30)

    def known(own: str, other: str) -> list[str]:
        return credentials(folders[own], folders[other])

    server = start(
        "serve",
        "--model",
        str(pair.private),
        "--listen",
        "127.0.0.1:0",
        *known("provider", "client"),
    )
    at = f"127.0.0.1:{server.until_listening()}"
    good = start("doctor", "--server", at, *known("client", "provider"))
    assert good.wait(RUN_S) == 0 and "is provider.example" in good.stdout, good.stdout
    stranger = start("doctor", "--server", at, *known("stranger", "provider"))
    assert stranger.wait(RUN_S) == 1 and "does not trust this party's" in stranger.stdout
    plain = start("doctor", "--server", at)
    assert plain.wait(RUN_S) == 1 and "the peer is speaking TLS" in plain.stdout


@pytest.mark.parametrize(
    ("finding", "level", "said"),
    [
        (doctor._python((3, 12), "CPython", "linux"), FAILURE, "3.10 and 3.11"),
        (doctor._python((3, 10), "PyPy", "linux"), FAILURE, "CPython"),
        (doctor._python((3, 10), "CPython", "linux"), OK, "3.10"),
        (doctor._processor("flags : fpu aes\n"), FAILURE, "lacks avx"),
        (doctor._processor("flags : avx aes\n"), OK, "cores"),
        (doctor._processor("nothing\n"), WARNING, "x86-64"),
        (doctor._settings([]), OK, "none"),
        (doctor._settings(["JAX_A", "XLA_B"]), WARNING, "JAX_A, XLA_B of the environment"),
        (doctor._memory("MemAvailable: 1000000 kB\n"), FAILURE, "1.0 GiB free: 0 sessions"),
        (doctor._memory("MemAvailable: 8000000 kB\n"), OK, "7.6 GiB free: 5 sessions"),
        (doctor._clock(0.0, 1.0), FAILURE, "1970-01-01 00:00 UTC, before"),
        (doctor._clock(2.0, 1.0), OK, "1970"),
    ],
)
def test_single_checks(finding: Finding, level: str, said: str) -> None:
    assert finding.level == level and said in finding.said


def test_validity_is_judged_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = identity.make(tmp_path / "me", "me", 1)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(made.until.timestamp() + 60, timezone.utc)

    monkeypatch.setattr(identity, "datetime", Later)
    with pytest.raises(InputError, match="expired on"):
        identity.load(tmp_path / "me", tmp_path / "me" / CERTIFICATE)
    assert os.stat(tmp_path / "me").st_mode & 0o77 == 0
