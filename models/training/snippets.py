"""Snippets of held-out text for experiments, which are shipped with the models."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from models.training.corpus import CorpusFile, read_text
from spu_llm.core.errors import InputError

SHIPPED = Path(__file__).resolve().parent.parent / "shipped"
MIN_LINES = 8  # of a file that snippets are taken from


@dataclass(frozen=True)
class Snippet:
    """Whole lines from a held-out file."""

    file: str  # relative to the standard library
    text: str


def cut_snippets(files: list[CorpusFile], count: int, size: int, seed: int) -> list[Snippet]:
    """Draw `count` snippets of whole lines, at most `size` characters each (unless one line is
    longer).

    A held-out file is drawn with a probability proportional to its number of possible beginnings. A
    snippet begins at an unindented line that opens a function, a class, an import or a comment, as
    a user's prompt does.
    """
    generator = random.Random(seed)
    candidates = []
    for file in files:
        if file.held_out:
            lines = read_text(file).splitlines(keepends=True)
            starts = [i for i, line in enumerate(lines[:-MIN_LINES]) if _opens(line)]
            if starts:
                candidates.append((file, lines, starts))
    weights = [len(starts) for _, _, starts in candidates]
    chosen: dict[tuple[str, int], Snippet] = {}
    if count > sum(weights):
        raise InputError(f"only {sum(weights)} held-out snippets exist; ask for fewer")
    while len(chosen) < count:
        file, lines, starts = generator.choices(candidates, weights)[0]
        start = generator.choice(starts)
        chosen[file.path, start] = Snippet(file.path, _whole_lines(lines[start:], size))
    return list(chosen.values())


def _opens(line: str) -> bool:
    return line.startswith(("def ", "class ", "import ", "from ", "# ", "@", "async def "))


def _whole_lines(lines: list[str], size: int) -> str:
    """Join the first of `lines` that fit `size` characters, at least one, without blanks at the
    end.
    """
    text = lines[0]
    for line in lines[1:]:
        if len(text) + len(line) > size:
            break
        text += line
    return text.rstrip()


def write_snippets(path: Path, snippets: list[Snippet]) -> None:
    """Write one JSON object per line, with `file` and `text`."""
    lines = [json.dumps({"file": s.file, "text": s.text}) + "\n" for s in snippets]
    path.write_text("".join(lines), encoding="utf-8")


def read_snippets(path: Path = SHIPPED / "held_out.jsonl") -> list[Snippet]:
    """Return the snippets that `write_snippets` wrote; InputError if the file cannot be read."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [Snippet(row["file"], row["text"]) for row in rows]
    except FileNotFoundError:
        raise InputError(f"{path} is missing; run models.training.train to write it") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is not a file of snippets; restore it") from None
