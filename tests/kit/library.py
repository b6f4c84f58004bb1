"""A small standard library of Python's, whose tests have docstrings."""

from __future__ import annotations

from pathlib import Path

_SOURCE = '''"""Tests of part {0}."""

class Test:
    """Part {0} and its neighbours."""

    def test_{0}(self):
        """The {0} of it is kept."""

    def test_other(self):
        pass
'''


def make_library(root: Path, files: int = 24) -> Path:
    """Return a standard library with tests, files beside them, and one that is no Python."""
    folder = root / "test"
    folder.mkdir(parents=True)
    for i in range(files):
        (folder / f"test_{i}.py").write_text(_SOURCE.format(chr(97 + i) * 3), encoding="utf-8")
    (folder / "bad.py").write_text("def (:\n", encoding="utf-8")
    (folder / "latin.py").write_bytes(b'"""caf\xe9, which is not UTF-8."""\n')
    (root / "code.py").write_text('"""Not a test, and longer than that."""\n', encoding="utf-8")
    return root
