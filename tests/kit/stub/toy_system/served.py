"""What a provider of the system brings."""

from __future__ import annotations

from pathlib import Path

from spu_llm.systems.program import Served
from spu_llm.systems.served import Offer, ServedSystem
from toy_system.program import Secret  # type: ignore[import-not-found]


class Number(ServedSystem):
    """The whole model, and a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def offer(self, folder: Path | None) -> Offer:
        return Offer(Served.of(Secret(self._number)))
