"""What a worker cannot do any more; tried in processes that give the same up."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from spu_llm.offline.peer_directories import peer_folders
from spu_llm.service import calls
from tests.kit.pair import Pair
from tests.kit.paths import ROOT
from tests.kit.processes import Start

TRIES = """
import ctypes, errno, json, os, socket, subprocess, sys, threading
from pathlib import Path
from spu_llm.service.calls import confine_calls
from spu_llm.service.confine import confine_files, drop_rights

reads, writes, other = map(Path, sys.argv[1:4])
late, started = [], threading.Event()


def outcome(deed, *args):
    try:
        deed(*args)
    except (OSError, subprocess.SubprocessError) as exc:
        return errno.errorcode.get(exc.errno, "?")
    return "done"


def reach():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, os.getppid(), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


waiting = threading.Thread(target=lambda: (started.wait(), late.append(outcome(reach))))
drop_rights()
files = confine_files([reads], [writes])
waiting.start()
calls = confine_calls()
started.set()
waiting.join()
print(json.dumps({
    "files": files,
    "calls": calls,
    "read own": outcome((reads / "file").read_bytes),
    "write own": outcome((writes / "new").write_bytes, b"x"),
    "remove own": outcome((writes / "new").unlink),
    "read by a link": outcome((reads / "link").read_bytes),
    "read other": outcome((other / "file").read_bytes),
    "list other": outcome(os.listdir, other),
    "write other": outcome((other / "new").write_bytes, b"x"),
    "write what it reads": outcome((reads / "file").write_bytes, b"x"),
    "remove what it reads": outcome((reads / "file").unlink),
    "make a pipe": outcome(os.mkfifo, writes / "pipe"),
    "make a socket": outcome(socket.socket, socket.AF_UNIX),
    "reach the network": outcome(lambda: socket.socket().close()),
    "signal its parent": outcome(os.kill, os.getppid(), 0),
    "take a capability": outcome(os.chroot, "/"),
    "start a thread": outcome(lambda: threading.Thread(target=print).start()),
    "run": outcome(subprocess.run, ["/bin/true"]),
    "reach another process": outcome(reach),
    "reach from an older thread": late[0],
}))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    root = Path(os.environ.get("HOME", "/root")) / f".spu-llm-test-{os.getpid()}"
    folders = [root / name for name in ("reads", "writes", "other")]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "file").write_bytes(b"x")
        (root / "blob").write_bytes(b"x")
        (folders[0] / "link").symlink_to(root / "blob")
        done = subprocess.run(
            [sys.executable, "-c", TRIES, *map(str, folders)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        content: dict[str, object] = json.loads(done.stdout)
        return content
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_files_that_are_not_its_own(tried: dict[str, object]) -> None:
    if not tried["files"]:
        pytest.skip("this kernel has no Landlock")
    for deed in ("read own", "write own", "remove own"):
        assert tried[deed] == "done", deed
    for deed in (
        "read by a link",
        "read other",
        "list other",
        "write other",
        "write what it reads",
        "remove what it reads",
    ):
        assert tried[deed] == "EACCES", deed


def test_calls_that_reach_further(tried: dict[str, object]) -> None:
    if not tried["calls"]:
        pytest.skip("this kernel, or this processor, has no such filter")
    assert tried["run"] in ("EPERM", "EACCES")
    for deed in (
        "make a socket",
        "make a pipe",
        "signal its parent",
        "reach another process",
        "take a capability",
    ):
        assert tried[deed] == "EPERM", deed
    assert tried["reach the network"] == tried["start a thread"] == "done"
    assert tried["reach from an older thread"] == "EPERM"


def answer_of(code: bytes, number: int, *arguments: int, architecture: int = 0xC000003E) -> int:
    """Return what a filter answers to a call."""
    data, at, loaded = {0: number, 4: architecture}, 0, 0
    data |= {16 + 8 * i: value for i, value in enumerate(arguments)}
    while True:
        kind, then, otherwise, value = struct.unpack_from("HBBI", code, 8 * at)
        at += 1
        if kind == 0x20:
            loaded = data[value]
        elif kind == 0x54:
            loaded &= value
        elif kind == 0x06:
            return int(value)
        else:
            at += then if {0x15: loaded == value, 0x35: loaded >= value}[kind] else otherwise


def test_the_untrusted_have_no_sockets_and_threads() -> None:
    """All else is answered as in a worker."""
    pid, allow, refuse = 4242, 0x7FFF0000, 0x00050001
    ours, theirs = (calls.filter_code(pid, untrusted=untrusted) for untrusted in (False, True))
    socket, clone, thread = (41, 2, 1, 0), 56, 0x003D0F00
    differ = {*range(42, 53), 54, 55, 222, 285, 288, 299, 307}
    for number in range(470):
        given = (number, pid, 0, 0)
        expected = refuse if number in differ else answer_of(ours, *given)
        assert answer_of(theirs, *given) == expected, number
    for call in (socket, (clone, thread), (clone, 17)):
        assert answer_of(theirs, *call) == refuse
    assert answer_of(ours, *socket) == answer_of(ours, clone, thread) == allow


def test_what_each_number_is_answered() -> None:
    """By hand, argument by argument."""
    pid = 4242
    answer = functools.partial(answer_of, calls.filter_code(pid))

    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    for number in (0, 9, 202, 262, 334, 436, 449):
        assert answer(number) == allow
    for number in (29, 58, 59, 90, 101, 129, 155, 165, 200, 272, 310, 319, 400):
        assert answer(number) == refuse
    for number in (424, 425, 434, 435, 437, 438, 452, 500):
        assert answer(number) == unknown
    assert answer(0x40000000) == answer(0x40000000 + 59) == refuse
    assert answer(0, architecture=0x40000003) == kill
    unix, internet, internet_6, vsock, flags = 1, 2, 10, 40, 0x80800
    for family in (internet, internet_6):
        assert answer(41, family, 1 | flags, 0) == answer(41, family, 1, 6) == allow
    for wrong in (
        (unix, 1, 0),
        (vsock, 1, 0),
        (internet, 2, 0),
        (internet, 3, 6),
        (internet, 1, 262),
    ):
        assert answer(41, *wrong) == refuse
    new_user, thread = 0x10000000, 0x003D0F00
    assert answer(56, thread) == allow
    assert answer(56, 17) == answer(56, 0x4111) == answer(56, thread | new_user) == refuse
    for number in (62, 234):
        assert answer(number, pid) == allow
        assert {answer(number, other) for other in (0, 1, pid + 1, 2**32 - 1)} == {refuse}
    for number in (203, 302):
        assert answer(number, 0) == allow and answer(number, pid) == refuse
    assert answer(157, 15) == allow and answer(157, 1) == answer(157, 4) == refuse
    assert answer(72, 5, 1030) == allow and answer(72, 5, 8) == answer(72, 5, 10) == refuse
    for number, before in ((2, (5,)), (257, (5, 6))):
        opened = (0, 1, 2, 0x80000, 0x80241, 0x80242, 0x490002)  # the last: O_TMPFILE
        assert {answer(number, *before, how) for how in opened} == {allow}
        assert {answer(number, *before, how) for how in (0x200, 0x80200, 0x203, 3)} == {refuse}
        theirs = functools.partial(answer_of, calls.filter_code(pid, untrusted=True), number)
        assert {theirs(*before, how) for how in opened[:-1]} == {allow}
        assert theirs(*before, opened[-1]) == theirs(*before, 0x200) == refuse
    assert answer(16, 5, 0x5401) == allow
    assert answer(16, 5, 0x8901) == answer(16, 5, 0x5412) == refuse


def test_workers_give_it_up(start: Start, pair: Pair) -> None:
    """Both parties', while they are at work: as the kernel says it."""
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("this kernel has no Landlock")
    command = start(
        *pair.demo,
        "--prompt",
        "a",
        "--max-new-tokens",
        "50",
        "--draft-length",
        "1",
        installed=True,  # as users have it, whose packages are found another way
    )
    command.until_phase("prefilling")
    workers = [p for p in command.processes() if p.is_worker]
    assert len(workers) == 2
    for worker in workers:
        status = Path(f"/proc/{worker.pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Seccomp"].strip() == "2" and fields["NoNewPrivs"].strip() == "1"
    for process in command.processes():
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert line.split()[4:6] == ["0", "0"]


def test_workers_get_a_chosen_environment(start: Start, pair: Pair) -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "canary-1", "SPU_LLM_API_KEY": "canary-2"}
    stub = "client:prefilling:holds"
    server = start(*pair.serve("--once"), stub=stub, **secrets)
    client = start(*pair.generate(server.until_listening()), stub=stub, **secrets, LC_ALL="C.UTF-8")
    client.until_phase("prefilling")
    for command in (server, client):
        (worker,) = (process for process in command.processes() if process.is_worker)
        (above,) = (process for process in command.processes() if process.pid == command.pid)
        assert "canary-1" in above.environ and "canary-2" in above.environ
        assert "canary" not in worker.environ and "AWS_" not in worker.environ
    assert "LC_ALL=C.UTF-8" in worker.environ and "HOME=" in worker.environ


def test_a_worker_reads_its_own_files_alone(start: Start, pair: Pair, tmp_path: Path) -> None:
    """A model that it was given; nothing else of its user's."""
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("this kernel has no Landlock")
    secret = tmp_path / "secret"
    secret.write_bytes(b"12345")
    own = pair.public / "config.json"
    collected = []
    for path in (secret, own):
        stub = f"client:prefilling:tries {path}"
        server = start(*pair.serve("--once"), stub="")
        client = start(*pair.generate(server.until_listening()), stub=stub)
        assert client.wait(60) == 0, client.stderr
        collected.append(client.stderr)
    assert "cannot read: Permission denied" in collected[0]
    assert f"read {own.stat().st_size} bytes" in collected[1]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["client", "provider"])
def test_a_worker_has_its_peers_correlations_alone(
    start: Start, pair: Pair, tmp_path: Path, role: str
) -> None:
    """What lies in the pool directory for other peers, and its secret, it can neither read nor
    change; in the clear, where no certificate tells peers apart, too.
    """
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("this kernel has no Landlock")
    pools = {name: tmp_path / name for name in ("client", "provider")}

    def run(deed: str) -> str:
        stub = f"{role}:prefilling:{deed}" if deed else ""
        server = start(*pair.serve("--once", "--pool", str(pools["provider"])), stub=stub)
        port = server.until_listening()
        client = start(*pair.generate(port, "--pool", str(pools["client"])), stub=stub)
        client.wait(60.0)
        server.wait(60.0)
        return client.stderr + server.stderr

    run("")
    (own,) = peer_folders(pools[role])
    other = pools[role] / ("0" * 32)
    other.mkdir(mode=0o700)
    for folder in (own, other):
        (folder / "file").write_bytes(b"12345")
    allowed = f"{own / 'file'} and to write {own / 'new'}"
    refused = f"{other / 'file'} and {pools[role] / 'id'} and to write {other / 'new'}"
    said = "read 5 bytes; wrote 1 byte" + 3 * "; cannot read: Permission denied"
    assert said in run(f"tries {allowed} and {refused}")
    assert (own / "new").exists() and not (other / "new").exists()
