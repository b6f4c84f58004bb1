"""The calls of the system that a worker may still make, by seccomp on x86-64.

All that is not named here is refused. Allowed is what acts on this process's own memory, threads,
clocks and open descriptors; what takes a path, which Landlock judges (`spu_llm.service.confine`),
but for changes that Landlock does not know, as of modes and owners; and TCP. Of calls that can name
other processes, kinds of sockets or commands, arguments are compared.

The list was found by recording workers of all programs, and made wider by what other versions of
the C library, Python and SPU call for the same ends.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spu_llm.core.errors import WorkerError

_ALLOWED = {
    # memory
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "mremap": 25,
    "msync": 26,
    "mincore": 27,
    "madvise": 28,
    "mlock": 149,
    "munlock": 150,
    "mbind": 237,
    "set_mempolicy": 238,
    "get_mempolicy": 239,
    "mlock2": 325,
    "pkey_mprotect": 329,
    "pkey_alloc": 330,
    "pkey_free": 331,
    "map_shadow_stack": 453,
    "mseal": 462,
    # threads, signals and the end of this process
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "sched_yield": 24,
    "pause": 34,
    "exit": 60,
    "wait4": 61,
    "rt_sigpending": 127,
    "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130,
    "sigaltstack": 131,
    "sched_getparam": 143,
    "sched_getscheduler": 145,
    "sched_get_priority_max": 146,
    "sched_get_priority_min": 147,
    "sched_rr_get_interval": 148,
    "arch_prctl": 158,
    "gettid": 186,
    "futex": 202,
    "sched_getaffinity": 204,
    "set_tid_address": 218,
    "restart_syscall": 219,
    "exit_group": 231,
    "waitid": 247,
    "set_robust_list": 273,
    "getcpu": 309,
    "membarrier": 324,
    "rseq": 334,
    "futex_waitv": 449,
    "futex_wake": 454,
    "futex_wait": 455,
    "futex_requeue": 456,
    # clocks and timers
    "nanosleep": 35,
    "getitimer": 36,
    "alarm": 37,
    "setitimer": 38,
    "gettimeofday": 96,
    "time": 201,
    "timer_create": 222,
    "timer_settime": 223,
    "timer_gettime": 224,
    "timer_getoverrun": 225,
    "timer_delete": 226,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "timerfd_create": 283,
    "timerfd_settime": 286,
    "timerfd_gettime": 287,
    # what this process is, and has
    "getpid": 39,
    "uname": 63,
    "umask": 95,
    "getrlimit": 97,
    "getrusage": 98,
    "sysinfo": 99,
    "times": 100,
    "getuid": 102,
    "getgid": 104,
    "geteuid": 107,
    "getegid": 108,
    "getppid": 110,
    "getpgrp": 111,
    "getgroups": 115,
    "getresuid": 118,
    "getresgid": 120,
    "setrlimit": 160,
    "getrandom": 318,
    # open descriptors
    "read": 0,
    "write": 1,
    "close": 3,
    "fstat": 5,
    "poll": 7,
    "lseek": 8,
    "pread64": 17,
    "pwrite64": 18,
    "readv": 19,
    "writev": 20,
    "pipe": 22,
    "select": 23,
    "dup": 32,
    "dup2": 33,
    "sendfile": 40,
    "flock": 73,
    "fsync": 74,
    "fdatasync": 75,
    "ftruncate": 77,
    "getdents": 78,
    "fstatfs": 138,
    "readahead": 187,
    "epoll_create": 213,
    "getdents64": 217,
    "fadvise64": 221,
    "epoll_wait": 232,
    "epoll_ctl": 233,
    "pselect6": 270,
    "ppoll": 271,
    "sync_file_range": 277,
    "epoll_pwait": 281,
    "signalfd": 282,
    "eventfd": 284,
    "fallocate": 285,
    "signalfd4": 289,
    "eventfd2": 290,
    "epoll_create1": 291,
    "dup3": 292,
    "pipe2": 293,
    "preadv": 295,
    "pwritev": 296,
    "copy_file_range": 326,
    "preadv2": 327,
    "pwritev2": 328,
    "close_range": 436,
    "epoll_pwait2": 441,
    # paths
    "stat": 4,
    "lstat": 6,
    "access": 21,
    "getcwd": 79,
    "chdir": 80,
    "fchdir": 81,
    "rename": 82,
    "mkdir": 83,
    "rmdir": 84,
    "creat": 85,
    "link": 86,
    "unlink": 87,
    "readlink": 89,
    "statfs": 137,
    "mkdirat": 258,
    "newfstatat": 262,
    "unlinkat": 263,
    "renameat": 264,
    "linkat": 265,
    "readlinkat": 267,
    "faccessat": 269,
    "renameat2": 316,
    "statx": 332,
    "faccessat2": 439,
}
# Sockets, all of which are TCP (`_conditions`), or were open before.
_SOCKETS = {
    "connect": 42,
    "accept": 43,
    "sendto": 44,
    "recvfrom": 45,
    "sendmsg": 46,
    "recvmsg": 47,
    "shutdown": 48,
    "bind": 49,
    "listen": 50,
    "getsockname": 51,
    "getpeername": 52,
    "setsockopt": 54,
    "getsockopt": 55,
    "accept4": 288,
    "recvmmsg": 299,
    "sendmmsg": 307,
}


# What the untrusted do not have either: blocks that no file's size tells of, and timers, of which
# others of this user have fewer then.
_OF_TRUSTED_ALONE = {"fallocate", "timer_create"}


@dataclass(frozen=True)
class Condition:
    """Values that the lower half of an argument may have, as far as `mask` covers it."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


_INTERNET, _INTERNET_6, _STREAM, _TCP = 2, 10, 1, 6
_SOCKET_FLAGS = 0x80800  # SOCK_CLOEXEC, SOCK_NONBLOCK
_OF_THREADS = 0x10900  # CLONE_VM, CLONE_SIGHAND, CLONE_THREAD
_NEW_NAMESPACES = 0x7E020000
_NAMES = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
# To duplicate, flags, locks, seals, a pipe's size; not whom to signal.
_FCNTL = (*range(8), 36, 37, 38, 1030, 1031, 1032, 1033, 1034)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Reading, writing, both; emptying a file too, unless it is opened to be read: Landlock before its
# version 3 asks for the right to read alone then.
_OPENED = (0, 1, 2, 0x201, 0x202)
_HOW_OPENED = 0x203  # O_ACCMODE, O_TRUNC
_WITHOUT_NAME = 0x400000  # O_TMPFILE


_OF_TRUSTED: Mapping[int, Sequence[Condition]] = {
    41: (  # socket
        Condition(0, (_INTERNET, _INTERNET_6)),
        Condition(1, (_STREAM,), 0xFFFFFFFF ^ _SOCKET_FLAGS),
        Condition(2, (0, _TCP)),
    ),
    # A process would outlive this one, and its supervisor.
    56: (Condition(0, (_OF_THREADS,), _OF_THREADS | _NEW_NAMESPACES),),  # clone
}


def _conditions(pid: int, untrusted: bool) -> Mapping[int, Sequence[Condition]]:
    """Return what arguments of a call must be, by its number, in a process with this id."""
    own, oneself = Condition(0, (pid,)), Condition(0, (0,))
    return {
        2: _opened(1, untrusted),  # open
        257: _opened(2, untrusted),  # openat
        62: (own,),  # kill
        234: (own,),  # tgkill
        302: (oneself,),  # prlimit64
        203: (oneself,),  # sched_setaffinity
        157: (Condition(0, _NAMES),),  # prctl
        72: (Condition(1, _FCNTL),),  # fcntl
        16: (Condition(1, _IOCTL),),  # ioctl
    }


def _opened(argument: int, untrusted: bool) -> list[Condition]:
    """Return what flags, an argument, must be for a file to be opened."""
    named = [Condition(argument, (0,), _WITHOUT_NAME)] if untrusted else []
    return [Condition(argument, _OPENED, _HOW_OPENED), *named]


# Libraries ask for these and, where a kernel does not know them, do without: the C library then
# uses clone, whose flags can be seen.
_SINCE_5_1 = 424
_ARCHITECTURE = 0xC000003E
_FIRST_OF_X32 = 0x40000000
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
_KILL = 0x80000000
_SECCOMP = 317


def confine_calls(*, untrusted: bool = False) -> bool:
    """Leave all threads of this process the calls above alone: others fail with EPERM, or ENOSYS.
    `untrusted`: without sockets, further threads, and files without a name. Return whether that was
    done: False, with nothing changed, where the kernel or the processor does not have this. Needs
    no_new_privs. WorkerError where it has, but it did not work.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    get_action, errno_action = 2, struct.pack("I", _REFUSE & 0xFFFF0000)
    if platform.machine() != "x86_64" or libc.syscall(_SECCOMP, get_action, 0, errno_action) != 0:
        return False
    code = filter_code(os.getpid(), untrusted=untrusted)
    content = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(content))
    set_filter, all_threads = 1, 1
    if libc.syscall(_SECCOMP, set_filter, all_threads, program) != 0:
        raise WorkerError("the worker could not be confined: calls")
    return True


def filter_code(pid: int, *, untrusted: bool = False) -> bytes:
    """Return the filter in the kernel's BPF: by architecture, number, and some arguments."""
    allowed, conditions = _ALLOWED, _conditions(pid, untrusted)
    if untrusted:
        allowed = {name: n for name, n in allowed.items() if name not in _OF_TRUSTED_ALONE}
    else:
        allowed, conditions = allowed | _SOCKETS, {**_OF_TRUSTED, **conditions}
    code = [_load(4), _jump(_EQUAL, _ARCHITECTURE, 1, 0), _answer(_KILL), _load(0)]
    code += [_jump(_AT_LEAST, _FIRST_OF_X32, 0, 1), _answer(_REFUSE)]
    for number in allowed.values():
        code += [_jump(_EQUAL, number, 0, 1), _answer(_ALLOW)]
    for number, required in conditions.items():
        body = [line for condition in required for line in _required(condition)]
        code += [_jump(_EQUAL, number, 0, len(body) + 1), *body, _answer(_ALLOW)]
    code += [_jump(_AT_LEAST, _SINCE_5_1, 0, 1), _answer(_UNKNOWN), _answer(_REFUSE)]
    return b"".join(code)


_EQUAL, _AT_LEAST = 0x15, 0x35


def _required(condition: Condition) -> Iterator[bytes]:
    """Yield the filter's lines that go on after them if the condition holds, else refuse."""
    yield _load(16 + 8 * condition.argument)
    yield struct.pack("HBBI", 0x54, 0, 0, condition.mask)
    count = len(condition.values)
    for i, value in enumerate(condition.values):
        yield _jump(_EQUAL, value, count - i, 0)
    yield _answer(_REFUSE)


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(kind: int, value: int, then: int, otherwise: int) -> bytes:
    return struct.pack("HBBI", kind, then, otherwise, value)


def _answer(value: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, value)
