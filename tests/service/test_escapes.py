"""Nothing leads out of a confined worker; outside of one, the same ways do lead somewhere."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kit.paths import ROOT
from tests.service.escapes import NEEDS, WAYS

PROGRAM = Path(__file__).with_name("escapes.py")
KILLS = "old_numbers_of_32_bits"  # whoever tries it, when confined
KEY = 0x5E5CA9E
VICTIM = (
    "import ctypes, sys, time; b = ctypes.create_string_buffer(8192);"
    "print(ctypes.addressof(b), flush=True); sys.stdin.read()"
)


class Tried(NamedTuple):
    """What became of each way, confined and not, and what arrived outside in each case."""

    confined: dict[str, str]
    free: dict[str, str]
    arrived_confined: list[str]
    arrived_free: list[str]
    limits_kept: bool


def _run(targets: dict[str, Any], ways: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(targets), *ways],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        start_new_session=True,
    )


def _arrived(sockets: dict[str, socket.socket]) -> list[str]:
    """Return which of them have heard something; then they are as before."""
    collected = []
    for name, sock in sockets.items():
        sock.setblocking(False)
        try:
            while True:
                if name in ("streams", "abstract"):
                    sock.accept()[0].close()
                else:
                    sock.recvmsg(64, 64)
                collected.append(name)
        except BlockingIOError:
            pass
    return sorted(set(collected))


def _outside(folder: Path, opened: ExitStack) -> Iterator[tuple[str, Any]]:
    """Names and values of targets, which `opened` closes."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = libc.shmget(KEY, 4096, 0o1600)  # IPC_CREAT
    assert memory >= 0
    opened.callback(libc.shmctl, memory, 0, None)  # IPC_RMID
    for name in ("own", "others"):
        (folder / name).mkdir()
    outside = folder / "others" / "file"
    outside.write_bytes(b"secret")
    posix = Path(f"/dev/shm/spu-llm-escape-{os.getpid()}")
    posix.write_bytes(b"secret")
    opened.callback(posix.unlink)
    yield from {
        "key": KEY,
        "own": str(folder / "own"),
        "folder": str(folder / "others"),
        "outside": str(outside),
        "posix_memory": str(posix),
    }.items()


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    home = Path(os.environ.get("HOME", "/root"))  # temporary files are the worker's
    folder = home / f".spu-llm-escapes-{os.getpid()}"
    folder.mkdir()
    with ExitStack() as opened:
        opened.callback(subprocess.run, ["rm", "-rf", str(folder)], check=True)
        targets = dict(_outside(folder, opened))
        names = {"datagrams": str(folder / "d"), "streams": str(folder / "s")}
        abstract = f"spu-llm-escapes-{os.getpid()}"
        sockets = {
            "datagrams": socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
            "streams": socket.socket(socket.AF_UNIX),
            "abstract": socket.socket(socket.AF_UNIX),
            "udp": socket.socket(type=socket.SOCK_DGRAM),
        }
        for sock in sockets.values():
            opened.enter_context(sock)
        sockets["udp"].bind(("127.0.0.1", 0))
        sockets["abstract"].bind("\0" + abstract)
        for name, path in names.items():
            sockets[name].bind(path)
        for name in ("streams", "abstract"):
            sockets[name].listen(64)
        targets |= names | {"abstract": abstract, "udp": sockets["udp"].getsockname()[1]}
        victim = opened.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        opened.callback(victim.kill)
        assert victim.stdout is not None
        targets |= {"victim": victim.pid, "address": int(victim.stdout.readline())}
        limits = Path(f"/proc/{victim.pid}/limits")
        before = limits.read_text()
        others = [name for name in WAYS if name != KILLS]
        done = _run(targets | {"confined": True}, others)
        assert done.returncode == 0, done.stderr
        confined = json.loads(done.stdout)
        if confined["given"] != [True, True]:
            pytest.skip("this kernel, or this processor, has no Landlock or no such filter")
        actual = confined["found"]
        killed = _run(targets | {"confined": True}, [KILLS])
        actual[KILLS] = {0: "done"}.get(killed.returncode, signal.Signals(-killed.returncode).name)
        arrived, kept = _arrived(sockets), limits.read_text() == before
        free = _run(targets | {"confined": False}, list(WAYS))
        assert free.returncode == 0, free.stderr
        yield Tried(actual, json.loads(free.stdout)["found"], arrived, _arrived(sockets), kept)


def test_there_are_at_least_sixty() -> None:
    assert len(WAYS) >= 60


def test_none_leads_out(tried: Tried) -> None:
    refused = {"EPERM", "EACCES", "ENOSYS", "EXDEV", "SIGSYS"}
    assert tried.confined.keys() == WAYS.keys()
    wrong = {name: said for name, said in tried.confined.items() if said not in refused}
    assert not wrong
    assert tried.arrived_confined == [] and tried.limits_kept


def test_each_leads_somewhere_without(tried: Tried) -> None:
    """But for those that need root, or something of the kernel, that this machine may lack."""
    lacking = {name: said for name, said in tried.free.items() if said != "done"}
    assert not {name: said for name, said in lacking.items() if not NEEDS[name]}
    assert tried.arrived_free == ["abstract", "datagrams", "streams", "udp"]
    assert len(WAYS) - len(lacking) >= 30
