"""Settings of JAX and XLA in a user's environment have no effect on any process of this project."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spu_llm.core import jax_settings
from tests.kit.pair import Pair
from tests.kit.paths import ROOT
from tests.kit.processes import Start

# Each of these alone ended a session, or a process at its start.
HOSTILE = {
    "JAX_ENABLE_X64": "1",
    "JAX_PLATFORMS": "cuda",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_DEBUG_NANS": "perhaps",
    "XLA_FLAGS": "--xla_no_such_flag=1",
    "TF_XLA_FLAGS": "--tf_no_such_flag=1",
}


@pytest.mark.slow
def test_both_parties_work(start: Start, pair: Pair) -> None:
    demo = start(
        *pair.demo, "--prompt", "ab", "--max-new-tokens", "2", "--draft-length", "1", **HOSTILE
    )
    assert demo.wait(120) == 0, demo.stderr
    assert demo.stdout


def test_doctor_says_what_was_overridden(start: Start, pair: Pair) -> None:
    doctor = start("doctor", "--model", str(pair.private), **HOSTILE)
    assert doctor.wait(60) == 0, doctor.stderr
    (line,) = (line for line in doctor.stdout.splitlines() if " settings: " in line)
    assert line.startswith("warning") and ", ".join(sorted(HOSTILE)) in line


@pytest.mark.parametrize("module", ["experiments", "models.training"])
def test_what_runs_as_a_module(module: str) -> None:
    work = f"import {module}, jax; print((jax.numpy.arange(3) + 1).dtype, jax.devices())"
    done = subprocess.run(
        [sys.executable, "-c", work],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | HOSTILE,
        timeout=60,
    )
    assert done.stdout == "int32 [CpuDevice(id=0)]\n", done.stderr


def test_what_is_ours_is_no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_ENABLE_X64", "JAXTYPING_DISABLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(jax_settings, "_overridden", set())
    jax_settings.settle()
    assert jax_settings.overridden() == ["JAX_ENABLE_X64"]
    assert os.environ["JAXTYPING_DISABLE"] == "1"  # another package's
    assert os.environ["JAX_PLATFORMS"] == "cpu" and "JAX_ENABLE_X64" not in os.environ


def test_nothing_imports_jax_before() -> None:
    """The command line and the worker's module leave it to what they call after `settle`."""
    work = "import sys, spu_llm.app.cli, spu_llm.service.worker; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", work],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.stdout == "False\n", done.stderr
