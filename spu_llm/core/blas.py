"""Which kernels NumPy's BLAS multiplies matrices with.

OpenBLAS looks for the processor in a list of its own, and takes its slowest kernels (SSE3) for one
that is younger than the list: products of matrices of doubles took 3.5 times as long as they need
(NumPy 1.26 on an Intel processor of 2023). The instructions that a processor says it has are enough
to choose kernels by that every such processor runs; for one that OpenBLAS knows it may have others,
of single precision. It reads the choice when NumPy is imported, and so does SciPy's own: it is made
for processes that are started, workers and providers beside a client. Studies that compute in one
process, here or in a cluster, have what OpenBLAS chooses.
"""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

_VARIABLE = "OPENBLAS_CORETYPE"
_KERNELS = (  # the widest first
    ("SkylakeX", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
    ("Haswell", frozenset({"avx2", "fma"})),
)


def settings() -> dict[str, str]:
    """Return the environment variable by which a process uses the kernels of this processor's
    instructions, or those that the user has chosen by it; nothing for instructions that are none of
    ours, where OpenBLAS chooses.
    """
    chosen = os.environ.get(_VARIABLE) or kernels(_instructions())
    return {_VARIABLE: chosen} if chosen else {}


def kernels(instructions: Set[str]) -> str:
    """Return OpenBLAS's name of the kernels for `instructions`, as Linux names them; empty where it
    chooses itself.
    """
    return next((name for name, needed in _KERNELS if needed <= instructions), "")


def _instructions(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, ()))
