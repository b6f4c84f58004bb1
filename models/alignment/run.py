"""An alignment from beginning to end: the private model's answers, then a student of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from models.alignment import fitting
from models.alignment.answers import Answer, Begun, Origin, begun_of, read_answers, write_part
from models.alignment.fitting import Run, Settings
from models.alignment.student import Student
from models.alignment.writing import Script, Scripts, Writer
from models.files import TEXT_FILES, replace_file
from models.hf import save_model
from spu_llm.core.errors import InputError

ANSWERS, RUN, CURVE = "answers", "run", "align.json"  # in the folder of an alignment
HELD_OUT = 20  # one text of so many is kept for measuring
_MOST_HELD_OUT = 200


def ask(
    writer: Writer,
    scripts: Iterator[Script],
    kind: str,
    origin: Origin,
    folder: Path,
    places: int | None,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Have the private model answer all scripts, or as many as have so many places that count; go
    on after the parts of this kind that the folder has. Each round of the writer is a part.
    InputError where a round gives no answer.
    """
    begun = begun_of(folder, kind, origin)
    left = Scripts(scripts, begun.scripts)
    while not left.is_over and (places is None or begun.places < places):
        answers = writer.round(left, seed * 1_000_003 + begun.parts)
        if not answers:
            raise InputError(
                "the private model gave no answers: its chat template fills a text, or it ends "
                "texts at once; give a larger --length, or other texts"
            )
        more = sum(len(one.ids) for one in answers)
        begun = Begun(begun.parts + 1, left.begun, begun.places + more)
        write_part(folder, kind, begun, answers, origin)
        say(f"{begun.places} answers" + (f" of {places}" if places else f", {left.begun} texts"))


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
    """Train a student on the answers in `out`; write the best one there as a model directory
    (float16), with the text files of the directory `tokenizer`, and the curve. InputError for
    answers that the student's context or vocabulary does not hold.
    """
    answers, origin = read_answers(out / ANSWERS)
    config = student.config
    longest = max(max(one.source, len(one.written) - 1) for one in answers)
    largest = max(max(int(one.tokens.max()), int(one.ids.max(initial=0))) for one in answers)
    if longest > config.context:
        raise InputError(
            f"the answers' texts have {longest} tokens, but the draft model's context is "
            f"{config.context}; make shorter ones by --length, or take another draft model"
        )
    if largest >= config.vocab_size:
        raise InputError(
            f"the answers have token {largest}, but the draft model {config.vocab_size} tokens; "
            "take a draft model with the private model's vocabulary"
        )
    settings = replace(settings, temperature=origin.temperature)
    learnt, held_out = halves(answers)
    params, run = fitting.fit(student, learnt, held_out, settings, out / RUN, say)
    save_model(out, config, params)
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
    replace_file(out / CURVE, (json.dumps(written, indent=1) + "\n").encode())
    return run
