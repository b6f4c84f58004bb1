"""The kernels that NumPy's BLAS is told to use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spu_llm.core import blas

OF_512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("instructions", "name"),
    [
        (set(), ""),
        ({"sse2", "avx"}, ""),
        ({"avx2"}, ""),
        ({"avx2", "fma", "sse2"}, "Haswell"),
        (OF_512 | {"avx2", "fma"}, "SkylakeX"),
        ({"avx512f", "avx2", "fma"}, "Haswell"),  # as on Xeon Phi, which lacks some
    ],
)
def test_kernels_are_the_fastest_that_run(instructions: set[str], name: str) -> None:
    assert blas.kernels(instructions) == name


def test_instructions_are_the_first_processors(tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("model : 1\nflags\t\t: fpu avx2 fma\nflags\t\t: other\n")
    assert blas._instructions(listed) == {"fpu", "avx2", "fma"}
    listed.write_text("Features : asimd\n")
    assert blas._instructions(listed) == frozenset()
    assert blas._instructions(tmp_path / "none") == frozenset()


def test_the_users_own_choice_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    assert blas.settings() == {"OPENBLAS_CORETYPE": "Prescott"}


def test_a_command_has_numpy_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line imports NumPy after it has chosen."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    if not blas.settings():
        pytest.skip("this processor has no instructions that we know of")
    code = (
        "import os, sys\n"
        "from spu_llm.app import cli\n"
        "assert 'numpy' not in sys.modules\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(os.environ['OPENBLAS_CORETYPE'])\n"
    )
    plain = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True)
    assert done.stdout.split()[-1] == blas.settings()["OPENBLAS_CORETYPE"], done.stderr
