"""Run pytest on the files named in the arguments, as Bazel expects a test to behave."""

from __future__ import annotations

import os
import sys

import pytest


def main() -> int:
    args = ["-p", "no:cacheprovider", "--basetemp", os.path.join(os.environ["TEST_TMPDIR"], "p")]
    if "XML_OUTPUT_FILE" in os.environ:
        args.append("--junitxml=" + os.environ["XML_OUTPUT_FILE"])
    if "TESTBRIDGE_TEST_ONLY" in os.environ:  # bazel test --test_filter
        args += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    code = pytest.main(args + sys.argv[1:])
    # A file whose tests are all marked slow has nothing to run: that is no failure of one target.
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main())
