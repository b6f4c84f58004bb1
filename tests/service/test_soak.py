"""Many sessions in a row leave nothing behind, at either party."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from models.tokenizer import Tokenizer
from spu_llm.net import identity
from spu_llm.net.identity import CERTIFICATE
from spu_llm.service.client import Server, run_as_client
from spu_llm.systems.decoding.records import COMPLETION, ClientInputs
from spu_llm.systems.decoding.request import Request
from tests.kit.pair import Pair
from tests.kit.patience import eventually
from tests.kit.processes import STUB, Start, credentials

SESSIONS, SETTLED = 200, 20
MORE_BYTES = 16 << 20  # that memory may differ by, of 150 MiB and more


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    children: int
    memory: int

    @staticmethod
    def by(pid: int) -> Held:
        proc = Path(f"/proc/{pid}")
        children = 0
        for thread in (proc / "task").iterdir():
            with suppress(OSError):  # it has ended meanwhile
                children += len((thread / "children").read_text().split())
        pages = int((proc / "statm").read_text().split()[1])
        return Held(
            len(list((proc / "fd").iterdir())),
            len(list((proc / "task").iterdir())),
            children,
            pages * os.sysconf("SC_PAGE_SIZE"),
        )

    def flat_since(self, before: Held) -> bool:
        return (
            self.descriptors <= before.descriptors
            and self.threads <= before.threads
            and self.children <= before.children
            and self.memory < before.memory + MORE_BYTES
        )


@pytest.mark.slow
def test_two_hundred_sessions_leave_nothing(
    start: Start, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With certificates; what the workers do is a stub's, all around them is not."""
    for name in ("client", "provider"):
        identity.make(tmp_path / name, f"{name}.example", 30)
    monkeypatch.setenv("SPU_LLM_STUB", "")
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    provider = start(
        "serve",
        "--model",
        str(pair.private),
        "--listen",
        "127.0.0.1:0",
        "--jobs",
        "1",
        *credentials(tmp_path / "provider", tmp_path / "client"),
        stub="",
    )
    known = identity.load(tmp_path / "client", tmp_path / "provider" / CERTIFICATE)
    server = Server("127.0.0.1", provider.until_listening(), "local", known)
    tokenizer = Tokenizer.load(pair.public)
    request, inputs = Request(5, 5, 1, 0.7), ClientInputs([1] * 5, str(pair.public))
    folder = provider.tmp

    def run(count: int) -> None:
        for _ in range(count):
            outcome, _ = run_as_client(server, COMPLETION, request, inputs, tokenizer=tokenizer)
            assert outcome.result["text"] == "xxx"

    def settled(pid: int, before: Held) -> bool:
        return eventually(lambda: Held.by(pid).flat_since(before), 5.0)

    run(SETTLED)
    processes = (os.getpid(), provider.pid)
    assert eventually(lambda: Held.by(provider.pid).children == 0, 5.0)
    before = {pid: Held.by(pid) for pid in processes}
    files = len(list(folder.rglob("*")))
    run(SESSIONS - SETTLED)
    for pid in processes:
        assert settled(pid, before[pid]), (before[pid], Held.by(pid))
    assert len(list(folder.rglob("*"))) == files
    assert provider.stderr.count("session finished") == SESSIONS
    assert threading.active_count() < 20
