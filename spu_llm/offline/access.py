"""Who may use a path of a pool: its owner alone, and one session at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spu_llm.core.errors import PoolError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_LOOK_S = 0.02  # longer than `is_locked` holds a lock


def check(path: Path, status: os.stat_result | None = None, *, folder: bool) -> None:
    """Raise PoolError unless `path` is a plain folder (or file) of this user's own, closed to
    others.

    `status`: the open file's; by default the path's.
    """
    status = status or os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise PoolError(f"{path} is a symbolic link; a pool has none")
    if not (stat.S_ISDIR(status.st_mode) if folder else stat.S_ISREG(status.st_mode)):
        raise PoolError(f"{path} is not a {'directory' if folder else 'file'} of a pool")
    if status.st_uid != os.geteuid():
        raise PoolError(f"{path} belongs to another user; use a directory of your own")
    if status.st_mode & 0o077:
        right = "700" if folder else "600"
        raise PoolError(
            f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):o}); "
            f"make it {right} if nobody has read it, remove it otherwise"
        )


def take_lock(path: Path, *, shared: bool = False) -> int | None:
    """Return the descriptor of a lock file, made if need be, which holds the lock until it is
    closed; None when another session holds it. `shared`: together with others that take it so.
    """
    if path.is_symlink():
        raise PoolError(f"{path} is a symbolic link; a pool has none")
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        check(path, os.fstat(lock), folder=False)
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)  # perhaps somebody only looks whether it is held
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def is_locked(path: Path, *, shared: bool = False) -> bool:
    """Return whether a session holds the lock file; one that begins meanwhile gets it all the same.
    `shared`: or shares it with others.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        kind = fcntl.LOCK_EX if shared else fcntl.LOCK_SH  # what another one's lock keeps out
        fcntl.flock(number, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(number)
    return False


@contextmanager
def failures(path: Path) -> Iterator[None]:
    """Raise PoolError for what the system refuses in the block."""
    try:
        yield
    except OSError as exc:
        full = "; make room on that disk" if exc.errno in _FULL else ""
        raise PoolError(f"{exc.filename or path}: {exc.strerror or exc}{full}") from exc
