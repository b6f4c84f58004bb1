"""Programs of a split model for tasks with tests."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from models.chat import Message, Template
from models.tokenizer import Tokenizer
from spu_llm.api.events import Note, OnEvent
from spu_llm.api.split import SplitClient, SplitOptions
from spu_llm.core.errors import InputError
from spu_llm.service.rendering import render_apart
from spu_llm.systems.split.code_tasks import STOPS, CodeTask, read_completions
from spu_llm.systems.split.records import MAX_TEXTS

_ASKED = "Write a Python program that does this. Answer with the whole program alone."
_FENCED, _FENCE = "```python\n", "\n```"


def solve(
    client: SplitClient,
    tasks: Sequence[CodeTask],
    completions: Path,
    samples: int,
    options: SplitOptions = SplitOptions(),
    on_event: OnEvent = lambda event: None,
    *,
    chat: bool = False,
) -> int:
    """Append to a JSON Lines file the completions that each task lacks for there to be `samples`,
    in mode plain or noir; return how many. A model goes on after the task's prompt until something
    else begins (`code_tasks.STOPS`); in a `chat`, by its template, it writes the whole program into
    a block of Markdown. `options.stop`, where there is one, stands in place of these ends.

    The completions of a task are one session: the provider learns how many there are, and how long
    prompt and completions. They are written when it has ended, for the file's owner alone. Errors
    as of `SplitClient.complete_each`, and for a model without a chat template.
    """
    if not 1 <= samples <= MAX_TEXTS:
        raise InputError(f"--samples must be 1 to {MAX_TEXTS}, found {samples}")
    asks = _in_chat(client.model) if chat else lambda task: task.prompt
    made = 0
    with _held(completions) as file:
        there = read_completions(completions, tasks)
        for number, task in enumerate(tasks):
            have = len(there[task.id])
            if (lacking := samples - have) <= 0:
                continue
            asked = dataclasses.replace(
                options,
                stop=options.stop or ((_FENCE,) if chat else STOPS[task.layout]),
                # Others than those that are there.
                seed=None if options.seed is None else options.seed + number + have * len(tasks),
            )
            on_event(Note(f"task {task.id}, {number + 1} of {len(tasks)}"))
            texts = client.complete_each([asks(task)] * lacking, asked, on_event)
            _append(file, completions, task.id, texts)
            made += lacking
    return made


def _in_chat(model: Path) -> Callable[[CodeTask], str]:
    """Return what makes a chat of a task, with the first line of the answer."""
    template, tokenizer = Template.load(model), Tokenizer.load(model)

    def ask(task: CodeTask) -> str:
        asked = Message("user", f"{_ASKED}\n{_FENCED}{task.prompt.rstrip()}{_FENCE}")
        text = render_apart(template, [asked])
        # Put before any text already.
        text = text.removeprefix(template.bos_token) if tokenizer.beginning else text
        return text + _FENCED

    return ask


@contextmanager
def _held(path: Path) -> Iterator[BinaryIO]:
    """Yield a file of completions, which one run at a time has; half a line at its end, of a run
    that was killed, is cut off.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise _unwritten(path, exc) from None
    with open(descriptor, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--completions: {path} is being written by another run") from None
        try:
            data = file.read()
            if data and not data.endswith(b"\n") and not _is_json(data.rpartition(b"\n")[2]):
                file.truncate(data.rfind(b"\n") + 1)
        except OSError as exc:
            raise _unwritten(path, exc) from None
        yield file


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _append(file: BinaryIO, path: Path, of: str, texts: Sequence[str]) -> None:
    lines = [json.dumps({"task_id": of, "completion": text}) + "\n" for text in texts]
    try:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            lines = lines if file.read() == b"\n" else ["\n", *lines]
        file.write("".join(lines).encode())
        file.flush()
    except OSError as exc:
        raise _unwritten(path, exc) from None


def _unwritten(path: Path, exc: OSError) -> InputError:
    return InputError(f"--completions: cannot write {path}: {exc.strerror}")
