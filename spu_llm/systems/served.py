"""What a provider serves, as its supervisor knows it: the plug-in of a system that brings anything
of its own, besides the programs that clients ask for (`spu_llm.systems.program`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.resident import place
from spu_llm.systems.program import Job, Served

if TYPE_CHECKING:
    from models.family import ModelConfig, Params
    from models.tokenizer import Tokenizer


# Folds a model's weights and puts what is served of them into memory; see `ServedSystem.place`.
Place = Callable[["Params", "ModelConfig"], int]


@dataclass(frozen=True)
class Offer:
    """The parts that a system brings to one session."""

    served: Served = Served()
    """What the session's worker is told."""
    writes: tuple[Path, ...] = ()
    """Directories of the system's own that the worker may change."""
    begin: Callable[[Job[Any, Any] | None], None] = lambda job: None
    """Comes before the worker gets its inputs, with the job (None: of a study); what it raises ends
    the session.
    """


class ServedSystem:
    """The whole model, for all programs that want nothing else. A system that brings something of
    its own overrides what differs; one object lasts as long as its provider, whose threads call it.
    """

    directory: Path | None = None
    """Where the system keeps what its clients make here, a folder for each certificate."""

    def place(self, params: Params, config: ModelConfig) -> int:
        """Put the folded weights that are served into memory; return their descriptor, which the
        caller closes. InputError when activations may leave their ranges.
        """
        return self.placing()(params, config)

    def placing(self) -> Place:
        """Return what `place` does, as another machine of this party can be told it."""
        return place

    def open(self, tokenizer: Tokenizer | None, *, studies: bool) -> None:
        """Get ready for sessions, after `place`. InputError when that cannot be."""

    def offer(self, folder: Path | None) -> Offer:
        """Return what the system brings to a session with the client whose folder in `directory`
        that is.
        """
        return Offer()

    def check_program(self, program: str) -> None:
        """Raise InputError, which the client hears, for a program that is not served."""

    def admit(self, job: Job[Any, Any]) -> None:
        """Raise InputError, which the client hears, for a job that is not served."""

    def close(self) -> None:
        """Give up what `open` has taken."""
