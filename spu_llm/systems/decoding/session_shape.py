"""Public sizes of a decoding session, and the part of the model that it computes on shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import FEW, Block, Prefix, Rows, padding
from models.family import ModelConfig, Outside, Params, check_ranges, family_of, weight_shapes
from spu_llm.core.settings import OWN


class Text(NamedTuple):
    """The text before every lane's prompt: private values of the provider."""

    tokens: Any  # int32 [n], of all rows, text last
    hidden: Any  # int32 [m], of the first rows: HIDDEN where there is no text


class Place(NamedTuple):
    """The places of a step's rows: public, or the client's secret."""

    positions: Any  # int32 [lane, n]: in the text
    visible: Any  # bool [lane, n, row of the cache]


class ModelPart(Protocol):
    """The part of a model that a session computes on shares. Parts that are equal compute the same,
    and have equal hashes.
    """

    opens_rows: bool
    """Whether a judge opens the part's rows to the client, who computes the rest of the model."""

    def held(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of what the provider holds, and of the cache."""

    def shapes(self, config: ModelConfig) -> Any:
        """Return shapes and dtypes of the part's folded weights."""

    def of_whole(self, folded: Params) -> Any:
        """Return the part's weights out of the whole model's."""

    def check(self, weights: Any, config: ModelConfig) -> None:
        """Raise InputError when activations, with these weights of the part, may leave the ranges
        of `config` unnoticed.
        """

    def rows_in(self, config: ModelConfig, lanes: int, count: int) -> jax.ShapeDtypeStruct:
        """Return the shape of what the client puts in for `count` rows of every lane."""

    def prompt_ends(self, prompts: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the one row of each lane that a prefill of these lengths gives; None: all rows."""

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
        """Return a forward's rows [L n, d], or [L, d] where `ends` names one row of each lane, the
        cache, and what left its range (`models.family.Family`).
        """


class ClientPart(Protocol):
    """The computation of the client in the clear, before and after a part whose rows are opened to
    it.
    """

    def up(self, tokens: Any, at: int) -> np.ndarray:
        """Return the rows float32 [n, d] that go into the part, of tokens from `at` on."""

    def down(self, rows: np.ndarray, at: int, last: int) -> np.ndarray:
        """Return logits [last, vocab] of the last of the rows [n, d] that came out of it, which
        stand at the positions from `at` on.
        """

    def rehearse(self, count: int, at: int) -> None:
        """Do as much work as a step of `count` rows at `at` takes, and change nothing."""


@dataclass(frozen=True)
class WholeModel:
    """All of the model: the client puts in tokens, int32 [lane, n], and a judge has its logits."""

    opens_rows = False

    def held(self, config: ModelConfig) -> ModelConfig:
        return config

    def shapes(self, config: ModelConfig) -> Any:
        return weight_shapes(config)

    def of_whole(self, folded: Params) -> Any:
        return folded

    def check(self, weights: Any, config: ModelConfig) -> None:
        check_ranges(weights, config)

    def rows_in(self, config: ModelConfig, lanes: int, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((lanes, count), np.int32)

    def prompt_ends(self, prompts: tuple[int, ...]) -> tuple[int, ...] | None:
        return tuple(length - 1 for length in prompts)

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
        family, config = family_of(layout.config), layout.config
        # A table of positions that is the provider's secret has a hint of its own: it may follow
        # from that secret alone, not from what the client chooses.
        own: Any = layout.prefix - layout.public
        if before is not None and layout.padded:
            own = own - padding(before.hidden)
        with jax.named_scope("embedding"):
            one_hot = jax.nn.one_hot(given.reshape(-1), config.vocab_size, dtype=jnp.float32)
            positions = moved(at.positions, layout.public).reshape(-1)
            x = family.embed(weights, config, one_hot, positions, start=own, hidden=at.hidden)
        at = at._replace(positions=moved(at.positions, layout.prefix))
        return family.forward(weights, config, x, at, cache, before, layout.scale, ends=ends)


def moved(positions: Array, by: int) -> Array:
    """Return positions `by` further on; the same array where that is none."""
    return positions + by if by else positions


@dataclass(frozen=True)
class SessionShape:
    """Public sizes of a decoding session."""

    config: ModelConfig
    prompts: tuple[int, ...]
    """Tokens of every lane. An encoder reads all but the last one, from which the text goes on."""
    sizes: tuple[int, ...]
    """Own rows that the shared block has, one after the other; it starts with the first of them."""
    live_rows: int = 0
    """Own rows that hold the text at most."""
    hidden: bool = False
    """Whether only the client knows which rows hold the text."""
    packs: bool = False
    """Whether the block may be full before the text ends, and is packed then; where `hidden`."""
    branches: int = 1
    """Continuations of a step's rows after the first one, as `text_rows.tree` has them; each is
    judged by itself.
    """
    scale: float = 1.0
    """What logits are multiplied by."""
    prefix: int = 0
    """Rows before every lane's prompt that the provider knows in the clear."""
    padded: int = 0
    """How many rows of the prefix, the first after the public ones, may hold no text."""
    public: int = 0
    """How many rows of the prefix, the first ones, hold tokens that the client knows, too."""
    backend: str = OWN
    """What computes the forward (`spu_llm.core.settings`)."""
    part: ModelPart = field(default_factory=WholeModel)
    """What is computed on shares. Nothing comes before a prompt where it opens rows."""

    @property
    def lanes(self) -> int:
        return len(self.prompts)

    @property
    def public_weights(self) -> Mapping[str, str]:
        """Return the weights that are opened to both parties, with what they are: what depends on
        rows that only the client knows, it has to compute with.
        """
        return family_of(self.config).public if self.hidden else {}

    @property
    def begun(self) -> tuple[int, ...]:
        """Return how many rows of the cache the prefill writes, of every lane."""
        return (1,) * self.lanes if self.config.encodes else self.prompts

    @property
    def judged(self) -> int:
        """Return how many sequences the judge decides on: every branch of every lane."""
        return self.lanes * self.branches

    def drafts(self, count: int) -> int:
        """Return how many drafts a branch has, in `count` rows of a lane."""
        return (count - 1) // self.branches

    def rows_in(self, count: int) -> jax.ShapeDtypeStruct:
        """Return the shape of what the client puts in for `count` rows of every lane."""
        return self.part.rows_in(self.config, self.lanes, count)

    @property
    def inside(self) -> int:
        """Return how many rows of the prefix stand in the shared block, before its own: all, or
        none.
        """
        return self.prefix if self.prefix <= FEW else 0

    @property
    def told_rows(self) -> int:
        """Return for how many first rows of the prefix the provider says whether they hold text."""
        return self.public + self.padded if self.padded else 0
