"""The systems that the study of confidential prompting compares, as processes on this machine:

    no protection   one process has the model and everybody's prompts; one batch
    full isolation  a process for each user with a model of its own
    vault           an engine, and `spu-llm vault open` for each user

A *caller* is who waits for a process: each user, or one for all where there is one process. Prefill
and decoding are kept apart: nobody decodes before everybody's first token is there, so that no
token's seconds hold another user's prefill.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spu_llm.core.errors import PeerError
from spu_llm.service.launching import end
from spu_llm.service.supervisor import python_command
from spu_llm.vault import told, user

WORKER = "experiments.confidential.worker"
SYSTEMS = ("no protection", "full isolation", "vault")
_START_S, _END_S = 300.0, 5.0
_ANSWER_S = 120.0  # for a first token

Rows = Sequence[Sequence[int]]  # prompts of one user
OnTokens = Callable[[], None]
TextsOf = list[list[list[int]]]  # by user, by prompt


class Caller(NamedTuple):
    """`call` gives texts; it waits after the first token until `go`."""

    call: Callable[[OnTokens], TextsOf]
    go: Callable[[], None]


class Process:
    """A worker of the study, which reads and writes lines of JSON."""

    def __init__(self, module: str, *args: str) -> None:
        self._popen = subprocess.Popen(
            [*python_command(module), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C is the study's, which ends it
        )
        self.pid = self._popen.pid

    def say(self, **fields: Any) -> None:
        assert self._popen.stdin is not None
        try:
            print(json.dumps(fields), file=self._popen.stdin, flush=True)
        except OSError:
            raise PeerError("a process of the study has ended") from None

    def line(self) -> str:
        """Return the next line; PeerError when the process has ended."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line.endswith("\n"):
            raise PeerError("a process of the study has ended")
        return line

    def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.line())
        return message

    def close(self) -> None:
        end(self._popen, _END_S)


@dataclass
class System:
    """Processes of one of `SYSTEMS`: the model owner's, and one for each user. fakes: positions in
    which a user's prompts differ, where a vault is to keep the others once (`compact`).
    """

    name: str
    owners: list[Process]
    users: list[Process]
    ports: list[int]  # of vaults
    fakes: Sequence[int] = ()

    def processes(self, users: int) -> dict[str, list[Process]]:
        """Return the processes that so many users need, by role."""
        return {"owner": self.owners, "users": self.users[:users]}

    def callers(self, prompts: Sequence[Rows], count: int) -> list[Caller]:
        """Return the callers whose calls together give `count` tokens after every prompt."""
        if self.name == "no protection":
            return [_line_caller(self.owners[0], prompts, count)]
        if self.name == "full isolation":
            return [
                _line_caller(process, [rows], count)
                for process, rows in zip(self.users, prompts, strict=False)
            ]
        return [
            _vault_caller(self.owners[0], port, rows, count, self.fakes)
            for port, rows in zip(self.ports, prompts, strict=False)
        ]

    def shut(self) -> None:
        """Shut the gate of a vault's engine, before callers call."""
        if self.name == "vault":
            self.owners[0].say(what="shut")

    def spent(self) -> dict[str, float]:
        """Return what a vault's engine did since it was shut: steps, and seconds by what they went
        to. Nothing for other systems.
        """
        if self.name != "vault":
            return {}
        self.owners[0].say(what="spent")
        return self.owners[0].hear()


def _line_caller(process: Process, prompts: Sequence[Rows], count: int) -> Caller:
    def call(on_tokens: OnTokens) -> TextsOf:
        process.say(prompts=[list(row) for rows in prompts for row in rows], count=count)
        steps = []
        for _ in range(count):
            steps.append(process.hear()["tokens"])
            on_tokens()
        texts = iter([list(text) for text in zip(*steps, strict=True)])
        return [[next(texts) for _ in rows] for rows in prompts]

    return Caller(call, functools.partial(process.say, what="go"))


def _vault_caller(
    engine: Process, port: int, rows: Rows, count: int, fakes: Sequence[int]
) -> Caller:
    def call(on_tokens: OnTokens) -> TextsOf:
        answered = user.generate(
            told.Place("127.0.0.1", port, None),
            lambda model: user.Wish(rows, [], count, 0.0, fakes=fakes),
            on_tokens=lambda lanes, tokens: on_tokens(),
        )
        return [answered.tokens]

    return Caller(call, functools.partial(engine.say, what="go"))


@contextlib.contextmanager
def started(names: Sequence[str], model: Path, users: int, lanes: int) -> Iterator[list[System]]:
    """Start the named systems for up to `users` users, and `lanes` of all together; yield them."""
    processes: list[Process] = []

    def start(module: str, *args: str) -> Process:
        processes.append(Process(module, *args))
        return processes[-1]

    def worker(role: str, room: int) -> Process:
        return start(WORKER, role, str(model), str(room))

    def give_up() -> None:
        for process in list(processes):
            process.close()

    alarm = threading.Timer(_START_S, give_up)
    alarm.start()
    try:
        systems = []
        for name in names:
            alone = name == "full isolation"
            role = "engine" if name == "vault" else "owner"
            owners = [] if alone else [worker(role, lanes if role == "engine" else users)]
            kept = [worker("owner", 1) for _ in range(users)] if alone else []
            systems.append(System(name, owners, kept, []))
        for system in systems:
            for process in system.owners + system.users:
                first = process.hear()
                if system.name == "vault":
                    there, here = f"127.0.0.1:{first['port']}", "127.0.0.1:0"
                    system.users += [
                        start(
                            "spu_llm.app.cli",
                            "vault",
                            "open",
                            "--server",
                            there,
                            "--listen",
                            here,
                            "--insecure",
                            "--exit-with-parent",
                        )
                        for _ in range(users)
                    ]
                    break
        for system in systems:
            if system.name == "vault":
                system.ports += [int(p.line().rpartition(":")[2]) for p in system.users]
        alarm.cancel()
        yield systems
    finally:
        alarm.cancel()
        for process in processes:
            process.close()


# ---- one run


@dataclass(frozen=True)
class Timed:
    """first: seconds of each caller to its first token; token: per later one, from the end of the
    pause to the last one; whole: of all together, without the pause; texts: by user, by prompt.

    Where a token's seconds begin is this process's doing, not an arrival: tokens that come while it
    waits for a core are seen at once, and seconds between them say nothing.
    """

    first: list[float]
    token: list[float]
    whole: float
    texts: TextsOf


def warm_up(system: System, prompts: Sequence[Rows]) -> None:
    """Let all that these users' prompts need be compiled, caller by caller: together, the last
    one's prefill would keep the others' vaults waiting for longer than they do.
    """
    for caller in system.callers(prompts, 2):
        on_tokens = iter([caller.go, lambda: None])
        caller.call(lambda each=on_tokens: next(each)())  # type: ignore[misc]


def timed(
    system: System, prompts: Sequence[Rows], count: int, at_gate: Callable[[], None] = lambda: None
) -> Timed:
    """Let all users ask at the same time; return their seconds and texts. `at_gate` is called when
    all prompts are prefilled. `count` is 2 or more.
    """
    callers = system.callers(prompts, count)
    times: list[list[float]] = [[] for _ in callers]
    begun: queue.Queue[BaseException | None] = queue.Queue()
    system.shut()
    together = threading.Barrier(len(callers) + 1)

    def call(i: int) -> TextsOf:
        def on_tokens() -> None:
            times[i].append(time.perf_counter())
            if len(times[i]) == 1:
                begun.put(None)

        try:
            together.wait()
            return callers[i].call(on_tokens)
        except BaseException as exc:
            begun.put(exc)
            raise

    with ThreadPoolExecutor(len(callers)) as pool:
        calls = [pool.submit(call, i) for i in range(len(callers))]
        together.wait()
        started = time.perf_counter()
        try:
            for _ in callers:
                try:
                    failed = begun.get(timeout=_ANSWER_S)
                except queue.Empty:
                    raise PeerError(f"{system.name}: no first token in {_ANSWER_S:g} s") from None
                if failed is not None:
                    raise failed
            filled = time.perf_counter()
            at_gate()
        finally:
            going = time.perf_counter()
            for caller in callers:
                caller.go()
        written = [texts for call_ in calls for texts in call_.result()]
    ended = max(at[-1] for at in times)
    return Timed(
        [at[0] - started for at in times],
        [(at[-1] - going) / (count - 1) for at in times],
        ended - going + filled - started,
        written,
    )


# ---- memory


def resident(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process: `rss` all; `pss` with what it shares divided by those
    that share it; `own` without that.
    """
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = 1024 * int(rest.split()[0])
    own = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"processes": 1, "rss": fields["Rss"], "pss": fields["Pss"], "own": own}


def summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(f[name] for f in counts) for name in ("processes", "rss", "pss", "own")}
