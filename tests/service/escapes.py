"""Ways out of a worker, tried on what lies outside: `python escapes.py TARGETS WAY...`.

TARGETS is a JSON object that `test_escapes` makes. `confined` in it: give up first what a worker
does. Prints, as JSON, what became of each way: "done", the name of an error, or, for what ends the
process, nothing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
AT = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
NOTHING_NEEDED: list[str] = []
ROOT, KERNEL = ["root"], ["kernel"]  # what a way needs that not every machine gives
WAYS: dict[str, Callable[[], Any]] = {}
NEEDS: dict[str, list[str]] = {}


def way(needs: list[str] = NOTHING_NEEDED) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(work: Callable[[], Any]) -> Callable[[], Any]:
        WAYS[work.__name__], NEEDS[work.__name__] = work, needs
        return work

    return add


def call(number: int, *arguments: Any) -> int:
    """Make a call of the system; OSError where it is refused."""
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    actual = int(LIBC.syscall(ctypes.c_long(number), *given))
    if actual < 0:
        raise OSError(ctypes.get_errno(), f"call {number}")
    return actual


def calls(name: str, needs: list[str], number: int, *arguments: Any) -> None:
    """Try a way that is one call; "victim" and "outside" among its arguments stand for these."""

    def work() -> None:
        named = {"victim": AT["victim"], "outside": os.fsencode(AT["outside"])}
        call(number, *(named.get(a, a) if isinstance(a, str) else a for a in arguments))

    work.__name__ = name
    way(needs)(work)


BUFFER = ctypes.create_string_buffer(4096)

# ---- files


@way()
def read_a_file() -> None:
    Path(AT["outside"]).read_bytes()


@way()
def write_a_file() -> None:
    os.close(os.open(AT["outside"], os.O_WRONLY))


@way()
def list_a_folder() -> None:
    os.listdir(AT["folder"])


@way()
def make_a_file() -> None:
    Path(AT["folder"], "made").touch()


@way()
def link_a_file_in() -> None:
    os.link(AT["outside"], f"{AT['own']}/linked")


@way()
def move_a_file_out() -> None:
    Path(AT["own"], "moved").touch()
    os.rename(f"{AT['own']}/moved", f"{AT['folder']}/moved")


@way()
def make_a_socket_file() -> None:
    os.mknod(f"{AT['own']}/node", 0o140600)


@way()
def watch_a_folder() -> None:
    call(254, call(294, 0), os.fsencode(AT["folder"]), 0xFFF)  # inotify


@way()
def read_shared_memory() -> None:
    Path(AT["posix_memory"]).read_bytes()


@way(ROOT)
def open_by_handle() -> None:
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
    call(303, -100, os.fsencode(AT["outside"]), handle, BUFFER, 0)
    folder = os.open(AT["own"], os.O_RDONLY)
    os.read(call(304, folder, handle, os.O_RDONLY), 1)


calls("truncate", NOTHING_NEEDED, 76, "outside", 1)
calls("change_a_mode", NOTHING_NEEDED, 90, "outside", 0o600)
calls("change_a_mode_at", NOTHING_NEEDED, 268, -100, "outside", 0o600)
calls("change_an_owner", NOTHING_NEEDED, 92, "outside", -1, -1)
calls("change_times", NOTHING_NEEDED, 280, -100, "outside", None, 0)
calls("set_an_attribute", KERNEL, 188, "outside", b"user.x", b"y", 1, 0)
calls("mount", ROOT, 165, b"none", "/proc/self/cwd", b"tmpfs", 0, None)
calls("open_a_tree", KERNEL, 428, -100, "outside", 0)
calls("change_the_root", ROOT, 161, b"/")
calls("watch_by_fanotify", ROOT, 300, 0, 0)

# ---- sockets


@way()
def datagram_of_a_pair_to_a_path() -> None:
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"out", AT["datagrams"])


@way()
def connect_a_pair_to_a_path() -> None:
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.connect(AT["datagrams"])
    one.send(b"out")


@way()
def descriptor_to_a_path() -> None:
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))]
    one.sendmsg([b"out"], ancillary, 0, AT["datagrams"])


@way()
def stream_to_a_path() -> None:
    socket.socket(socket.AF_UNIX).connect(AT["streams"])


@way()
def stream_to_an_abstract_name() -> None:
    socket.socket(socket.AF_UNIX).connect("\0" + AT["abstract"])


@way()
def listen_at_an_abstract_name() -> None:
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    one.bind(f"\0escape-{os.getpid()}")


@way()
def udp() -> None:
    socket.socket(type=socket.SOCK_DGRAM).sendto(b"out", ("127.0.0.1", AT["udp"]))


calls("vsock", KERNEL, 41, 40, 1, 0)
calls("netlink", NOTHING_NEEDED, 41, 16, 3, 0)
calls("packets", ROOT, 41, 17, 3, 0)
calls("raw_internet", ROOT, 41, 2, 3, 1)
calls("crypto_of_the_kernel", KERNEL, 41, 38, 5, 0)
calls("multipath_tcp", KERNEL, 41, 2, 1, 262)
calls("sctp", KERNEL, 41, 2, 1, 132)

# ---- shared memory, semaphores, queues


@way()
def system_v_memory() -> None:
    assert call(30, call(29, AT["key"], 0, 0), None, 0) > 0


@way()
def posix_queue() -> None:
    call(240, b"spu-llm-escape", os.O_CREAT | os.O_RDWR, 0o600, None)


calls("system_v_semaphores", NOTHING_NEEDED, 64, 0, 1, 0o600)
calls("system_v_queue", NOTHING_NEEDED, 68, 0, 0o600)

# ---- other processes


@way()
def signal_by_an_owned_pipe() -> None:
    pipe, _ = socket.socketpair()
    fcntl.fcntl(pipe, 10, signal.SIGCONT)  # F_SETSIG
    fcntl.fcntl(pipe, fcntl.F_SETOWN, AT["victim"])


@way()
def signal_by_an_owned_socket() -> None:
    with socket.socket() as sock:
        fcntl.ioctl(sock, 0x8901, struct.pack("i", AT["victim"]))  # FIOSETOWN


@way()
def signal_by_a_descriptor() -> None:
    call(424, call(434, AT["victim"], 0), signal.SIGCONT, None, 0)


@way()
def take_a_descriptor() -> None:
    call(438, call(434, AT["victim"], 0), 0, 0)


@way()
def join_its_namespaces() -> None:
    call(308, call(434, AT["victim"], 0), 0x40000000)


@way()
def advise_on_its_memory() -> None:
    vector = struct.pack("QQ", -(-AT["address"] // 4096) * 4096, 4096)
    call(440, call(434, AT["victim"], 0), vector, 1, 20, 0)


@way()
def read_its_memory() -> None:
    local = struct.pack("QQ", ctypes.addressof(BUFFER), 16)
    call(310, AT["victim"], local, 1, struct.pack("QQ", AT["address"], 16), 1, 0)


@way()
def write_its_memory() -> None:
    local = struct.pack("QQ", ctypes.addressof(BUFFER), 16)
    call(311, AT["victim"], local, 1, struct.pack("QQ", AT["address"], 16), 1, 0)


@way()
def lower_its_limits() -> None:
    given = struct.pack("QQ", 64, 64)
    call(302, AT["victim"], 7, given, None)  # RLIMIT_NOFILE


@way()
def queue_a_signal() -> None:
    info = struct.pack("iii", signal.SIGCONT, 0, -1) + bytes(116)
    call(129, AT["victim"], signal.SIGCONT, info)


def reading(what: str) -> None:
    def work() -> None:
        with open(f"/proc/{AT['victim']}/{what}", "rb") as file:
            if what == "mem":
                file.seek(AT["address"])
            assert file.read(1)

    work.__name__ = f"read_proc_{what}"
    way()(work)


for what in ("mem", "environ", "cmdline", "maps", "stat"):
    reading(what)

calls("signal", NOTHING_NEEDED, 62, "victim", signal.SIGCONT)
calls("signal_a_group", NOTHING_NEEDED, 62, 0, 0)
calls("signal_all", NOTHING_NEEDED, 62, -1, 0)
calls("signal_a_thread", NOTHING_NEEDED, 200, "victim", signal.SIGCONT)
calls("signal_a_thread_of_a_group", NOTHING_NEEDED, 234, "victim", "victim", signal.SIGCONT)
calls("trace", NOTHING_NEEDED, 101, 16, "victim", None, None)
calls("its_priority", NOTHING_NEEDED, 141, 0, "victim", 19)
calls("its_processors", NOTHING_NEEDED, 203, "victim", 8, b"\xff" * 8)
calls("its_scheduler", NOTHING_NEEDED, 144, "victim", 3, struct.pack("i", 0))
calls("its_disk_priority", NOTHING_NEEDED, 251, 1, "victim", 3 << 13)
calls("its_pages", KERNEL, 256, "victim", 64, b"\1" + bytes(7), b"\1" + bytes(7))
calls("compare_with_it", KERNEL, 312, "victim", "victim", 0, 0, 1)
calls("its_session", NOTHING_NEEDED, 124, "victim")
calls("its_robust_futexes", NOTHING_NEEDED, 274, "victim", BUFFER, BUFFER)
EVENT = struct.pack("IIQ", 1, 128, 1) + bytes(112)
calls("count_its_events", KERNEL, 298, EVENT, "victim", -1, -1, 0)

# ---- programs, processes, namespaces, rights


@way()
def run_a_program() -> None:
    subprocess.run(["/bin/true"], check=True)


@way()
def run_memory() -> None:
    program = call(319, b"", 0)
    os.write(program, Path("/bin/true").read_bytes())
    if AT["confined"]:  # else this process would become it
        call(322, program, b"", None, None, 0x1000)


@way()
def leave_a_process_behind() -> None:
    if os.fork() == 0:
        os._exit(0)


@way()
def leave_a_process_behind_by_clone3() -> None:
    if call(435, struct.pack("QQQQQQQQ", 0, 0, 0, 0, 0, 0, 0, 0), 64) == 0:
        os._exit(0)


@way()
def outlive_the_supervisor() -> None:
    call(157, 1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG


@way(KERNEL)
def old_numbers_of_32_bits() -> None:
    """Call getpid by `int 0x80`."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() < 0:
        raise OSError(errno.ENOSYS, "int 0x80")


calls("numbers_of_x32", KERNEL, 0x40000000 + 39)
calls("own_user_namespace", KERNEL, 272, 0x10000000)
calls("own_network", ROOT, 272, 0x40000000)
calls("new_session", NOTHING_NEEDED, 112)
calls("personality", NOTHING_NEEDED, 135, 0x0040000)
calls("submit_to_a_ring", KERNEL, 425, 1, ctypes.create_string_buffer(120))
calls("bpf", ROOT, 321, 0, struct.pack("IIII", 2, 4, 4, 1) + bytes(56), 72)
calls("catch_faults", KERNEL, 323, 1)
calls("add_a_key", KERNEL, 248, b"user", b"escape", b"x", 1, -2)
calls("find_a_key", KERNEL, 250, 0, -3, 0)
calls("ports_of_the_processor", ROOT, 172, 3)
calls("segments_of_the_processor", KERNEL, 154, 0, BUFFER, 64)
calls("log_of_the_kernel", ROOT, 103, 10, None, 0)
calls("sync_all_disks", NOTHING_NEEDED, 162)
calls("become_another_user", NOTHING_NEEDED, 117, -1, -1, -1)
calls("capabilities", NOTHING_NEEDED, 126, struct.pack("Ii", 0x20080522, 0), bytes(24))
calls("another_filter", NOTHING_NEEDED, 317, 2, 0, struct.pack("I", 0x50000))


def tried(name: str) -> str:
    try:
        WAYS[name]()
    except (OSError, subprocess.SubprocessError) as exc:
        return errno.errorcode.get(getattr(exc, "errno", 0) or 0, type(exc).__name__)
    return "done"


def apart(name: str) -> str:
    """Try it in a process of its own, so that it leaves nothing to the next one."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, tried(name).encode())
        os._exit(0)
    os.close(writable)
    with open(readable) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


if __name__ == "__main__":
    from spu_llm.service.calls import confine_calls
    from spu_llm.service.confine import confine_files, drop_rights

    if AT["confined"]:
        drop_rights()
        given = [confine_files([], [Path(AT["own"])]), confine_calls()]
    else:
        given = []
    tries = {name: (tried if AT["confined"] else apart)(name) for name in sys.argv[2:]}
    print(json.dumps({"given": given, "found": tries}), flush=True)
