"""The kernels that NumPy's BLAS is told to use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spu_llm.core import blas
from spu_llm.service import supervisor

_SAYS = """
import ctypes, pathlib, numpy
beside = pathlib.Path(numpy.__file__).parents[1] / "numpy.libs"
libraries = list(beside.glob("libopenblas64_*.so"))
if libraries:
    name = ctypes.CDLL(str(libraries[0])).openblas_get_corename64_
    name.restype = ctypes.c_char_p
    print(name().decode(), end="")
else:
    print("other BLAS", end="")
"""
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


def test_numpy_takes_them() -> None:
    """What a process that is started with the settings says of itself."""
    if not blas.settings():
        pytest.skip("this processor has no instructions that we know of")
    done = subprocess.run(
        [sys.executable, "-c", _SAYS], env=os.environ | blas.settings(), capture_output=True
    )
    if done.stdout == b"other BLAS":
        pytest.skip("this NumPy has another BLAS")
    assert done.stdout.decode() == blas.settings()["OPENBLAS_CORETYPE"], done.stderr


def test_a_worker_has_numpy_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a program that imports the framework and is no command."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert blas.settings().items() <= supervisor._environment().items()
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    assert supervisor._environment()["OPENBLAS_CORETYPE"] == "Prescott"
