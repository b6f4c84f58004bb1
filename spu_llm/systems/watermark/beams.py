"""Candidates by beam search: the m most probable continuations in place of m samples.

The paper names them as an extension (§3) that gives up what the watermark promises: candidates are
no draws of the model, so the text does not have the model's distribution. A key chooses each of m
distinct beams with probability 1 / m, however probable it is; tokens that no beam holds never come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from models.family import ModelConfig
from models.scoring import picked_lanes
from spu_llm.systems.watermark.model_sampler import ModelSampler
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import Content

# Takes the numbers of the beams that go on, as `beam_search` gave them before, and the token that
# each goes on by; returns log-probabilities float64 [beam, vocab] of the token after.
Grow = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Beam:
    log_p: float
    tokens: tuple[int, ...]
    ended: bool
    parent: int  # its number among the beams that went on

    def drawn(self) -> Drawn:
        return Drawn(self.tokens[:-1], True) if self.ended else Drawn(self.tokens, False)


def beam_search(
    first: np.ndarray, grow: Grow, width: int, count: int, ends: frozenset[int]
) -> list[Drawn]:
    """Return the `width` beams of up to `count` tokens, the most probable first. Where there are
    fewer of positive probability, they come again.

    first: log-probabilities float64 [vocab] of the first token. ends: tokens that end a text; a
    beam that has ended keeps its place while it is among the best.
    """
    ended: list[_Beam] = []
    live, log_p = [_Beam(0.0, (), False, 0)], first[None]
    for place in range(count):
        beams = _best([*ended, *_extended(live, log_p, width, ends)], width)
        ended = [beam for beam in beams if beam.ended]
        live = [beam for beam in beams if not beam.ended]
        if not live or place + 1 == count:
            break
        last = np.array([beam.tokens[-1] for beam in live])
        log_p = grow(np.array([beam.parent for beam in live]), last)
    best = _best([*ended, *live], width)
    return [best[i % len(best)].drawn() for i in range(width)]


def _extended(
    live: Sequence[_Beam], log_p: np.ndarray, width: int, ends: frozenset[int]
) -> list[_Beam]:
    """Return the best extensions by one token, `width` at most."""
    scores = (np.array([beam.log_p for beam in live])[:, None] + log_p).ravel()
    most = min(width, len(scores))
    best = np.argpartition(-scores, most - 1)[:most]
    beams = []
    for at in best[np.isfinite(scores[best])].tolist():
        parent, token = divmod(at, log_p.shape[1])
        tokens = (*live[parent].tokens, token)
        beams.append(_Beam(float(scores[at]), tokens, token in ends, parent))
    return beams


def _best(beams: Sequence[_Beam], width: int) -> list[_Beam]:
    return sorted(beams, key=lambda beam: (-beam.log_p, beam.tokens))[:width]


class BeamSampler(ModelSampler):
    """The beams of a model, by the probabilities of its `sampling`, in the place of draws."""

    def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        assert not isinstance(prefix, str)
        self._check_room(list(prefix), max_tokens)
        first, at = self.distribution(prefix), len(prefix)
        cache = self._widened(self._trunk, n) if max_tokens > 1 else None

        def grow(parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
            nonlocal cache, at
            # Lanes that only fill up keep the number of them, and one compiled program.
            more = (0, n - len(parents))
            cache = _picked(self._config)(cache, np.pad(parents, more))
            row = np.pad(tokens, more).astype(np.int32)[:, None]
            logits, cache = self._run(self._weights, cache, row, np.int32(at), np.int32(0))
            at += 1
            rows = np.asarray(logits)[: len(parents)]
            return _logs(np.stack([self._sampling.distribution(one) for one in rows]))

        return beam_search(_logs(first), grow, n, max_tokens, self.ends)


def _logs(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(p))


@functools.cache
def _picked(config: ModelConfig) -> Any:
    return jax.jit(functools.partial(picked_lanes, config.kv_heads))
