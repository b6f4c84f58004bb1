"""Python in README and docs: every block is run here or by another test, or says why it is not."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.pages import TEXTS
from tests.kit.paths import ROOT
from tests.kit.patience import RUN_S

BLOCK = re.compile(r"^```python\n(.*?)^```\n(<!-- not run: .+ -->)?", re.MULTILINE | re.DOTALL)
RUN = {
    "README.md",  # tests/api/test_api.py
    "docs/how-to/add-a-protocol.md",
    "docs/how-to/add-a-study.md",
}


def blocks(name: str) -> list[str]:
    return [match[1] for match in BLOCK.finditer((ROOT / name).read_text(encoding="utf-8"))]


def test_every_block_is_run_or_says_why_not() -> None:
    for path, text in TEXTS.items():
        name = str(path.relative_to(ROOT))
        for match in BLOCK.finditer(text):
            compile(match[1], name, "exec")
            assert (name in RUN) != bool(match[2]), f"{name}: {match[1][:60]}"


def test_the_op_of_the_docs_passes_its_contract(tmp_path: Path) -> None:
    """As a newcomer would write it: a file of tests, and a program that uses the op."""
    op, program = blocks("docs/how-to/add-a-protocol.md")
    (tmp_path / "test_fresh.py").write_text(op)
    (tmp_path / "program.py").write_text(f"{op}\n{program}")
    for command in (
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fresh.py"],
        ["program.py"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[array([0, 1, 2], dtype=int32), None]"


def test_the_study_of_the_docs_ends_with_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("docs/how-to/add-a-study.md")
    study: dict[str, object] = {}
    exec(block, study)
    parser = argparse.ArgumentParser()
    study["add_options"](parser)  # type: ignore[operator]
    file = tmp_path / "result.json"
    study["command"](parser.parse_args(["--json", str(file)]))  # type: ignore[operator]
    assert capsys.readouterr().out == "the answer is 42\n" and file.exists()
