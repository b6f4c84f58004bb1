"""What a worker gives up before it knows a secret: core files, files that are not its own, other
programs, and calls of the system by which it could reach other processes or more rights.

Files by Landlock (Linux 5.13), which binds the thread that asks and those that it starts: to be
called before there are others. Calls by seccomp, on x86-64.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import struct
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path


def drop_rights() -> None:
    """No secrets in core files, and no program that this one could start gets more rights."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS


# ---- files

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGE = _WRITE | sum(1 << bit for bit in range(4, 13))  # remove and make whatever there is
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3 of the interface
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE  # that a rule for a single file may name

# What Python, its packages and the system's libraries look up.
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc", "/opt", "/proc", "/sys", "/dev", "/run")


def confine_files(
    reads: Iterable[Path], writes: Iterable[Path], lists: Iterable[Path] = ()
) -> bool:
    """From now on this thread reads nothing but the system, Python, and what lies below `reads` and
    `writes`, changes nothing but what lies below `writes` and in its directory for temporary files,
    and runs no program; of `lists` it sees what files there are. False, with nothing changed, where
    the kernel does not have this.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    change = _CHANGE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    read = _READ | _READ_DIR
    handled = struct.pack("Q", _EXECUTE | read | change)
    rules = libc.syscall(_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return False
    try:
        python = {Path(p) for p in (sys.prefix, sys.base_prefix, *sys.path, *_SYSTEM) if p}
        python -= {Path.cwd()}  # on the path of `python -m`, whatever is there
        python |= set(map(Path, _own_packages()))
        for path in python.union(*map(_with_targets, reads)):
            _allow(libc, rules, path, read)
        for path in (Path(tempfile.gettempdir()), *writes):
            _allow(libc, rules, path, read | change)
        for path in lists:
            _allow(libc, rules, path, _READ_DIR)
        _allow(libc, rules, Path("/dev"), read | _WRITE)
        return bool(libc.syscall(_RESTRICT, rules, 0) == 0)
    finally:
        os.close(rules)


def _own_packages() -> list[str]:
    """Where they lie, which an editable installation does not add to the path."""
    specs = map(importlib.util.find_spec, ("spu_llm", "protocols", "models"))
    return [
        place for spec in specs if spec is not None
        for place in spec.submodule_search_locations or ()
    ]  # fmt: skip


def _with_targets(path: Path) -> set[Path]:
    """With what links in a directory lead to, as in caches of models."""
    links = [entry for entry in path.iterdir() if entry.is_symlink()] if path.is_dir() else []
    return {path, *(link.resolve() for link in links)}


def _allow(libc: ctypes.CDLL, rules: int, path: Path, rights: int) -> None:
    """What is not there needs no rule."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = rights if path.is_dir() else rights & _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        libc.syscall(_ADD_RULE, rules, 1, rule, 0)
    finally:
        os.close(descriptor)


# ---- calls of the system, by their numbers on x86-64

_REFUSED = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438,
    "execve": 59, "execveat": 322, "setns": 308, "unshare": 272, "mount": 165, "umount2": 166,
    "pivot_root": 155, "chroot": 161, "open_by_handle_at": 304, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "add_key": 248,
    "request_key": 249, "keyctl": 250, "init_module": 175, "finit_module": 313,
    "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "reboot": 169,
    "swapon": 167, "swapoff": 168, "acct": 163, "settimeofday": 164, "clock_settime": 227,
    "syslog": 103, "personality": 135,
}  # fmt: skip
_ARCHITECTURE = 0xC000003E
_FIRST_OF_X32 = 0x40000000
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # with EPERM


def confine_calls() -> bool:
    """From now on no thread of this process may make the calls above: they fail with EPERM. False,
    with nothing changed, where that cannot be. Needs no_new_privs.
    """
    if platform.machine() != "x86_64":
        return False
    code = _filter(sorted(_REFUSED.values()))
    content = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(content))
    seccomp, set_filter, all_threads = 317, 1, 1
    return bool(ctypes.CDLL(None).syscall(seccomp, set_filter, all_threads, program) == 0)


def _filter(refused: Sequence[int]) -> bytes:
    """In the kernel's BPF: by architecture, then by number."""

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def jump_if_equal(value: int, then: int, otherwise: int) -> bytes:
        return struct.pack("HBBI", 0x15, then, otherwise, value)

    def jump_if_at_least(value: int, then: int, otherwise: int) -> bytes:
        return struct.pack("HBBI", 0x35, then, otherwise, value)

    def answer(value: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, value)

    code = [load(4), jump_if_equal(_ARCHITECTURE, 1, 0), answer(_KILL), load(0)]
    code.append(jump_if_at_least(_FIRST_OF_X32, len(refused) + 1, 0))
    for i, number in enumerate(refused):
        code.append(jump_if_equal(number, len(refused) - i, 0))
    return b"".join([*code, answer(_ALLOW), answer(_REFUSE)])
