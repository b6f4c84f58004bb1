"""What two workers can run together, by name; both supervisors agree on the name first.

A program is a function of this party's session and job (public settings, and this party's own
inputs) that returns its result as JSON fields. `preparation` makes material for completions, where
the provider keeps such (`serve --pool`). All others are studies: they open more than a completion
does, so a provider takes part in them only when told to (`serve --studies`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from spu_llm.core.settings import SpuConfig
from spu_llm.runtime.party_session import PartySession

Send = Callable[..., None]  # send(event, **fields): an event for the supervisor
Program = Callable[[PartySession, dict[str, Any], Send], dict[str, Any]]

COMPLETION = "completion"
PREPARATION = "preparation"
STUDIES = {
    "step-sweep": "experiments.benchmarks.step_sweep",
    "logits": "experiments.claims.logits",
    "transcript": "experiments.claims.transcript",
    "op-bench": "experiments.benchmarks.op_bench",
    "verify-bench": "experiments.benchmarks.verify_bench",
    "stock-gpt2": "experiments.spu_baseline.gpt2",
    "stock-layers": "experiments.spu_baseline.layers",
    "scale": "experiments.benchmarks.scale",
    "completion-study": "experiments.claims.completions",
}
_MODULES = {
    COMPLETION: "spu_llm.systems.decoding.completion",
    PREPARATION: "spu_llm.systems.decoding.preparation",
    **STUDIES,
}
# SPU's settings where a program runs with others than ours. SPU's own way to a result transfers
# while it runs: there its stock must be extended in few messages.
_FEW_MESSAGES = "EMP_Ferret"
_SPU = {
    "op-bench": SpuConfig(ot_kind=_FEW_MESSAGES),
    "verify-bench": SpuConfig(ot_kind=_FEW_MESSAGES),
    "stock-gpt2": SpuConfig(exp_mode="EXP_PADE", ot_kind=_FEW_MESSAGES),
    "stock-layers": SpuConfig(exp_mode="EXP_PADE", ot_kind=_FEW_MESSAGES),
}
# Their weights are random, so that nobody asks for a hint of them again.
_OF_RANDOM_WEIGHTS = ("op-bench", "verify-bench", "scale")


def load(name: str) -> Program:
    """The program's `run` function."""
    run: Program = import_module(_MODULES[name]).run
    return run


def keeps_hints(name: str) -> bool:
    """Whether hints of silent products outlive a session of the program."""
    return name not in _OF_RANDOM_WEIGHTS


def spu_config(name: str) -> SpuConfig:
    """The settings of SPU that the program runs with."""
    return _SPU.get(name, SpuConfig())
