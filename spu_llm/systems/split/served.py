"""A provider of a split model: the middle alone is in memory, and what was tuned of it lies in a
folder for each client.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from models.family import ModelConfig, Params
from models.resident import place
from models.split import Split, ends_digest
from spu_llm.offline.durable import open_folder
from spu_llm.systems.program import Served
from spu_llm.systems.served import Offer, Place, ServedSystem
from spu_llm.systems.split.modes import MPC
from spu_llm.systems.split.records import SplitServed


class SplitModel(ServedSystem):
    """The middle of a model that is split here, in one mode of `spu-llm split`. `tunings`: where
    what was tuned of it is kept, in all clients' folders.
    """

    def __init__(self, mode: str, split: Split, tunings: Path | None = None) -> None:
        self.mode, self.split, self.directory = mode, split, tunings
        self._ends = ""

    def place(self, params: Params, config: ModelConfig) -> int:
        self._ends = ends_digest(params, self.split)
        return super().place(params, config)

    def placing(self) -> Place:
        return partial(place, split=self.split, on_shares=self.mode == MPC)

    def offer(self, folder: Path | None) -> Offer:
        front, back = self.split
        kept = None
        if self.directory is not None and folder is not None:
            for directory in (self.directory, folder):
                open_folder(directory)
            kept = folder.absolute()
        served = SplitServed(
            self.mode, front, back, self._ends, None if kept is None else str(kept)
        )
        words = (
            f"the middle of a split model alone: spu-llm split, with --mode {self.mode} --split "
            f"{front},{back}"
        )
        return Offer(Served.of(served, words), writes=() if kept is None else (kept,))
