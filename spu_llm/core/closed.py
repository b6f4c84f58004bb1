"""Whether a file with a secret, which its reader did not make, is closed to others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from spu_llm.core.errors import InputError


def check_closed(file: int, path: Path) -> None:
    """Raise InputError when others than this user may use an open file. Its group may read it where
    this process is in that group and the owner is root or this user: so Kubernetes mounts secrets.
    """
    status = os.fstat(file)
    others = stat.S_IMODE(status.st_mode) & 0o077
    mounted = (
        others == stat.S_IRGRP
        and status.st_uid in (0, os.geteuid())
        and status.st_gid in (os.getegid(), *os.getgroups())
    )
    if others and not mounted:
        raise InputError(f"{path} is open to others; run: chmod 600 {path}")
