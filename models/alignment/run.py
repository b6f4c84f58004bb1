"""An alignment from beginning to end: the private model's answers, then a student of them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from models.alignment import fitting
from models.alignment.answers import Answer, Origin, begun, read_answers, write_part
from models.alignment.fitting import Run, Settings
from models.alignment.student import Student
from models.alignment.writing import Script, Writer
from models.files import TEXT_FILES
from models.hf import save_model
from spu_llm.core.errors import InputError

ANSWERS, RUN, CURVE = "answers", "run", "align.json"  # in the folder of an alignment
HELD_OUT = 20  # one text of so many is kept for measuring
_MOST_HELD_OUT = 200


def ask(
    writer: Writer,
    scripts: Iterator[Script],
    origin: Origin,
    folder: Path,
    tokens: int | None,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Have the private model answer all scripts, or as many as have so many places that count; go
    on after the parts that the folder has. Each round of the writer is a part.
    """
    part, scripts_begun, places = begun(folder, origin)
    numbered = zip(itertools.count(1), scripts, strict=False)
    for _ in itertools.islice(numbered, scripts_begun):
        pass

    def counted() -> Iterator[Script]:
        nonlocal scripts_begun
        for number, script in numbered:
            scripts_begun = number
            yield script

    left = counted()
    while tokens is None or places < tokens:
        asked = scripts_begun
        answers = writer.round(left, seed * 1_000_003 + part)
        if scripts_begun == asked:
            break
        if answers:
            write_part(folder, part, answers, origin, scripts_begun)
            part += 1
        places += sum(len(one.ids) for one in answers)
        say(f"{places} answers" + (f" of {tokens}" if tokens else f" to {scripts_begun} texts"))


def halves(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Split answers into those to learn from, and held-out ones: every 20th, 200 at most.
    InputError for fewer than 20.
    """
    held_out = list(answers[HELD_OUT - 1 :: HELD_OUT])[:_MOST_HELD_OUT]
    if not held_out:
        raise InputError(
            f"there are {len(answers)} texts with answers, of which none can be held out; give at "
            f"least {HELD_OUT}"
        )
    kept = {id(one) for one in held_out}
    return [one for one in answers if id(one) not in kept], held_out


def align(
    student: Student, settings: Settings, tokenizer: Path, out: Path, say: Callable[[str], None]
) -> Run:
    """Train a student on the answers in `out`; write the best one there as a model directory, with
    the text files of the directory `tokenizer`, and the curve.
    """
    answers, origin = read_answers(out / ANSWERS)
    settings = replace(settings, temperature=origin.temperature)
    learnt, held_out = halves(answers)
    params, run = fitting.fit(student, learnt, held_out, settings, out / RUN, say)
    save_model(out, student.config, params)
    for name in TEXT_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, out / name)
    written: dict[str, Any] = {
        "curve": [asdict(point) for point in run.curve],
        "best": asdict(run.best),
        "settings": asdict(settings),
        "answers": {**asdict(origin), "texts": len(answers), "held_out": len(held_out)},
        "fixed": sorted(student.fixed),
    }
    (out / CURVE).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return run
