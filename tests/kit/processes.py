"""Commands as real processes: start them, watch their output, find and signal what they started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spu_llm.net.identity import CERTIFICATE
from tests.kit.paths import ROOT
from tests.kit.patience import GONE_S, RUN_S, eventually

STUB = Path(__file__).parent / "stub"
MARKER = "SPU_LLM_TEST_COMMAND"
ERROR = "spu-llm: error: "


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it."""

    pid: int
    parent: int
    argv: str
    environ: str

    @property
    def is_worker(self) -> bool:
        return "spu_llm.service.worker" in self.argv

    def send(self, signum: int) -> None:
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            pass


def _look(pid: int) -> Process | None:
    """Return the process, or None when it is gone, a zombie, or not ours to see."""
    proc = Path("/proc", str(pid))
    try:
        environ = (proc / "environ").read_bytes().decode(errors="replace")
        argv = (proc / "cmdline").read_bytes().decode(errors="replace")
        state, parent = (proc / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else Process(pid, int(parent), argv, environ)


def all_processes() -> list[Process]:
    """Return every living process of this machine that can be seen."""
    actual = (_look(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit())
    return [process for process in actual if process is not None]


def _observe(seconds: float) -> None:
    """Note what a command's end took, for the table of faults (`tests.faults`)."""
    if (file := os.environ.get("SPU_LLM_OBSERVED")) is not None:
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].removeprefix("tests/")
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps([test, seconds]) + "\n")


@contextmanager
def _usual_signals() -> Iterator[None]:
    """Start processes that Ctrl-C and a hang-up end, also when these tests run in the background or
    under nohup: what is ignored here would be ignored there.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Command:
    """A running `spu-llm` with its own marker in the environment, session and TMPDIR."""

    def __init__(
        self,
        args: Sequence[str | bytes],
        directory: Path,
        stub: str | None = None,
        within: str | None = None,
        installed: bool = False,
        talks: bool = False,
        **env: str,
    ) -> None:
        """Start a command.

        `stub`: what its workers do in place of a model (`stub/stub_program.py`). `within`: a
        network namespace. `installed`: without a path to these sources. `talks`: `say` writes to
        its standard input, which is empty otherwise.
        """
        self._mark = uuid.uuid4().hex
        self.tmp = directory / f"tmp-{self._mark}"
        self.tmp.mkdir()
        paths = [str(STUB), str(ROOT), os.environ.get("PYTHONPATH")]
        env |= {MARKER: self._mark, "TMPDIR": str(self.tmp)}
        env |= {} if installed else {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
        env |= {} if stub is None else {"SPU_LLM_STUB": stub}
        place = [] if within is None else ["ip", "netns", "exec", within]
        with _usual_signals():
            self._process = subprocess.Popen(
                [*place, sys.executable, "-m", "spu_llm", *args],
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=directory,
                env=os.environ | env,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._output = {"stdout": b"", "stderr": b""}
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._output
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        stream = getattr(self._process, name)
        while data := stream.read1(4096):
            self._output[name] += data

    @property
    def stdout(self) -> str:
        return self._output["stdout"].decode()

    @property
    def stderr(self) -> str:
        return self._output["stderr"].decode()

    def say(self, text: str | None) -> None:
        """Write to its standard input; None: its end."""
        assert self._process.stdin is not None
        if text is None:
            self._process.stdin.close()
        else:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    @property
    def errors(self) -> list[str]:
        lines = self.stderr.splitlines()
        return [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]

    def until(self, stream: str, text: str) -> None:
        """Wait until `text` appears in the output."""

        def seen() -> bool:
            return text.encode() in self._output[stream] or self._process.poll() is not None

        assert eventually(seen, RUN_S), f"no {text!r} on {stream}:\n{self.stderr}"
        assert text.encode() in self._output[stream], f"ended before {text!r}:\n{self.stderr}"

    def until_count(self, stream: str, text: str, count: int) -> None:
        """Wait until `text` appears so many times in the output."""
        seen = eventually(lambda: self._output[stream].count(text.encode()) >= count, RUN_S)
        assert seen, f"no {count} times {text!r} on {stream}:\n{self.stderr}"

    def until_phase(self, phase: str) -> None:
        """Wait until the phase has begun; 'decoding' begins with the first streamed text."""
        if phase == "decoding":
            ended = self._process.poll
            began = eventually(lambda: bool(self._output["stdout"]) or ended() is not None, RUN_S)
            assert began and self._output["stdout"], self.stderr
        else:
            self.until("stderr", f"[{phase}")
            time.sleep(0.5)

    def until_listening(self) -> int:
        self.until("stdout", "\n")
        return int(self.stdout.splitlines()[0].rpartition(":")[2])

    def wait(self, timeout_s: float) -> int:
        """Exit code; a command that does not end in time fails the test."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s:g} s:\n{self.stderr}") from None
        for reader in self._readers:
            reader.join(5)
        return code

    def send(self, signum: int, *, group: bool = False) -> None:
        if group:
            os.killpg(self.pid, signum)
        else:
            os.kill(self.pid, signum)

    def processes(self) -> list[Process]:
        """Return every living process that this command started, itself included."""
        return [p for p in all_processes() if f"{MARKER}={self._mark}" in p.environ]

    def provider(self) -> tuple[Process, Process]:
        """Return (supervisor, worker) of the provider that a `demo` started."""
        processes = self.processes()
        supervisor = next(p for p in processes if "\0serve\0" in p.argv)
        return supervisor, next(p for p in processes if p.parent == supervisor.pid)

    def assert_gone(self, within_s: float = GONE_S) -> None:
        """Check that nothing which this command started is left."""
        gone = eventually(lambda: not self.processes(), within_s)
        assert gone, "left running:\n" + "\n".join(
            f"{p.pid} {p.argv[:200]!r}" for p in self.processes()
        )

    def assert_failed(self, code: int, *words: str, within_s: float) -> None:
        """Check that it ends in time, with this code and one error line that has all `words`."""
        started = time.monotonic()
        assert self.wait(within_s) == code, self.stderr
        _observe(time.monotonic() - started)
        assert len(self.errors) == 1, self.stderr
        for word in words:
            assert word in self.errors[0], self.errors[0]
        assert "Traceback" not in self.stderr
        self.assert_gone()

    def clean_up(self) -> None:
        """End whatever is left, so that one failed test does not disturb the next."""
        for process in self.processes():
            process.send(signal.SIGKILL)
        self._process.wait()


Start = Callable[..., Command]


def credentials(own: Path, other: Path) -> list[str]:
    """Options of a party whose identity is one directory, and that trusts the one in another."""
    return ["--identity", str(own), "--trust", str(other / CERTIFICATE)]
