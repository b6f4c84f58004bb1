"""`spu-llm doctor`: whether this machine, and what it is given, is ready for a session."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spu_llm.app.options import add_ranges, address
from spu_llm.app.output import check_output, write_json
from spu_llm.app.printing import show
from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.core.jax_settings import overridden

if TYPE_CHECKING:
    from spu_llm.service.client import Server

OK, WARNING, FAILURE = "ok", "warning", "failure"
WORKER_GIB = 1.5  # of a session of the shipped models, at one party
_DISK_GB = 1.0
_FLAGS = ("aes", "avx")  # without which SPU does not start


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. what: its subject; level: OK, WARNING or FAILURE; said: what was
    seen, or what to do.
    """

    what: str
    level: str
    said: str


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine, certificates, ports, models and directories",
        description="Checks this machine, and whatever it is given of a session's options. Ends "
        "with exit code 1 when something is wrong.",
    )
    parser.add_argument("--identity", type=Path, metavar="DIR")
    parser.add_argument("--trust", type=Path, metavar="FILE")
    parser.add_argument("--listen", metavar="HOST:PORT", help="can a provider listen there?")
    parser.add_argument(
        "--server", metavar="HOST:PORT", help="does a provider answer there, and for which models?"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="can it be served?")
    add_ranges(parser)
    parser.add_argument(
        "--pool", type=Path, metavar="DIR", help="can correlated randomness be kept there?"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=_run)


class Unwell(SpuLlmError):
    """Something is wrong, as was printed."""


def _run(options: argparse.Namespace) -> None:
    check_output(options.json)
    if (options.identity is None) != (options.trust is None):
        raise InputError("--identity and --trust go together")
    findings = []
    for finding in examine(options):
        findings.append(finding)
        show(f"{finding.level:<8} {finding.what}: {finding.said}")
    write_json(options.json, {"findings": [asdict(finding) for finding in findings]})
    if wrong := [finding.what for finding in findings if finding.level == FAILURE]:
        raise Unwell(f"not ready: {', '.join(wrong)}")


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings of all checks that the options ask for, one after the other."""
    yield from _machine()
    if options.identity is not None:
        yield from _certificates(options.identity, options.trust)
    if options.listen is not None:
        yield _listening(options.listen)
    if options.server is not None:
        yield from _server(options)
    if options.model is not None:
        yield _tried("model", lambda: _model(options.model, options.ranges))
    if options.pool is not None:
        yield _tried("pool", lambda: _pool(options.pool))


def _tried(what: str, work: Callable[[], Finding]) -> Finding:
    try:
        return work()
    except SpuLlmError as exc:
        return Finding(what, FAILURE, str(exc))


# ---- this machine


def _machine() -> Iterator[Finding]:
    yield _python(sys.version_info[:2], platform.python_implementation(), sys.platform)
    yield _processor(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    yield _packages()
    yield _settings(overridden())
    yield _memory(Path("/proc/meminfo").read_text(encoding="utf-8"))
    yield _namespace()
    yield _confined()
    yield _clock(time.time(), _newest_source())


def _python(version: tuple[int, ...], implementation: str, system: str) -> Finding:
    here = f"{implementation} {'.'.join(map(str, version))} on {system}"
    fits = implementation == "CPython" and version in ((3, 10), (3, 11)) and system == "linux"
    wanted = "" if fits else "; SPU comes for CPython 3.10 and 3.11 on Linux"
    return Finding("python", OK if fits else FAILURE, here + wanted)


def _processor(cpuinfo: str) -> Finding:
    lines = [line for line in cpuinfo.splitlines() if line.startswith("flags")]
    if platform.machine() != "x86_64" or not lines:
        return Finding("processor", WARNING, f"{platform.machine()}: tried on x86-64 alone")
    missing = [flag for flag in _FLAGS if flag not in lines[0].split()]
    cores = len(os.sched_getaffinity(0))
    if missing:
        return Finding("processor", FAILURE, f"lacks {', '.join(missing)}")
    return Finding("processor", OK, f"{cores} cores, with {', '.join(_FLAGS)}")


def _packages() -> Finding:
    try:
        import jax
        import spu
    except Exception as exc:  # whatever a broken installation says
        what = "that library (libgomp1 of Debian)" if "libgomp" in str(exc) else "again"
        return Finding("packages", FAILURE, f"{type(exc).__name__}: {exc}; install {what}")
    return Finding("packages", OK, f"spu {spu.__version__}, jax {jax.__version__}")


def _settings(names: Sequence[str]) -> Finding:
    """Check for settings of JAX and XLA in the environment."""
    if not names:
        return Finding("settings", OK, "the environment has none of JAX's or XLA's")
    said = f"{', '.join(names)} of the environment: overridden, without effect on any command"
    return Finding("settings", WARNING, said)


def _memory(meminfo: str) -> Finding:
    kib = {line.split()[0]: int(line.split()[1]) for line in meminfo.splitlines() if line}
    gib = kib["MemAvailable:"] / 2**20
    sessions = int(gib / WORKER_GIB)
    said = f"{gib:.1f} GiB free: {sessions} sessions of the shipped models"
    return Finding("memory", OK if sessions else FAILURE, said)


def _namespace() -> Finding:
    """Check that a worker process can have a network of its own: tried in one."""
    work = "from spu_llm.net.worker_side import leave_network; print(leave_network())"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {work}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.stdout.strip() == "True":
        return Finding("namespace", OK, "workers have a network of their own")
    return Finding(
        "namespace",
        WARNING,
        "not allowed: other users of this machine can reach the ports of workers",
    )


def _confined() -> Finding:
    """Check that a worker process can give up its rights: tried in one."""
    work = (
        "from spu_llm.service.calls import confine_calls; "
        "from spu_llm.service.confine import confine_files, drop_rights; "
        "drop_rights(); print(confine_files([], []), confine_calls())"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {work}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lacking = [
        name
        for name, works in zip(("Landlock", "seccomp"), done.stdout.split(), strict=False)
        if works != "True"
    ]
    if done.returncode == 0 and not lacking:
        return Finding("confined", OK, "workers give up files, programs and calls of others")
    without = " and no ".join(lacking or ["Landlock"])
    said = f"this kernel has no {without}: workers keep this user's rights"
    return Finding("confined", WARNING, said)


def _newest_source() -> float:
    return max(path.stat().st_mtime for path in Path(__file__).parent.glob("*.py"))


def _clock(now: float, installed: float) -> Finding:
    """Check the clock, which certificates are judged by."""
    shown = f"{datetime.fromtimestamp(now, timezone.utc):%Y-%m-%d %H:%M} UTC"
    if now < installed:
        return Finding("clock", FAILURE, f"{shown}, before this was installed; set it")
    return Finding("clock", OK, shown)


# ---- what is given


def _certificates(directory: Path, trust: Path) -> Iterator[Finding]:
    from spu_llm.net import identity

    try:
        known = identity.load(directory, trust)
    except SpuLlmError as exc:
        yield Finding("certificates", FAILURE, str(exc))
        return
    soon = datetime.now(timezone.utc) + identity.SOON
    for what, one in [
        ("own certificate", known.own),
        *(("trusted peer", one) for one in known.pinned),
        *(("trusted authority", one) for one in known.authorities),
    ]:
        if one.until < soon:
            yield Finding(what, WARNING, f"{one}; that is soon: make another one")
        else:
            yield Finding(what, OK, str(one))


def _listening(text: str) -> Finding:
    from spu_llm.net.stream import listen

    def work() -> Finding:
        host, port = address(text, "--listen")
        listen(host, port).close()
        return Finding("listen", OK, f"{text} is free")

    return _tried("listen", work)


def _server(options: argparse.Namespace) -> Iterator[Finding]:
    from spu_llm.net import identity
    from spu_llm.service.client import Server
    from spu_llm.service.first_contact import model_names

    try:
        host, port = address(options.server, "--server")
        known = None
        if options.identity is not None:
            known = identity.load(options.identity, options.trust)
        server = Server(host, port, "local", known)
        answer = _answering(options.server, server)
        yield answer
        if answer.level != FAILURE and (names := model_names(server)):
            yield Finding("models", OK, ", ".join(names))
    except SpuLlmError as exc:
        yield Finding("server", FAILURE, str(exc))


def _answering(named: str, server: Server) -> Finding:
    from spu_llm.net import tls
    from spu_llm.net.control_plane import check_health
    from spu_llm.service.client import OPEN_S, connected

    stream, peer = connected(server, tls.CONTROL)
    if not check_health(stream, OPEN_S):
        return Finding("server", FAILURE, f"{named} takes no sessions")
    if peer is None:
        said = f"{named} takes sessions, in the clear: who it is, is not known"
        return Finding("server", WARNING, said)
    return Finding("server", OK, f"{named} is {peer}, and lets this party in")


def _model(directory: Path, ranges: Path | None) -> Finding:
    from models.family import check_ranges
    from models.hf import load_folded
    from models.text_format import TextFormat

    config, weights = load_folded(directory, ranges, encoders=True)
    check_ranges(weights, config)
    TextFormat.of_model(directory)
    return Finding("model", OK, f"{directory}: {config.asdict()['family']}, can be served")


def _pool(directory: Path) -> Finding:
    from spu_llm.offline.object_store import FsspecStore, url_of
    from spu_llm.offline.peer_directories import open_directory

    open_directory(directory)
    if (url := url_of(directory)) is not None:
        FsspecStore(url).check()
    free = shutil.disk_usage(directory).free / 1e9
    level = OK if free >= _DISK_GB else WARNING
    return Finding("pool", level, f"{directory}: {free:.1f} GB free")
