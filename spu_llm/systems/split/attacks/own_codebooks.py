"""A1 by a host that knows how the client's codebook was drawn: the mechanism and its epsilon.

The inverter is A1's (`inverters`). It is trained on rows of public text under codebooks that the
host draws itself from the public table, a fresh one for each few texts, so that what it learns
holds under codebooks that it has never seen, the client's among them. The fronts that the host runs
are the public one behind each codebook: what tuning changed in the client's front stays unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from models.family import Params
from models.split import Split
from spu_llm.core.prg import Prg
from spu_llm.systems.split import vocabulary
from spu_llm.systems.split.attacks.inverters import Inverter, held_out, trained
from spu_llm.systems.split.attacks.trained import LEARNED, STEPS
from spu_llm.systems.split.attacks.views import BATCH, Public, Texts, of_front
from spu_llm.systems.split.ends import client_ends, table_of, with_table, without_table


class Drawing(NamedTuple):
    """The settings of drawing a codebook; epsilon: of all its features together."""

    mechanism: str
    epsilon: float


@dataclass(frozen=True, eq=False)
class CodebookInverter:
    """An inverter for codebooks of one drawing, trained when it is first asked for. params: of the
    public model, not folded.
    """

    public: Public
    params: Params
    drawing: Drawing
    steps: int = STEPS
    seed: int = 0

    @cached_property
    def inverter(self) -> Inverter:
        """Train the inverter: every step is under a codebook of its own."""
        texts, prg = self._texts, Prg.from_seed(self.seed, "own codebooks").child("training")

        def features(those: Sequence[int]) -> list[np.ndarray]:
            return self.rows([texts[i] for i in those], prg)

        return trained(features, texts, self.public.table, self.steps, self.seed)

    @cached_property
    def on_public(self) -> tuple[Texts, Texts]:
        """Guess the tokens of public texts that the inverter was not trained on, under codebooks
        that it was not trained on; return guesses and texts.
        """
        texts = self._texts[-held_out(len(self._texts)) :]
        prg = Prg.from_seed(self.seed, "own codebooks").child("held out")
        return self.inverter.tokens(self.rows(texts, prg)), texts

    def rows(self, texts: Texts, prg: Prg) -> list[np.ndarray]:
        """Compute the rows of texts, every `BATCH` of them under a codebook drawn from `prg`."""
        config, front, rows = self.public.config, self.public.parts[0], []
        table, alone = table_of(self.params, config), {**self.params, "blocks": []}
        for at in range(0, len(texts), BATCH):
            codebook = vocabulary.draw_codebook(table, *self.drawing, prg)
            # Of what is folded only the table differs.
            _, folded = without_table(client_ends(alone, config, Split(0, 0), codebook)[0], config)
            own = with_table(front, folded, config)
            rows += of_front(own, config, texts[at : at + BATCH])
        return rows

    @property
    def _texts(self) -> list[list[int]]:
        return self.public.texts[:LEARNED]
