"""Draft models without the tensors of their private model, and completed by them.

    python -m spu_llm.app.draft_tensors take DRAFT PRIVATE FOLDER
    python -m spu_llm.app.draft_tensors complete FOLDER PRIVATE DRAFT

DRAFT and PRIVATE are model directories, DRAFT one that `spu-llm align` wrote.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from spu_llm.app.printing import say, show
from spu_llm.core.errors import InputError


def main(given: list[str] | None = None) -> int:
    """Run a command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m spu_llm.app.draft_tensors")
    parser.add_argument("action", choices=("take", "complete"))
    parser.add_argument("read", metavar="FROM", type=Path)
    parser.add_argument("private", metavar="PRIVATE", type=Path)
    parser.add_argument("written", metavar="TO", type=Path)
    options = parser.parse_args(given)
    from models.alignment import changed

    try:
        if options.action == "take":
            names = changed.take(options.read, options.private, options.written)
            show(f"{options.written} written, without {', '.join(names)}")
        else:
            changed.complete(options.read, options.private, options.written)
    except InputError as error:
        say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
