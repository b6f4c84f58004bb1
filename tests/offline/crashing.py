"""Two processes with a pool each, killed at every call that changes a disk; run by test_pool_crash.

    python -m tests.offline.crashing ROOT kill|power EVERY [FAULT [outside]]

`kill`: the process dies before its Nth such call; the kernel keeps what it was told. `power`: the
same, but what is left of the directory is only what was made durable by fsync, file by file and
name by name; the peer's power fails, too, where it next waits for the one that died. EVERY: only
each such call (1: all). FAULT breaks the pool, to see whether that is noticed ("": none). outside:
results of batches are in object storage, which no party's end touches. Prints a JSON report.

Each session also puts a batch into the inbox, for the next one.

Every scenario is three sessions of both parties: one is killed in the first (the peer goes on until
it misses it), one in the second, the third ends well.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spu_llm.core.errors import PeerError, PoolError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline import files as pool_files
from spu_llm.offline import inbox
from spu_llm.offline.durable import sync_folder
from spu_llm.offline.pool import Pool
from tests.kit.dealing import MIXED, TRIPLE, Made, dealer, views

RANKS = (CLIENT, PROVIDER)
# More than a slice, within what is in memory, over the end of a chunk, all that is left of one.
TAKES = [(TRIPLE, 3), (TRIPLE, 1), (MIXED, 1), (TRIPLE, 14), (MIXED, 2)]
CALLS = ("fsync", "replace", "unlink", "rmdir", "mkdir", "truncate")


class SocketChannel:
    """Whole messages between two processes."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, data: bytes) -> None:
        try:
            self._end.sendall(struct.pack("<q", len(data)) + data)
        except OSError as exc:
            raise PeerError("the peer is gone") from exc

    def recv(self) -> bytes:
        (size,) = struct.unpack("<q", self._read(8))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                part = self._end.recv(size - len(data))
            except OSError as exc:
                raise PeerError("the peer is gone") from exc
            if not part:
                raise PeerError("the peer is gone")
            data += part
        return data

    def close(self) -> None:
        self._end.close()


class Disk:
    """What of a directory would be left without the kernel's memory: after each fsync, the
    contents of that file, or the names in that folder. What was there at the start is durable.
    """

    def __init__(self, root: Path) -> None:
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        self._open: list[int] = []
        self._root = root
        for path in (root, *root.rglob("*")):
            number = os.open(path, os.O_RDONLY)
            self.sync(number)
            os.close(number)

    def sync(self, number: int) -> None:
        # Kept open, so that no later file gets the same inode number.
        self._open.append(os.dup(number))
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {
                entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(number)
            }
        else:
            with open(f"/proc/self/fd/{number}", "rb") as file:
                self._contents[status.st_ino] = file.read()

    def image(self, target: Path) -> None:
        """Write what is durable as another directory."""
        self._folder(self._root.stat().st_ino, target)

    def _folder(self, inode: int, target: Path) -> None:
        target.mkdir(0o700)
        for name, (child, is_folder) in self._names.get(inode, {}).items():
            if is_folder:
                self._folder(child, target / name)
            else:
                (target / name).write_bytes(self._contents.get(child, b""))
                (target / name).chmod(0o600)


def instrument(root: Path, mode: str, die_at: int, count: Path) -> Callable[..., None]:
    """Die before call number `die_at` (0: never); the calls are counted in a file's length.

    Returns what dies at once.
    """
    root.mkdir(0o700, exist_ok=True)
    disk = Disk(root) if mode == "power" else None
    calls, counter = 0, os.open(count, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    real = {name: getattr(os, name) for name in CALLS}

    def die(*_: object) -> None:
        if disk is not None:
            for name in CALLS:
                setattr(os, name, real[name])
            disk.image(root.with_name(f"{root.name}.image"))
        os.kill(os.getpid(), signal.SIGKILL)

    def hooked(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == die_at:
                die()
            os.write(counter, b".")
            if name != "fsync":
                return real[name](*args, **kwargs)
            # The kernel survives here: there is no need to wait for the disk.
            if disk is not None:
                disk.sync(args[0])

        return call

    for name in CALLS:
        setattr(os, name, hooked(name))
    return die


def break_pool(fault: str) -> None:
    """Put a mistake into the pool that the tests must notice."""
    if fault == "state is not written":
        pool_files.Files._write_state = lambda self, state: None  # type: ignore[method-assign]
    elif fault in ("contents are not synced", "names are not synced"):
        pool_files.replacing = lambda path: _Careless(path, fault)  # type: ignore[assignment, return-value]
    elif fault == "a copy stays in the inbox":
        pool_files.move = _copy
        pool_inbox_waiting = inbox.waiting
        inbox.waiting = lambda folder, rank, taken_in, objects=None: pool_inbox_waiting(
            folder, rank, (), objects
        )
    elif fault == "smaller index":
        Pool.resume = _trusting_resume  # type: ignore[assignment, method-assign]
    else:
        assert not fault, fault


def _copy(path: Path, directory: Path) -> Path:
    shutil.copytree(path, directory / path.parent.name / path.name, dirs_exist_ok=True)
    return directory / path.parent.name / path.name


class _Careless:
    """Replaces a file with half the care."""

    def __init__(self, path: Path, fault: str) -> None:
        self._path, self._fault = path, fault

    def __enter__(self) -> Any:
        self._part = self._path.with_name(f".{self._path.name}")
        self._part.unlink(missing_ok=True)
        self._file = open(self._part, "xb", opener=lambda p, flags: os.open(p, flags, 0o600))
        return self._file

    def __exit__(self, *exc: object) -> None:
        if self._fault == "names are not synced":
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self._path)
        if self._fault == "contents are not synced":
            sync_folder(self._path.parent)


def _trusting_resume(pool: Pool, theirs: bytes) -> None:
    for batch in sorted(pool._found, key=lambda b: b.label.id):
        if batch.label.id in json.loads(theirs):
            pool._batches.setdefault(batch.label.name, []).append(batch)


class Log(Made):
    """What was made and taken, one line each, on file before anything else happens."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def line(self, **fields: Any) -> None:
        os.write(self._file, json.dumps(fields).encode() + b"\n")

    def add(self, shares: Any, results: Any) -> None:
        self.units = {}
        super().add(shares, results)
        self.line(made=self.units)


class Elsewhere:
    """Objects in files of another machine, which changes nothing by the calls that count here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, data: bytes) -> None:
        (self._folder / name).write_bytes(data)

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        paths = [self._folder / name for name, _ in wanted]
        return [path.read_bytes() if path.exists() else None for path in paths]

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            if (self._folder / name).exists():
                os.rename(self._folder / name, self._folder / f"{name}.removed")


def party(rank: int, run: int, end: socket.socket, home: Path, lost: Callable[[Pool], None]) -> int:
    """Return one session; returns the exit status. `lost` is what to do when the peer is gone."""
    log, channel = Log(home / f"{rank}.{run}.log"), SocketChannel(end)
    objects = Elsewhere(home / "objects") if (home / "objects").exists() else None
    try:
        pool = Pool(
            rank,
            Prg.from_os(),
            dealer(rank, channel, log),
            session=b"run %d" % run,
            directory=home / str(rank),
            objects=objects,
            outside=objects is not None,
        )
    except PoolError as exc:
        log.line(refused=str(exc))
        return 1
    beside = Pool(rank, Prg.from_os(), dealer(rank, channel, log), session=b"beside %d" % run)
    try:
        channel.send(pool.inventory())
        pool.resume(channel.recv())
        made = beside.make(TRIPLE)
        inbox.put(home / str(rank), made.label, made.key, made.results, objects)
        pool.prepare(TRIPLE, 1)
        for i, (correlation, units) in enumerate(TAKES):
            if i % 2:
                pool.lease(correlation, units + 5)  # several slices more than are taken
            correlations = pool.take(correlation, units)
            log.line(took=views(correlations))
    except PeerError:
        lost(pool)
        return 2
    except PoolError as exc:
        log.line(refused=str(exc))
        return 1
    pool.close()
    return 0


def session(home: Path, run: int, mode: str, die_at: dict[int, int], tidy: bool) -> list[int]:
    """Return both parties as processes; their exit statuses."""
    ends = socket.socketpair()
    children = []
    for rank in RANKS:
        child = os.fork()
        if child == 0:
            status = 3
            try:
                ends[1 - rank].close()
                count = home / f"{rank}.{run}.calls"
                die = instrument(home / str(rank), mode, die_at.get(rank, 0), count)
                status = party(rank, run, ends[rank], home, Pool.close if tidy else die)
            except BaseException as exc:
                print(f"{rank} in run {run}, {die_at}: {exc!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        children.append(child)
    for end in ends:
        end.close()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for rank in RANKS:
        image, directory = home / f"{rank}.image", home / str(rank)
        if image.exists():
            shutil.rmtree(directory)
            image.rename(directory)
    return statuses


def faults(home: Path, runs: int) -> list[str]:
    """Return what is wrong with the units that were handed out in all sessions of a scenario."""
    lines = {
        (run, rank): [json.loads(line) for line in (home / f"{rank}.{run}.log").open()]
        for run in range(runs)
        for rank in RANKS
        if (home / f"{rank}.{run}.log").exists()
    }
    made: dict[str, Any] = {}
    for log in lines.values():
        for line in log:
            made.update(line.get("made", {}))
    actual, first_seen = [], {}
    for run in range(runs):
        sides = []
        for rank in RANKS:
            log = lines.get((run, rank), [])
            actual += [f"run {run}, {rank}: {line['refused']}" for line in log if "refused" in line]
            taken = [view for line in log for view in line.get("took", [])]
            sides.append([tuple(made.get(f"{rank} {view}", (view, -1))) for view in taken])
            if any(index < 0 for _, index in sides[-1]):
                actual.append(f"run {run}, {rank}: words that nobody made")
            if len(set(sides[-1])) < len(sides[-1]):
                actual.append(f"run {run}, {rank}: a unit twice")
        both = min(map(len, sides))
        if sides[CLIENT][:both] != sides[PROVIDER][:both]:
            actual.append(f"run {run}: the parties' units differ")
        for unit in {*sides[CLIENT], *sides[PROVIDER]}:
            if first_seen.setdefault(unit, run) != run:
                actual.append(f"run {run}: a unit of run {first_seen[unit]} again")
    return actual


def scenario(
    home: Path, mode: str, first: dict[int, int], second: dict[int, int], outside: bool
) -> list[str]:
    """Return three sessions on the same directories; what went wrong."""
    home.mkdir()
    if outside:
        (home / "objects").mkdir()
    # With a power cut, both parties run on one machine: the worst case.
    tidy = mode == "kill" and (sum(first.values()) + sum(second.values())) % 2 == 0
    statuses = [session(home, run, mode, die, tidy) for run, die in enumerate((first, second, {}))]
    actual = faults(home, len(statuses))
    if statuses[-1] != [0, 0]:
        actual.append(f"the last session ended with {statuses[-1]}")
    for status, die in zip(statuses, (first, second), strict=False):
        if any(s not in (0, 2, -signal.SIGKILL) for s in status):
            actual.append(f"statuses {status} where {die} were to die")
    return [f"{mode}, {first}, {second}: {fault}" for fault in actual]


def main(root: Path, mode: str, every: int, fault: str = "", where: str = "") -> dict[str, Any]:
    """Calls of the first session, for either party, each with some call of the second."""
    break_pool(fault)
    outside = where == "outside"
    scenario(root / "whole", mode, {}, {}, outside)
    calls = [(root / "whole" / f"{rank}.0.calls").stat().st_size for rank in RANKS]
    again = [(root / "whole" / f"{rank}.1.calls").stat().st_size for rank in RANKS]
    actual, killed = [], 0
    for rank in RANKS:
        for die_at in range(1, calls[rank] + 1, every):
            home = root / f"{rank}.{die_at}"
            # The second victim is now the same party, now the other one.
            other = (rank + die_at) % 2
            second = {other: 1 + 3 * die_at % again[other]}
            actual += scenario(home, mode, {rank: die_at}, second, outside)
            killed += not (home / f"{rank}.0.calls").stat().st_size >= calls[rank]
            shutil.rmtree(home)
    return {"calls": calls, "again": again, "killed": killed, "faults": actual}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])))
