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

from spu_llm.core.errors import WorkerError


def drop_rights() -> None:
    """No secrets in core files; no capabilities, not even of root or in an own namespace; and no
    program that this one could start gets more.
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
_MAKE_OTHERS = sum(1 << bit for bit in (6, 9, 10, 11))
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3 of the interface
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE  # that a rule for a single file may name

_SCOPED = 1 << 0 | 1 << 1  # abstract sockets and signals of others, since version 6

# What Python, its packages and the system's libraries look up.
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/nix/store", "/proc", "/sys", "/dev/null", "/dev/zero",
    "/dev/urandom", "/dev/random", "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf",
    "/etc/hosts", "/etc/host.conf", "/etc/resolv.conf", "/etc/gai.conf", "/etc/passwd",
    "/etc/group", "/etc/protocols", "/etc/services", "/etc/ssl/openssl.cnf", "/etc/ssl/certs",
)  # fmt: skip


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
    handled = struct.pack("Q", _EXECUTE | read | change | _MAKE_OTHERS)
    if version >= 6:
        handled += struct.pack("QQ", 0, _SCOPED)
    rules = libc.syscall(_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    _check(rules >= 0 and len(os.listdir("/proc/self/task")) == 1, "files")
    try:
        libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        found = (sys.prefix, sys.base_prefix, *sys.path, *libraries, *_SYSTEM)
        python = {Path(p) for p in found if p}
        python -= {Path.cwd()}  # on the path of `python -m`, whatever is there
        python |= set(map(Path, _own_packages()))
        for path in python.union(*map(_with_targets, reads)):
            _allow(libc, rules, path, read)
        for path in (Path(tempfile.gettempdir()), *writes):
            _allow(libc, rules, path, read | change)
        for path in lists:
            _allow(libc, rules, path, _READ_DIR)
        _allow(libc, rules, Path("/dev/null"), _READ | _WRITE)
        _check(libc.syscall(_RESTRICT, rules, 0) == 0, "files")
    finally:
        os.close(rules)
    return True


def _check(done: bool, what: str) -> None:
    """Where the kernel has it, but it did not work, there is no session."""
    if not done:
        raise WorkerError(f"the worker could not be confined: {what}")


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
_SECCOMP, _SOCKET, _CLONE, _CLONE3 = 317, 41, 56, 435
_OF_FILE_SYSTEM = 1  # AF_UNIX
_NEW_NAMESPACES = 0x7E020000
_ARCHITECTURE = 0xC000003E
_FIRST_OF_X32 = 0x40000000
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
_KILL = 0x80000000


def confine_calls() -> bool:
    """From now on no thread of this process may make the calls above, or sockets of the file
    system, or namespaces: they fail with EPERM. False, with nothing changed, where the kernel does
    not have this. Needs no_new_privs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    get_action, errno_action = 2, struct.pack("I", _REFUSE & 0xFFFF0000)
    if platform.machine() != "x86_64" or libc.syscall(_SECCOMP, get_action, 0, errno_action) != 0:
        return False
    code = _filter(sorted(_REFUSED.values()))
    content = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(content))
    set_filter, all_threads = 1, 1
    _check(libc.syscall(_SECCOMP, set_filter, all_threads, program) == 0, "calls")
    return True


def _filter(refused: Sequence[int]) -> bytes:
    """In the kernel's BPF: by architecture, then by number, and some by their first argument."""

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def jump_if_equal(value: int, then: int, otherwise: int) -> bytes:
        return struct.pack("HBBI", 0x15, then, otherwise, value)

    def jump_if_at_least(value: int, then: int, otherwise: int) -> bytes:
        return struct.pack("HBBI", 0x35, then, otherwise, value)

    def answer(value: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, value)

    def jump_if_any(bits: int, then: int, otherwise: int) -> bytes:
        return struct.pack("HBBI", 0x45, then, otherwise, bits)

    first_argument = 16  # its lower half
    code = [load(4), jump_if_equal(_ARCHITECTURE, 1, 0), answer(_KILL), load(0)]
    code += [jump_if_at_least(_FIRST_OF_X32, 0, 1), answer(_REFUSE)]
    for number in refused:
        code += [jump_if_equal(number, 0, 1), answer(_REFUSE)]
    # The C library then uses clone, whose flags can be seen.
    code += [jump_if_equal(_CLONE3, 0, 1), answer(_UNKNOWN)]
    code += [jump_if_equal(_CLONE, 0, 4), load(first_argument)]
    code += [jump_if_any(_NEW_NAMESPACES, 0, 1), answer(_REFUSE), load(0)]
    code += [jump_if_equal(_SOCKET, 0, 3), load(first_argument)]
    code += [jump_if_equal(_OF_FILE_SYSTEM, 0, 1), answer(_REFUSE)]
    return b"".join([*code, answer(_ALLOW)])
