"""JAX's settings, which this project's processes make themselves.

JAX and XLA, of which SPU holds one of its own, take settings from the environment: wider integers,
another platform, an error where ranks differ, flags that end the process when they are unknown.
With any of these both parties would compute something else, or nothing. Every process of this
project calls `settle` before JAX is imported: the command line, workers, `experiments`,
`models.training` and the tests. A program that imports the framework as a library is its owner's to
set up; what is tested are JAX's defaults on the CPU.
"""

from __future__ import annotations

import os

_PREFIXES = ("JAX_", "JAXLIB_", "XLA_", "TF_", "PJRT_", "LIBTPU_")
# The last two are as JAX and SPU set them by themselves, for this process and those that it starts.
_OURS = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1", "PJRT_DEVICE": "CPU"}
_overridden: set[str] = set()


def settle() -> None:
    """Take the user's settings out of this process's environment, and put in what is needed."""
    for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
        if os.environ[name] != _OURS.get(name):
            del os.environ[name]
            _overridden.add(name)
    os.environ.update(_OURS)


def overridden() -> list[str]:
    """Return the names of variables that `settle` found and changed in this process."""
    return sorted(_overridden)
