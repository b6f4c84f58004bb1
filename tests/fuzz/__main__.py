"""`python -m tests.fuzz [--minutes M] [TARGET ...]`: fuzz parsers, each for so long.

With `atheris` (pip install atheris==3.0.0, CPython 3.11) by coverage, in a process for each target;
else blindly, by changes of a seed. Ends with exit code 1 when a target let an error out, and prints
its bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.kit.paths import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each (default: 1)")
    options = parser.parse_args()
    from tests.fuzz.targets import TARGETS

    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"no target {min(unknown)}; there are {', '.join(TARGETS)}")
    failed = []
    for name in options.targets or TARGETS:
        if importlib.util.find_spec("atheris") is not None:
            ok = _guided(name, options.minutes)
        else:
            ok = _blind(name, options.minutes)
        failed += [] if ok else [name]
    print(f"failed: {', '.join(failed)}" if failed else "no target let an error out", flush=True)
    return 1 if failed else 0


_GUIDED = """
import sys
import atheris
with atheris.instrument_imports(include=["spu_llm", "models", "tests.fuzz"]):
    from tests.fuzz.targets import TARGETS
atheris.Setup(sys.argv, TARGETS[sys.argv.pop(1)])
atheris.Fuzz()
"""


def _guided(name: str, minutes: float) -> bool:
    from tests.fuzz.targets import SEEDS

    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        (corpus / "seed").write_bytes(SEEDS[name]())
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                _GUIDED,
                name,
                str(corpus),
                "-verbosity=0",
                "-max_len=4096",
                f"-max_total_time={round(60 * minutes)}",
                "-print_final_stats=1",
            ],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        crashes = [f"by {crash.read_bytes().hex()}" for crash in Path(folder).glob("crash-*")]
    runs = [line for line in done.stderr.splitlines() if "number_of_executed_units" in line]
    count = int(runs[0].split()[-1]) if runs else 0
    print(f"{name}: {count:,} inputs in {minutes:g} min, exit code {done.returncode}", flush=True)
    if done.returncode:
        print(done.stderr[-3000:], *crashes, sep="\n", flush=True)
    return done.returncode == 0


def _blind(name: str, minutes: float) -> bool:
    from tests.fuzz.changing import changed
    from tests.fuzz.targets import SEEDS, TARGETS

    source, seed = random.Random(), SEEDS[name]()
    count, until = 0, time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        data = changed(seed, source)
        count += 1
        try:
            TARGETS[name](data)
        except Exception as exc:
            print(f"{name}: {type(exc).__name__}: {exc}, by {data.hex()}", flush=True)
            return False
    print(f"{name}: {count:,} inputs in {minutes:g} min, blindly", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
