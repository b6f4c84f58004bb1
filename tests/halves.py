"""`python -m tests.halves`: all tests in two processes at once, which is what two cores are for.

The longer half, with most of the runs between two processes, shows its progress; what the other
one had to say follows.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LONGER = ("app", "confidential", "split", "watermark")


def halves() -> tuple[list[str], list[str]]:
    """Folders and files of either half; together all that holds tests."""
    longer = [str(FOLDER / name) for name in LONGER]
    holding = {test.relative_to(FOLDER).parts[0] for test in FOLDER.rglob("test_*.py")}
    return longer, [str(FOLDER / name) for name in sorted(holding - {*LONGER})]


def main() -> int:
    longer, shorter = halves()
    pytest = [sys.executable, "-m", "pytest", "-q"]
    with subprocess.Popen(
        [*pytest, "-p", "no:cacheprovider", *shorter],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as other:  # fmt: skip
        try:
            failed = subprocess.call([*pytest, *longer])
            said, _ = other.communicate()
        except BaseException:
            other.terminate()
            raise
    print(said, end="", flush=True)
    return failed or other.returncode


if __name__ == "__main__":
    sys.exit(main())
