"""Which kernels NumPy's BLAS multiplies matrices with.

OpenBLAS looks for the processor in a list of its own, and takes its slowest kernels (SSE3) for one
that is younger than the list: matrices of doubles then took 3.5 times as long (NumPy 1.26 on an
Intel processor of 2023). The instructions that a processor says it has are enough to choose by.
OpenBLAS reads the choice when NumPy is imported: the command line makes it before that, and for the
workers that are started.
"""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

_VARIABLE = "OPENBLAS_CORETYPE"
_KERNELS = (  # the fastest first
    ("SkylakeX", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
    ("Haswell", frozenset({"avx2", "fma"})),
)


def settings() -> dict[str, str]:
    """Return the environment variable that has a process use the fastest kernels that it can, or as
    the user has set it; nothing for processors whose kernels OpenBLAS had better choose.
    """
    chosen = os.environ.get(_VARIABLE) or kernels(_instructions())
    return {_VARIABLE: chosen} if chosen else {}


def kernels(instructions: Set[str]) -> str:
    """Return OpenBLAS's name of the fastest kernels for `instructions`, as Linux names them; empty
    if it is none that we know.
    """
    return next((name for name, needed in _KERNELS if needed <= instructions), "")


def _instructions(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, ()))
