"""What commands write: `--json` and `--html`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError


def check_output(path: Path | None, option: str = "--json") -> None:
    """Raise InputError, before anything is done, where its result could not be written."""
    if path is None:
        return
    directory = path.resolve().parent
    if not directory.is_dir():
        raise InputError(f"{option}: {directory} is not a directory; make it first")
    if path.is_dir():
        raise InputError(f"{option}: {path} is a directory; give a file name")


def write_json(path: Path | None, result: Any) -> None:
    """Write `result` whole or not at all, readable by its owner only: it holds the client's text.

    What is no regular file (`/dev/stdout`, a pipe) is written to, not replaced.
    """
    if path is None:
        return
    # JSON and Python escape a lone surrogate, from a file name that is not UTF-8, the same way.
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    data = text.encode("utf-8", "backslashreplace")
    try:
        special = str(path.absolute()).startswith(("/dev/", "/proc/"))
        if special or (path.exists() and not path.is_file()):
            with open(path, "ab") as stream:
                stream.write(data)
            return
        target = path.resolve()
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(handle, "wb") as file:
                file.write(data)
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as exc:
        raise InputError(f"--json: cannot write {path}: {exc.strerror}; choose another") from exc


def unforeseen(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def write_page(path: Path, text: str) -> None:
    """Write a page to `--html`, whole or not at all."""
    from spu_llm.offline.durable import replace_whole

    try:
        replace_whole(path, text.encode("utf-8", "backslashreplace"))
    except OSError as exc:
        raise InputError(f"--html: cannot write {path}: {exc.strerror}; choose another") from None
