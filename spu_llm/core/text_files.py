"""Reads text that a user gives in a file, by the same rules for all commands.

A text is UTF-8, with or without a byte order mark, which is not part of it. A line ends with LF or
CRLF, and is read as ending with LF. All other characters are kept, a lone CR and U+2028 too.
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError


def read_text(path: Path, option: str = "") -> str:
    """Return the text in a file. InputError names the file, and the option that gave it, if any."""
    name = f"{path}, of {option}" if option else str(path)
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise InputError(f"cannot read {name}: {exc.strerror}") from None
    return decoded(data, name)


def decoded(data: bytes, name: str) -> str:
    """Return the text that `data`, the content of a file called `name`, stands for."""
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        reason = f"line {line} is not UTF-8; save it as UTF-8"
        raise InputError(f"cannot read {name}: {reason}") from None
    return text.replace("\r\n", "\n")


def read_json_texts(path: Path, option: str) -> list[str]:
    """Return the "text" of each line of a JSON Lines file; blank lines at its end do not count.
    InputError names the first line that cannot be used, and shows nothing of what is in it.
    """
    texts = []
    for number, record in enumerate(read_json_lines(path, option), 1):
        if not isinstance(text := record.get("text"), str):
            raise not_a_record(path, option, number, '{"text": "..."}')
        texts.append(text)
    return texts


def read_json_lines(path: Path, option: str, like: str = '{"text": "..."}') -> list[dict[str, Any]]:
    """Return the object on each line of a JSON Lines file, as `read_json_texts` does; `like`: an
    example for the error.
    """
    lines = read_text(path, option).split("\n")
    while lines and _is_blank(lines[-1]):
        lines.pop()
    records = []
    for number, line in enumerate(lines, 1):
        record = _record_in(line)
        if record is None:
            raise not_a_record(path, option, number, like)
        records.append(record)
    return records


def not_a_record(path: Path, option: str, number: int, like: str) -> InputError:
    """Return the error for a line that is no object like `like`."""
    return InputError(f"{path}, of {option}, line {number}: must be a JSON object like {like}")


def _is_blank(line: str) -> bool:
    return not line.strip(" \t\r")  # what JSON takes for space; U+2028 is none


def _record_in(line: str) -> dict[str, Any] | None:
    """Return the object of one line; None if there is none, or a text in it has half of a surrogate
    pair.
    """
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
