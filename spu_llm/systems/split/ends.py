"""The client's ends of a model, with a codebook in place of its token table; LoRA in the middle."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.family import ModelConfig, Params, family_of
from models.split import Split
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg


def check_same_shape(own: ModelConfig, stated: ModelConfig) -> None:
    """Raise InputError unless the client's model is of the shape that the provider states: equal
    ends may still have heads or positions of other numbers, or another middle between.
    """
    if (own.family, own.shape()) != (stated.family, stated.shape()):
        raise InputError("the parties have models of different shapes; both need the same one")


def table_path(config: ModelConfig) -> tuple[str, ...]:
    """Return where the token embedding [vocab, width] is in `Params`; the last name is that of the
    folded table, too.
    """
    return next(iter(family_of(config).names.values()))


def table_of(params: Params, config: ModelConfig) -> np.ndarray:
    """Return the token embedding float32 [vocab, width] of a model that is not folded."""
    leaf: Any = params
    for name in table_path(config):
        leaf = leaf[name]
    return np.asarray(leaf, np.float32)


def client_ends(
    params: Params, config: ModelConfig, split: Split, codebook: np.ndarray | None = None
) -> tuple[Params, Params]:
    """Return the folded weights of front and back, float32. `codebook`: in place of the token
    embedding, in the front alone: a head that is tied to it stays what it was.
    """
    family = family_of(config)
    front, _, back = split.parts(family.fold(params, config))
    if codebook is not None:
        changed = copy.copy(params)
        *path, name = table_path(config)
        inner: Any = changed
        for step in path:
            inner[step] = copy.copy(inner[step])
            inner = inner[step]
        inner[name] = np.asarray(codebook, np.float32)
        front = split.parts(family.fold(changed, config))[0]
    numbers: tuple[Params, Params] = jax.tree.map(
        lambda w: jnp.asarray(w, jnp.float32), (front, back)
    )
    return numbers


def without_table(front: Params, config: ModelConfig) -> tuple[Params, Any]:
    """Return the front's weights that are tuned, and the folded token table, which is not."""
    name = table_path(config)[-1]
    return {key: w for key, w in front.items() if key != name}, front[name]


def with_table(tuned: Params, table: Any, config: ModelConfig) -> Params:
    """Return the front's weights: those that are tuned, and the token table."""
    return {**tuned, table_path(config)[-1]: table}


# ---- LoRA


def draw_lora(blocks: list[Params], rank: int, prg: Prg) -> list[dict[str, Params]]:
    """Draw for every matrix [k, m] of the blocks "a" [k, rank], normal with variance 1 / k, and "b"
    [rank, m], zeros, so that nothing changes before the first round (Hu et al., LoRA, section 4.1).
    """

    def pair(weight: Any) -> Params:
        k, m = weight.shape
        a = _normal((k, rank), prg) / np.sqrt(k)
        return {"a": a.astype(np.float32), "b": np.zeros((rank, m), np.float32)}

    return [{name: pair(matrix["weight"]) for name, matrix in block.items()} for block in blocks]


def adapted(blocks: list[Params], lora: list[dict[str, Params]]) -> list[Params]:
    """Return the blocks with their matrices plus a b; as they are without LoRA."""
    if not lora:
        return blocks
    return [
        {
            name: {**matrix, "weight": matrix["weight"] + jnp.dot(one[name]["a"], one[name]["b"])}
            for name, matrix in block.items()
        }
        for block, one in zip(blocks, lora, strict=True)
    ]


def _normal(shape: tuple[int, ...], prg: Prg) -> np.ndarray:
    """Draw standard normal numbers, float64 (Box and Muller)."""
    radius = np.sqrt(-2 * np.log1p(-prg.uniform(shape)))
    return np.asarray(radius * np.cos(2 * np.pi * prg.uniform(shape)))
