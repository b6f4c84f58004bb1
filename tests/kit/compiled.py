"""Programs that JAX compiles in tests, kept for the tests after them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jax

from tests.kit.paths import ROOT


def keep_compiled() -> None:
    """Let JAX look for a compiled program in `build/compiled` first, and leave there what it
    compiles: tests that make the same small model in other processes, or another time, compile the
    same programs. They are machine code, so each kind of processor has a folder of its own.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kind = next((line for line in lines if line.startswith("flags")), "")
    folder = ROOT / "build" / "compiled" / hashlib.sha256(kind.encode()).hexdigest()[:16]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
