"""What an attack is run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AttackConfig:
    """The target and the settings of an attack. `on_stage` hears of progress. Of split models:
    which attacks (none: all), blocks of front and back, and the codebook's distribution, where it
    is not the default, or what a tuning left. Of fakes: the public model that makes them, where it
    is not the shipped one.
    """

    model: Path
    prompts: int
    seed: int
    on_stage: Callable[[str], None]
    attacks: tuple[str, ...] = ()
    split: tuple[int, int] = (1, 1)
    mechanism: str | None = None
    epsilon: float | None = None
    secrets: Path | None = None
    public: Path | None = None
