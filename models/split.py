"""A model split at two block boundaries: the client's layers (front and back, its *ends*) and the
provider's layers, the middle (NOIR §2.1).

*Front*: embedding and the first blocks. *Middle*: the blocks between. *Back*: the last blocks, norm
and head. The residual stream crosses the boundaries, as rows [n, d] on the scale of folded weights
(`models.family`): run one after the other, the three parts compute the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models import ranges
from models.cache import Block, Rows, rows_after
from models.digests import params_digest
from models.family import ModelConfig, Params, bounds_of_blocks, family_of
from spu_llm.core.errors import InputError


class Split(NamedTuple):
    """Numbers of blocks of the front and of the back."""

    front: int
    back: int

    @staticmethod
    def parse(text: str) -> Split:
        """Return the split that "F,B" names; InputError when it is none."""
        parts = text.split(",")
        if len(parts) != 2 or not all(p.isascii() and p.isdigit() and len(p) < 5 for p in parts):
            raise InputError(f"--split must be F,B, two numbers of blocks, found {text!r}")
        return Split(*map(int, parts))

    def check(self, config: ModelConfig) -> None:
        """Raise InputError unless at least one block is left for the middle."""
        if min(self) < 0 or self.front + self.back >= config.layers:
            raise InputError(
                f"--split {self.front},{self.back} leaves no middle of a model of {config.layers} "
                f"blocks; the two must be 0 or more, and below {config.layers} together"
            )

    def middle(self, config: ModelConfig) -> int:
        """Return the number of blocks of the middle."""
        return config.layers - self.front - self.back

    def held(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of the middle as a model."""
        held: ModelConfig = config.with_blocks(range(self.front, config.layers - self.back))
        return held

    def parts(self, weights: Params) -> tuple[Params, list[Params], Params]:
        """Split folded weights into front, middle (a list of blocks) and back. Front and back have
        the layout of a model with fewer blocks, the front without "head", the back without the
        weights that embed tokens.
        """
        blocks = weights["blocks"]
        end = len(blocks) - self.back
        rest = {name: w for name, w in weights.items() if name not in ("blocks", "head")}
        return (
            {**rest, "blocks": blocks[: self.front]},
            blocks[self.front : end],
            {"blocks": blocks[end:], "head": weights["head"]},
        )


def check_middle(blocks: Sequence[Params], config: ModelConfig, split: Split) -> None:
    """Raise InputError when activations of the middle, given its folded `blocks`, may leave the
    ranges of `config` undetected. Front and back, computed in the clear, need no ranges.
    """
    held = split.held(config)
    ranges.check_blocks(bounds_of_blocks(blocks, held), held)


def ends_digest(params: Params, split: Split) -> str:
    """Return the digest of the parameters of front and back, which are not folded."""
    blocks = params["blocks"]
    ends = {**params, "blocks": [blocks[: split.front], blocks[len(blocks) - split.back :]]}
    return params_digest(ends)


def front(
    weights: Params, config: ModelConfig, tokens: Array, rows: Rows, cache: Block
) -> tuple[Array, Block]:
    """Run the front on tokens [L n] at the positions in `rows`; return the rows [L n, d] that go to
    the middle, and the front's cache.
    """
    family = family_of(config)
    x = family.embed(weights, config, tokens, rows.positions.reshape(-1))
    x, cache, _ = family.through(weights["blocks"], config, x, rows, cache)
    return x, cache


def middle(
    blocks: list[Params], config: ModelConfig, x: Array, rows: Rows, cache: Block
) -> tuple[Array, Block]:
    """Run the middle on rows x [L n, d]; return its rows [L n, d], and its cache."""
    x, cache, _ = family_of(config).through(blocks, config, x, rows, cache)
    return x, cache


def back(
    weights: Params, config: ModelConfig, x: Array, rows: Rows, cache: Block
) -> tuple[Array, Block]:
    """Run the back on rows x [L n, d] from the middle; return logits [L n, vocab] and its cache."""
    family = family_of(config)
    normed, cache, _ = family.forward(weights, config, x, rows, cache)
    return family.head(weights, normed), cache


# ---- whole texts without a cache, for tuning and for attacks


def _whole(part: Any, weights: Any, config: ModelConfig, x: Array, layers: int) -> Array:
    def one(x: Array) -> Array:
        n = x.shape[0]
        cache = config.with_layers(layers).empty_cache(n) if layers else Block((), ())
        out: Array = part(weights, config, x, rows_after(0, n, n), cache)[0]
        return out

    return jax.vmap(one)(x)


def front_texts(weights: Params, config: ModelConfig, tokens: Array) -> Array:
    """Run the front on whole texts [b, n]; return the rows [b, n, d] that go to the middle."""
    return _whole(front, weights, config, jnp.asarray(tokens), len(weights["blocks"]))


def middle_texts(blocks: list[Params], config: ModelConfig, x: Array) -> Array:
    """Run the middle on rows x [b, n, d] of whole texts; return its rows [b, n, d]."""
    return _whole(middle, blocks, config, x, len(blocks))


def back_texts(weights: Params, config: ModelConfig, x: Array) -> Array:
    """Run the back on rows x [b, n, d] of whole texts; return logits [b, n, vocab]."""
    return _whole(back, weights, config, x, len(weights["blocks"]))
