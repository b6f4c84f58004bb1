"""What a program that a model wrote cannot do; each deed does work in a process that is free."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from spu_llm.core.errors import InputError
from spu_llm.service import untrusted
from spu_llm.service.untrusted import ENDED, FULL, LATE, PASSED, WRONG, Limits, run_tests
from tests.kit.paths import ROOT
from tests.kit.patience import END_S, eventually
from tests.kit.processes import all_processes

# "HOME", "PORT", "LIBC" are put in their places. Each raises where it is refused.
DEEDS = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', PORT))",
    "make a datagram socket": "import socket; socket.socket(type=socket.SOCK_DGRAM)",
    "make a local socket": "import socket; socket.socketpair()",
    "read who is here": "open('/etc/passwd').read()",
    "read a file at home": "open('HOME/file').read()",
    "read it by a link": "import os; os.symlink('HOME/file', 'link'); open('link').read()",
    "list home": "import os; os.listdir('HOME')",
    "write at home": "open('HOME/other', 'w')",
    "remove at home": "import os; os.unlink('HOME/removed')",
    "write beside its folder": "open('../written', 'w')",
    "read our sources": f"open({str(ROOT / 'README.md')!r}).read()",
    "read its parent": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "read of itself": "open('/proc/self/environ').read()",
    "make a folder": "import os; os.mkdir('folder')",
    "have a file without a name": "import os; os.open('.', os.O_TMPFILE | os.O_RDWR)",
    "remove a file of its own": "import os; open('own', 'w'); os.unlink('own')",
    "put one in a file's place": "import os; open('a', 'w'); open('b', 'w'); os.rename('a', 'b')",
    "have blocks that no size tells of": "LIBC; f = open('f', 'w'); "
    "assert libc.fallocate(f.fileno(), 1, ctypes.c_long(0), ctypes.c_long(1 << 20)) == 0",
    "have timers": "LIBC; assert libc.syscall(222, 1, None, ctypes.create_string_buffer(8)) == 0",
    "make a pipe": "import os; os.mkfifo('pipe')",
    "fork": "import os; os.fork() or os._exit(0)",
    "fork in C": "LIBC; assert libc.fork() >= 0",
    "run": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "become another program": "import os; os.execv('/bin/true', ['true'])",
    "start a thread": "import threading; threading.Thread(target=print).start()",
    "signal its parent": "import os; os.kill(os.getppid(), 0)",
    "limit its parent": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
    "trace in C": "LIBC; assert libc.ptrace(0, 0, 0, 0) == 0",  # PTRACE_TRACEME
    "make memory a file": "import os; os.memfd_create('x')",
    "have more memory": "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
    "read the environment": "import os; assert os.environ['A_SECRET_WORD']",
}


@pytest.fixture(scope="module")
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no folder and no process is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("spu-llm-untrusted-*"))
    assert not [p for p in all_processes() if p.parent == os.getpid() and "untrusted" in p.argv]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("file", "removed"):
        (folder / name).write_text("secret")
    return folder


@pytest.mark.parametrize("deed", DEEDS)
def test_it_cannot(
    deed: str, home: Path, listener: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_WORD", "x")
    libc = "import ctypes; libc = ctypes.CDLL(None)"
    source = DEEDS[deed].replace("HOME", str(home)).replace("PORT", str(listener))
    source = source.replace("LIBC", libc)
    (refused,) = run_tests("", [source])
    assert refused.startswith("error ") or (refused == WRONG and "assert" in source)
    assert sorted(os.listdir(home)) == ["file", "removed"]
    own = tmp_path / "own"
    own.mkdir()
    free = subprocess.run([sys.executable, "-c", source], cwd=own, capture_output=True, text=True)
    assert free.returncode == 0, free.stderr


def test_outcomes_are_told_apart() -> None:
    program = "import json\ndef inc(x):\n    return x + 1\ncount = []"
    tests = {
        "assert inc(1) == 2": PASSED,
        "assert inc(1) == 3": WRONG,
        "inc(None)": "error TypeError",
        "assert inc(": "error SyntaxError",
        "import sys; sys.exit(0)": "error SystemExit",
        "import os; os._exit(0)": ENDED,
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": ENDED,
        "import ctypes; ctypes.string_at(0)": ENDED,
        "def f(): f()\nf()": "error RecursionError",
        "count.append(1); assert count == [1]": PASSED,  # another process has begun meanwhile
        "assert count == [1]": PASSED,
        "class Odd(Exception): pass\nraise Odd": "error Odd",
        "assert __name__ == 'solution'": PASSED,
        "import collections, dataclasses, math, numpy, random, re, typing": PASSED,
        "open('own', 'w').write('x'); assert open('own').read() == 'x'": PASSED,
        "print('x' * 1000, flush=True); input()": "error EOFError",
    }
    assert dict(zip(tests, run_tests(program, list(tests)), strict=True)) == tests


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("x = ", "error SyntaxError"),
        ("x = \0", "error SyntaxError"),
        ("raise SystemExit(0)", "error SystemExit"),
        ("assert False", WRONG),
        ("import os; os._exit(0)", ENDED),
        ("import nothing_of_this_name", "error ModuleNotFoundError"),
        ("import spu_llm.core.errors as e; open(e.__file__)", "error PermissionError"),
    ],
)
def test_a_program_that_does_not_load(program: str, outcome: str) -> None:
    assert run_tests(program, ["pass"] * 3) == [outcome] * 3


def test_time_is_limited_test_by_test() -> None:
    tests = ["pass", "while True: pass", "import time; time.sleep(60)", "pass"]
    stubborn = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    started = time.monotonic()
    limits = Limits(seconds=0.2)
    assert run_tests("", [*tests, stubborn], limits) == [PASSED, LATE, LATE, PASSED, LATE]
    assert time.monotonic() - started < END_S
    assert run_tests("while True: pass", tests, limits) == [LATE] * 4
    # With more time it is not late, nor where it waits for a processor.
    works = "import time\nwhile time.process_time() < 1: pass"
    assert run_tests("", [works], limits) == [LATE]
    assert run_tests("", [works], Limits(seconds=30)) == [PASSED]
    assert run_tests("", ["import time; time.sleep(0.7)"], limits) == [PASSED]


def test_what_is_said_is_read_before_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which all is late that is not said yet, as when the parent stood still."""
    ticks = itertools.count(step=1000)
    late = types.SimpleNamespace(monotonic=lambda: next(ticks), clock_gettime=time.clock_gettime)
    monkeypatch.setattr(untrusted, "time", late)
    read, write = os.pipe()
    try:
        os.write(write, b"ready\npassed\n")
        lines = untrusted._lines(read, os.getpid(), tmp_path, Limits(), lambda: False)
        assert [next(lines), next(lines)] == ["ready", PASSED]
        os.write(write, b"passed\npas")
        assert list(lines) == [PASSED, LATE]
        os.write(write, b"ready\npassed\n")  # and what came next has filled the folder
        (tmp_path / "file").write_bytes(bytes(2))
        lines = untrusted._lines(read, os.getpid(), tmp_path, Limits(disk_bytes=1), lambda: False)
        assert list(lines) == ["ready", PASSED, FULL]
    finally:
        os.close(read)
        os.close(write)


def test_memory_is_limited() -> None:
    takes = "x = bytearray(400 << 20); assert x[-1] == 0"
    little, hoards = "x = []\nwhile True: x.append(bytes(1 << 20))", "error MemoryError"
    assert run_tests("", [takes, little], Limits(memory_bytes=256 << 20)) == [hoards, hoards]
    assert run_tests("", [takes], Limits(memory_bytes=1 << 30)) == [PASSED]


def test_the_folder_is_limited() -> None:
    one = "open('one', 'wb').write(bytes(3 << 20))"
    many = "for i in range(10**9): open(str(i), 'wb').write(bytes(1 << 10))"
    sparse = "open('x', 'wb').truncate(1 << 40)"
    waits = "; import time; time.sleep(60)"
    limits = Limits(disk_bytes=2 << 20, seconds=10)
    assert run_tests("", [sparse], limits) == ["error OSError"]
    assert run_tests("", [one], limits)[0] in ("error OSError", FULL)
    assert run_tests("", [many], limits) == [FULL]
    assert run_tests("", [many.replace("1 << 10", "0")], limits) == [FULL]  # files, not bytes
    beyond = (
        "f = open('x', 'wb'); f.truncate(1 << 20); import os; os.link('x', 'y'); os.link('x', 'z')"
    )
    assert run_tests("", [beyond + waits], limits) == [FULL]
    assert run_tests("", [one + waits], Limits(disk_bytes=1 << 20, seconds=10))[0] != PASSED
    assert run_tests("", [one], Limits(disk_bytes=4 << 20)) == [PASSED]


def test_processes_and_output_are_limited(capfd: pytest.CaptureFixture[str]) -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass"
    floods = "while True: print('x' * 1000)"
    each = "    for i in range(3, 9):\n        try: os.write(i, b'x' * 999)\n"
    reports = f"import os\nwhile True:\n{each}        except OSError: pass"
    assert run_tests("", [bomb, floods], Limits(seconds=0.5)) == [LATE, LATE]
    assert run_tests("", [reports, "pass"], Limits(seconds=5)) == [ENDED, PASSED]
    assert capfd.readouterr() == ("", "")


def test_where_libraries_lie_opens_no_more(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries, work = tmp_path / "libraries", tmp_path / "work"
    for folder in (libraries, work):
        folder.mkdir()
        (folder / "file").write_text("x")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    (tmp_path / "link").symlink_to(home)
    private = f"/:{home}:{work}:{tmp_path / 'link'}:.:"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{private}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    reads = [f"open({str(f / 'file')!r})" for f in (home, work, libraries)]
    assert run_tests("", reads) == ["error PermissionError"] * 3
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{os.environ['LD_LIBRARY_PATH']}:{libraries}")
    assert run_tests("", reads) == ["error PermissionError"] * 2 + [PASSED]


@pytest.mark.parametrize("words", ["ready", "lacking nothing", "late", "full", "error \\x1b[31m"])
def test_words_that_are_no_outcome_end_it(words: str) -> None:
    says = f"import os\nfor i in range(3, 9):\n    try: os.write(i, b'{words}\\n')\n"
    says += "    except OSError: pass"
    assert run_tests("", [says, "pass"]) == [ENDED, PASSED]
    assert run_tests(says, ["pass"]) == [ENDED]


def test_it_has_no_more_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_WORD", "x")
    read, write = os.pipe()
    os.set_inheritable(read, True)
    each = "for i in range(200):\n    try: os.fstat(i); opened.append(i)\n    except OSError: pass"
    there = f"import os\nopened = []\n{each}\nassert opened == [0, 1, 2, 3]"
    threads = "{'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'}"
    kept = "{'HOME', 'TMPDIR', 'PYTHONHASHSEED', 'LANG', 'LC_ALL', 'LC_CTYPE', 'LD_LIBRARY_PATH'}"
    names = f"import os; assert set(os.environ) <= {kept} | {threads}, os.environ"
    try:
        assert run_tests("", [there, names]) == [PASSED, PASSED]
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(("name", "lacks"), [("files", "Landlock"), ("calls", "seccomp")])
def test_nothing_runs_unconfined(
    name: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from spu_llm.service import untrusted; "
        f"untrusted.confine_{name} = lambda *given, **more: False; untrusted.main()"
    )
    monkeypatch.setattr(untrusted, "_code", lambda: code)
    trace = tmp_path / "ran"
    with pytest.raises(InputError, match=f"no {lacks}.*are not run"):
        run_tests(f"open({str(trace)!r}, 'w')", ["pass"])
    assert not trace.exists()
    code = code.replace("lambda *given, **more: False", f"untrusted.confine_{name}")
    assert run_tests("", ["pass"]) == [PASSED]


def test_an_older_landlock_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before version 3 who may read a file may empty it; the filter of calls refuses that too."""
    library = tmp_path / "lib" / "library.py"
    library.parent.mkdir()
    library.write_text("x")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from spu_llm.service import confine, untrusted; "
        "confine._version = lambda libc: 2; untrusted.main()"
    )
    monkeypatch.setattr(untrusted, "_code", lambda: code)
    with pytest.raises(InputError, match="no Landlock of version 3"):
        run_tests("", ["pass"])
    unaware = "confine._TRUNCATE = 0; confine._OF_FILES &= 0x3FFF"
    code = code.replace("confine._version = lambda libc: 2", unaware)
    program = f"import os\ndef empty(how): os.open({str(library)!r}, how | os.O_TRUNC)"
    tests = ["empty(os.O_RDONLY)", "empty(3)", "empty(os.O_RDWR)", "open('own', 'w').close()"]
    refused = "error PermissionError"
    assert run_tests(program, tests) == [refused, refused, refused, PASSED]
    assert library.read_text() == "x"


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Whose folder is left, as nobody is there who could take it away."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from spu_llm.service.untrusted import *; "
        "run_tests('while True: pass', ['pass'], Limits(seconds=3600))"
    )
    lost = tmp_path / "lost"
    lost.mkdir()
    environment = os.environ | {"TMPDIR": str(lost)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:

        def children() -> list[int]:
            return [p.pid for p in all_processes() if p.parent == parent.pid]

        assert eventually(lambda: bool(children()), END_S)
        (child,) = children()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()

    def is_gone() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 0)
            return False
        return True

    assert eventually(is_gone, END_S)
    assert [path.name[:18] for path in lost.iterdir()] == ["spu-llm-untrusted-"]


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"seconds": 1e9}, {"memory_bytes": 1}])
def test_limits_that_are_none(limits: dict[str, float]) -> None:
    with pytest.raises(InputError, match="must be"):
        Limits(**limits)  # type: ignore[arg-type]
