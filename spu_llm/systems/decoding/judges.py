"""What decides on a forward's rows: a verification of drafts, or what takes the rows themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from jax import Array

from models.family import Outside
from protocols.verification.variants import Verifier


class RowsJudge(ABC):
    """Stands for a verifier where a forward's last rows, before the head, are wanted. Instances are
    frozen dataclasses: equal ones have one program. Neither party puts anything in.
    """

    name: str
    hide_progress: bool
    opens_rows: bool = False
    """Whether the client learns the rows: of a part alone, behind which it goes on by itself."""

    def client_shapes(self, drafts: int, vocab: int) -> None:
        return None

    def provider_shapes(self, drafts: int, vocab: int) -> None:
        return None

    @abstractmethod
    def take(self, rows: Array, outside: Outside) -> tuple[Any, Any]:
        """Return the outcome and what becomes public, of rows [lane, n, d] and of what left its
        range (`models.family.Family`).
        """


Judge = Verifier | RowsJudge
