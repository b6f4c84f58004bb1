"""A run that kills itself: `python -m tests.systems.dp_text.killed OUT WITNESS POINT TOGETHER`.

Ten texts of three draws each. WITNESS gets a line for every draw, before it is made: the number of
the text, and what its stream begins with. POINT says where it gets SIGKILL: NAME:COUNT, at the
COUNT-th time that it comes by. TOGETHER: texts that are drawn in turn, of one stream.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text import ledger_file

TEXTS, DRAWS = 10, 3
RUN = {"epsilon": 5.0, "texts": TEXTS}
SPENDS = {"rho": 0.46, "epsilon": 5.0}
REFERENCES = ["one", "two"]
POINTS = ("recorded", "not-recorded", "draw", "made", "torn", "written", "wiped", "never")


def main(out: Path, witness: Path, point: str, together: int) -> None:
    name, _, count = point.partition(":")
    left = int(count or 1)

    def pass_by(here: str) -> None:
        nonlocal left
        if here == name:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

    record, append = ledger_file.CorpusFile._record, ledger_file.CorpusFile._append

    def recording(self: Any) -> None:
        begins = self._state["key"] is not None
        if begins:
            pass_by("not-recorded")
        record(self)
        pass_by("recorded" if begins else "wiped")

    def appending(self: Any, data: bytes) -> None:
        pass_by("made")
        if name == "torn" and left == 1:
            append(self, data[: len(data) // 2])
        pass_by("torn")
        append(self, data)
        pass_by("written")

    ledger_file.CorpusFile._record = recording  # type: ignore[method-assign]
    ledger_file.CorpusFile._append = appending  # type: ignore[method-assign]

    def make(numbers: range, prg: Prg) -> list[dict[str, Any]]:
        drawn: dict[int, list[int]] = {number: [] for number in numbers}
        for _ in range(DRAWS):
            for number in numbers:
                drawn[number].append(int(prg.words((1,))[0]))
                with open(witness, "a") as file:
                    file.write(f"{number} {drawn[number][-1]}\n")
                pass_by("draw")
        return [{"text": f"text {number}", "words": words} for number, words in drawn.items()]

    with ledger_file.opened(out, RUN, REFERENCES, SPENDS) as file:
        ledger_file.write(file, TEXTS, make, lambda number: together)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
