"""Record vectors: `python -m tests.vectors [OP ...]`, every op's when none is named."""

from __future__ import annotations

import argparse

from spu_llm.core.correlation import Correlation
from spu_llm.core.values import CLIENT, PROVIDER
from tests.vectors.cases import CASES
from tests.vectors.encoding import VERSION_FILE, files, load, path_of, text_of, version_line
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
    taken: dict[str, Correlation] = {}
    made = {op: record(op, taken) for op in ops}
    before = [load(path.stem) for path in files()]
    if names := changed([*before, *made.values()], taken):
        parser.error(
            f"{', '.join(names)}: another meaning under the same name; batches on disk are found "
            "by it, so give it another name"
        )
    for op, recorded in made.items():
        for case in recorded["cases"]:
            check_results(case)  # before anything is written
            for rank in (CLIENT, PROVIDER):
                replay(case, rank)
        path, text = path_of(op), text_of(recorded)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"recorded {op}: {len(text):,} bytes")
    version = VERSION_FILE.read_text(encoding="utf-8")
    if version == version_line():
        return
    if version.split()[0] == version_line().split()[0] and not options.same_version:
        parser.error(
            "what is recorded has changed: raise VERSION in protocols/__init__.py, or, if an "
            "earlier installation still understands this one, say --same-version"
        )
    VERSION_FILE.write_text(version_line(), encoding="utf-8")


if __name__ == "__main__":
    main()
