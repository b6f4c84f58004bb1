"""Record vectors: `python -m tests.vectors [OP ...]`, every op's when none is named."""

from __future__ import annotations

import argparse

from spu_llm.core.correlation import Correlation
from spu_llm.core.values import CLIENT, PROVIDER
from tests.vectors.cases import CASES
from tests.vectors.encoding import VERSION_FILE, load, path_of, text_of, version_line
from tests.vectors.meanings import changed
from tests.vectors.recording import record
from tests.vectors.replay import check_results, replay


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.vectors", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="an op by its name")
    parser.add_argument("--same-version", action="store_true", help="protocols are as they were")
    options = parser.parse_args()
    ops = options.ops or list(CASES)
    if unknown := [op for op in ops if op not in CASES]:
        parser.error(f"no cases of {', '.join(unknown)}; tests/vectors/cases.py has them")
    for op in ops:
        taken: dict[str, Correlation] = {}
        recorded = record(op, taken)
        if path_of(op).exists() and (names := changed(load(op), taken)):
            parser.error(
                f"{', '.join(names)}: another meaning under the same name; batches on disk are "
                "found by it, so give it another name"
            )
        for case in recorded["cases"]:
            check_results(case)  # before anything is written
            for rank in (CLIENT, PROVIDER):
                replay(case, rank)
        path, text = path_of(op), text_of(recorded)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"recorded {op}: {len(text):,} bytes")
    before = VERSION_FILE.read_text(encoding="utf-8")
    if before == version_line():
        return
    if before.split()[0] == version_line().split()[0] and not options.same_version:
        parser.error(
            "what is recorded has changed: raise VERSION in protocols/__init__.py, or, if an "
            "earlier installation still understands this one, say --same-version"
        )
    VERSION_FILE.write_text(version_line(), encoding="utf-8")


if __name__ == "__main__":
    main()
