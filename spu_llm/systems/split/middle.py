"""The middle of a split model as the part that a session computes on shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from models.cache import Block, Prefix, Rows
from models.family import ModelConfig, Outside, Params, family_of, one_row, weight_shapes
from models.split import Split, check_middle
from protocols.functions.in_range import when_in_range
from spu_llm.core.reveal import reveal
from spu_llm.core.values import Owner
from spu_llm.systems.decoding.judges import RowsJudge
from spu_llm.systems.decoding.session_shape import SessionShape


@dataclass(frozen=True)
class Middle:
    """The blocks between the client's ends: rows of the residual stream go in, float32
    [lane, n, d], and come out.
    """

    split: Split
    opens_rows = True

    def held(self, config: ModelConfig) -> ModelConfig:
        return self.split.held(config)

    def shapes(self, config: ModelConfig) -> Any:
        return self.of_whole(weight_shapes(config))

    def of_whole(self, folded: Params) -> list[Params]:
        return self.split.parts(folded)[1]

    def check(self, weights: list[Params], config: ModelConfig) -> None:
        check_middle(weights, config, self.split)

    def rows_in(self, config: ModelConfig, lanes: int, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((lanes, count, config.width), np.float32)

    def prompt_ends(self, prompts: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return None where the client has last blocks, which all rows go through."""
        return None if self.split.back else tuple(length - 1 for length in prompts)

    def forward(
        self,
        layout: SessionShape,
        weights: Any,
        given: Array,
        at: Rows,
        cache: Block,
        before: Prefix | None,
        ends: tuple[int, ...] | None,
    ) -> tuple[Array, Block, Outside]:
        config = layout.config
        rows, shared, outside = family_of(config).through(
            weights,
            self.held(config),
            given.reshape(-1, config.width),
            at,
            cache,
            first=self.split.front,
        )
        if ends is not None:
            rows = one_row(rows.reshape(layout.lanes, -1, config.width), ends)[:, 0]
        return rows, shared, outside


@dataclass(frozen=True)
class OpenRows(RowsJudge):
    """Opens the rows behind the middle to the client, float32 [lane, n, d]: of all rows of a
    forward, or where the back has no blocks of the prompts' last ones alone. The client decides on
    its drafts by itself; nothing becomes public.
    """

    hide_progress: bool = False
    name: str = "split"
    opens_rows = True

    def take(self, rows: Array, outside: Outside) -> tuple[Array, None]:
        # No norm follows that would see the last block's own rows: they are sums of rows that one
        # saw and of what weights bound (`models.ranges.Bounds.added`).
        label = "rows behind the provider's blocks"
        return reveal(when_in_range(outside, rows), to=Owner.CLIENT, label=label), None
