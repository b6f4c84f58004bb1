"""What a worker gives up before it knows a secret: core files, capabilities, files that are not its
own and other programs; `spu_llm.service.calls` has the calls of the system that it keeps.

Files by Landlock (Linux 5.13), which binds the thread that asks and those that it starts: to be
called before there are others.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from spu_llm.core.errors import WorkerError


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, however it dies."""
    pr_set_pdeathsig = 1
    parent = os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def drop_rights() -> None:
    """Give up core files, which would hold secrets, and all capabilities, even of root or in an own
    namespace; no program that this one could start gets more.
    """
    libc = ctypes.CDLL(None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _check(libc.prctl(38, 1, 0, 0, 0) == 0, "privileges")  # PR_SET_NO_NEW_PRIVS
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    _check(libc.capset(header, bytes(24)) == 0, "capabilities")


# ---- files

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# Remove files and directories, make these and links; no devices, pipes or sockets.
_CHANGE = _WRITE | sum(1 << bit for bit in (4, 5, 7, 8, 12))
_NOT_UNTRUSTED = sum(1 << bit for bit in (4, 5, 7))  # remove files and directories, make these
_MAKE_OTHERS = sum(1 << bit for bit in (6, 9, 10, 11))
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3 of the interface
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE  # that a rule for a single file may name

_SCOPED = 1 << 0 | 1 << 1  # abstract sockets and signals of others, since version 6

# What Python, its packages and the system's libraries look up: of processes, this one's own alone.
_OWN_PROCESS = "/proc/self"
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/nix/store",
    "/proc/cpuinfo",
    "/proc/filesystems",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys",
    "/proc/uptime",
    "/proc/version",
    "/sys/bus/pci",
    "/sys/devices",
    "/sys/fs/cgroup",
    "/sys/kernel/mm",
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
    "/dev/random",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/resolv.conf",
    "/etc/gai.conf",
    "/etc/passwd",
    "/etc/group",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/openssl.cnf",
    "/etc/ssl/certs",
)
# What Python and its packages need where nothing may be learned of the machine.
_LIBRARIES = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/nix/store",
    "/usr/share/zoneinfo",
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
    "/dev/random",
    "/etc/ld.so.cache",
    "/etc/localtime",
)


def confine_files(
    reads: Iterable[Path],
    writes: Iterable[Path],
    lists: Iterable[Path] = (),
    *,
    untrusted: bool = False,
) -> bool:
    """Let this thread read nothing but the system, Python, and what lies below `reads` and
    `writes`, change nothing but what lies below `writes`, and run no program; of `lists` it sees
    what files there are. `untrusted`: of the system and Python it reads libraries alone, of
    /proc nothing, and it makes no folders, and removes and renames nothing, so that all its files
    can be seen. Return whether that was done: False, with nothing changed, where the kernel does
    not have this; `untrusted` needs Landlock's version 3 (Linux 6.2), which judges who may empty a
    file.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = _version(libc)
    if version < (3 if untrusted else 1):
        return False
    change = _CHANGE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    read = _READ | _READ_DIR
    handled = struct.pack("Q", _EXECUTE | read | change | _MAKE_OTHERS)
    if version >= 6:
        handled += struct.pack("QQ", 0, _SCOPED)
    rules = libc.syscall(_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    _check(rules >= 0 and len(os.listdir("/proc/self/task")) == 1, "files")
    try:
        for path in (library_folders() if untrusted else _python_and_system()).union(reads):
            _allow(libc, rules, path, read)
        for path in writes:
            _allow(libc, rules, path, read | (change & ~_NOT_UNTRUSTED if untrusted else change))
        for path in lists:
            _allow(libc, rules, path, _READ_DIR)
        if not untrusted:
            # Stays open: the rule is for this entry, which the kernel might make anew otherwise.
            _allow_opened(libc, rules, os.open(_OWN_PROCESS, os.O_PATH | os.O_CLOEXEC), read)
        _allow(libc, rules, Path("/dev/null"), _READ | _WRITE)
        _check(libc.syscall(_RESTRICT, rules, 0) == 0, "files")
    finally:
        os.close(rules)
    return True


def _version(libc: ctypes.CDLL) -> int:
    """Return the version of Landlock's interface, below 1 where the kernel has none."""
    return int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1))


def _check(done: bool, what: str) -> None:
    """Raise WorkerError where the kernel has it, but it did not work: there is no session then."""
    if not done:
        raise WorkerError(f"the worker could not be confined: {what}")


def library_folders() -> set[Path]:
    """Return where Python's modules, installed packages and the system's libraries lie."""
    prefixes = (sys.prefix, sys.base_prefix)
    modules = {Path(prefix, name) for prefix in prefixes for name in ("lib", "lib64")}
    return modules | _linked() | set(map(Path, _LIBRARIES))


def _linked() -> set[Path]:
    """Return where the environment has the linker look for libraries."""
    return {Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p}


def _python_and_system() -> set[Path]:
    readable = (sys.prefix, sys.base_prefix, *sys.path, *_SYSTEM)
    python = _linked() | {Path(p) for p in readable if p}
    python -= {Path.cwd()}  # on the path of `python -m`, whatever is there
    return python | set(map(Path, _own_packages()))


def _own_packages() -> list[str]:
    """Return the folders of our packages; an editable installation has them not on the path."""
    specs = map(importlib.util.find_spec, ("spu_llm", "protocols", "models"))
    return [
        place
        for spec in specs
        if spec is not None
        for place in spec.submodule_search_locations or ()
    ]


def _allow(libc: ctypes.CDLL, rules: int, path: Path, rights: int) -> None:
    """Add a rule for a path; what is not there needs none."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        _allow_opened(libc, rules, descriptor, rights)
    finally:
        os.close(descriptor)


def _allow_opened(libc: ctypes.CDLL, rules: int, descriptor: int, rights: int) -> None:
    folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    rule = struct.pack("=Qi", rights if folder else rights & _OF_FILES, descriptor)
    libc.syscall(_ADD_RULE, rules, 1, rule, 0)
