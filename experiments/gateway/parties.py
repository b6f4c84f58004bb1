"""A provider and a gateway as processes of this machine: how they start and end, and what they
take.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from models.text_format import TextFormat
from spu_llm.core.errors import SpuLlmError
from spu_llm.service.supervisor import python_command

# The shipped model completes code, and has no template of its own.
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
COMMAND = "spu_llm.app.cli"
START_S, END_S = 300.0, 60.0
# A disk of its own, on which a command has its caches and its temporary files.
_ON_DISK = (
    'mount -t tmpfs -o size="$1"m none "$0" && mkdir "$0/cache" "$0/tmp" && shift && exec "$@"'
)


def with_template(model: Path, folder: Path) -> Path:
    """Return a model that chats: the given one, or a copy of it in the folder with TEMPLATE."""
    if TextFormat.of_model(model).template is not None:
        return model
    copy = folder / "model"
    shutil.copytree(model, copy)
    path = copy / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}), encoding="utf-8")
    return copy


class Party:
    """A command of spu-llm that listens, with all processes that it starts."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        module: str = COMMAND,
        disk_mib: int | None = None,
    ) -> None:
        """Start the command, and wait until it listens. `folder`: for its caches, temporary files
        and log. `module`: whose `main` it runs. `disk_mib`: puts that folder on a disk of this
        size, which this command alone sees. SpuLlmError when it ends before it listens.
        """
        self.folder = folder
        for part in ("cache", "tmp"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        command = [*python_command(module), *arguments]
        if disk_mib is not None:
            place = folder / "disk"
            place.mkdir(exist_ok=True)
            command = [*own_mounts(), "sh", "-c", _ON_DISK, str(place), str(disk_mib), *command]
            folder = place
        places = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
        self.disk = folder
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | places,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.port = self._listens()

    def _listens(self) -> int:
        """Return the port in the first line that the command prints."""
        stdout = self._process.stdout
        assert stdout is not None
        timer = threading.Timer(START_S, self._process.kill)
        timer.start()
        line = stdout.readline().decode()
        timer.cancel()
        if not line:
            lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
            raise SpuLlmError(f"a party does not listen: {lines[-1] if lines else 'it ended'}")
        return int(line.rpartition(":")[2])

    def workers(self) -> list[int]:
        """Return the processes that the command has started, and theirs."""
        return descendants(self.pid)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the command's own process, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> list[int]:
        """End the command in order; return the processes that are left, after killing them."""
        started = self.workers()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        left = left_after(started, 10.0)
        if self._process.poll() is None:
            left.append(self.pid)
        kill_all(left)
        self._process.wait()
        return left


def own_mounts() -> list[str]:
    """Return what runs a command in a mount namespace of its own."""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--mount", *root]


def can_mount(folder: Path) -> bool:
    """Tell whether a command here can have a disk of its own."""
    if shutil.which("unshare") is None:
        return False
    place = folder / "tried"
    place.mkdir()
    command = [*own_mounts(), "sh", "-c", _ON_DISK, str(place), "1", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


def descendants(pid: int) -> list[int]:
    """Return the living processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(int(entry.name))) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    below = list(children.get(pid, ()))
    for one in below:  # grows meanwhile
        below += children.get(one, ())
    return below


def _parent(pid: int) -> int | None:
    """Return a process's parent; None for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return None if state in "ZX" else int(parent)


def left_after(pids: Iterable[int], seconds: float) -> list[int]:
    """Return which of these processes still run after so long; waits no longer than needed."""

    def running() -> list[int]:
        return [pid for pid in pids if _parent(pid) is not None]

    until(lambda: not running(), seconds)
    return running()


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes at once."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, no longer than so many seconds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def memory(pid: int) -> tuple[int, int]:
    """Return a process's bytes by the kernel's count: proportional ones (Pss), in which pages that
    several share are divided, and those that it shares with nobody. Zeros for one that has ended.
    """
    kib = {"Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
            name, _, rest = line.partition(":")
            if name in kib:
                kib[name] = int(rest.split()[0])
    return 1024 * kib["Pss"], 1024 * (kib["Private_Clean"] + kib["Private_Dirty"])


def usage(parties: dict[str, Party]) -> dict[str, dict[str, int]]:
    """Return the memory of each party's supervisor and of its workers, and how many these are."""
    by_party = {}
    for name, party in parties.items():
        supervisor, own = memory(party.pid)
        workers = [memory(pid)[0] for pid in party.workers()]
        by_party[name] = {
            "supervisor": supervisor,
            "unshared": own,
            "workers": sum(workers),
            "processes": 1 + len(workers),
        }
    return by_party
