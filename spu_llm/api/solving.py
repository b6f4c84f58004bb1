"""Programs of a split model for tasks with tests."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from spu_llm.api.events import OnEvent
from spu_llm.api.split import SplitClient, SplitOptions
from spu_llm.core.errors import InputError
from spu_llm.systems.split.code_tasks import STOPS, CodeTask, read_completions
from spu_llm.systems.split.records import MAX_TEXTS


def solve(
    client: SplitClient,
    tasks: Sequence[CodeTask],
    completions: Path,
    samples: int,
    options: SplitOptions = SplitOptions(),
    on_event: OnEvent = lambda event: None,
) -> int:
    """Append to a JSON Lines file the completions that each task lacks for there to be `samples`,
    in mode plain or noir; return how many. A text also ends before what begins something else
    (`code_tasks.STOPS`), unless `options.stop` says where it does.

    The completions of a task are one session: the provider learns how many there are, and how long
    prompt and completions. They are written when it has ended, for the file's owner alone. Errors
    as of `SplitClient.complete_each`.
    """
    if not 1 <= samples <= MAX_TEXTS:
        raise InputError(f"--samples must be 1 to {MAX_TEXTS}, found {samples}")
    there = read_completions(completions, tasks) if completions.exists() else {}
    made = 0
    for number, task in enumerate(tasks):
        if (lacking := samples - len(there.get(task.id, ()))) <= 0:
            continue
        asked = dataclasses.replace(
            options,
            stop=options.stop or STOPS[task.layout],
            seed=None if options.seed is None else options.seed + number,
        )
        texts = client.complete_each([task.prompt] * lacking, asked, on_event)
        _append(completions, task.id, texts)
        made += lacking
    return made


def _append(path: Path, of: str, texts: Sequence[str]) -> None:
    lines = (json.dumps({"task_id": of, "completion": text}) + "\n" for text in texts)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write("".join(lines))
    except OSError as exc:
        raise InputError(f"--completions: cannot write {path}: {exc.strerror}") from None
