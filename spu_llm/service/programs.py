"""All programs by name, each with the place of its record; supervisors agree on the name first.

A provider serves studies only when told to (`serve --studies`), since they open more than other
programs do. Nothing of a study is imported before: what is imported to find its record, too.
"""

from __future__ import annotations

from pkgutil import resolve_name

from spu_llm.core.errors import InputError
from spu_llm.net.frames import StreamType
from spu_llm.systems.program import Program

SERVED = {
    "completion": "spu_llm.systems.decoding.records:COMPLETION",
    "chat": "spu_llm.systems.decoding.records:CHAT",
    "preparation": "spu_llm.systems.decoding.records:PREPARATION",
    "private-text": "spu_llm.systems.dp_text.secure_records:SECRET_MODEL",
    "shared-text": "spu_llm.systems.dp_text.secure_records:SHARED_MODEL",
    "split-completion": "spu_llm.systems.split.secure_records:SPLIT_COMPLETION",
    "split-preparation": "spu_llm.systems.split.secure_records:SPLIT_PREPARATION",
    "split-generate": "spu_llm.systems.split.records:GENERATE",
    "split-tune": "spu_llm.systems.split.records:TUNE",
}
STUDIES = {
    "step-sweep": "experiments.benchmarks.step_sweep:PROGRAM",
    "logits": "experiments.fidelity.logits:PROGRAM",
    "fidelity-shares": "experiments.fidelity.shares:PROGRAM",
    "transcript": "experiments.completions.transcript:PROGRAM",
    "op-bench": "experiments.benchmarks.op_bench:PROGRAM",
    "verify-bench": "experiments.benchmarks.verify_bench:PROGRAM",
    "spu-baseline": "experiments.spu_baseline.whole:PROGRAM",
    "spu-baseline-layers": "experiments.spu_baseline.layers:PROGRAM",
    "scale": "experiments.benchmarks.scale:PROGRAM",
    "viewed": "spu_llm.systems.decoding.viewed:PROGRAM",
    "viewed-split": "spu_llm.systems.split.secure_viewed:PROGRAM",
    "completion-study": "experiments.completions.study:PROGRAM",
}


def place_of(name: str) -> str:
    """Return where the record of a program is, as MODULE:NAME; InputError when there is none of
    that name.
    """
    place = SERVED.get(name) or STUDIES.get(name)
    if place is None:
        raise InputError(f"the client asks for an unknown program {name!r}")
    return place


def load(place: str) -> Program:
    """Return the record at a place."""
    program: Program = resolve_name(place)
    return program


def find(name: str) -> Program:
    """Return the record of a program; InputError when there is none of that name."""
    return load(place_of(name))


def doors(program: Program) -> tuple[StreamType, ...]:
    """Return the types of streams that the peer may open."""
    return (StreamType.MESSAGES,) if program.spu is None else (StreamType.LINK, StreamType.MESSAGES)
