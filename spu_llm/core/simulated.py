"""Simulators for protocols in which every message is uniform.

A party's view is then: fresh masks and prepared shares, uniform messages, and one prepared share
that the declared output fixes. So the simulator runs the party's own code against uniform messages
and afterwards corrects that share. It sees the party's input and output alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spu_llm.core import field
from spu_llm.core.channel import MemoryChannel
from spu_llm.core.correlation import Correlation, Correlations, uniform
from spu_llm.core.integers import Factor
from spu_llm.core.op import View
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import Arith, Bool, Value, from_bytes, low_bits, to_bytes


class _Nothing:
    def take(self, correlation: Correlation, units: int, fixed: Any = None) -> Correlations:
        raise AssertionError


class _Kept(list[np.ndarray]):
    """Words in their order: made when they are first asked for, and the same after a rewind, with
    whatever was changed in them.
    """

    next = 0

    def take(self, count: int, fresh: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Return the next `count` arrays; fresh() makes them when there are no more."""
        if self.next == len(self):
            self.extend(np.array(words) for words in fresh())  # copies: to be changed
        self.next += count
        return self[self.next - count : self.next]

    def take_one(self, fresh: Callable[[], np.ndarray]) -> np.ndarray:
        return self.take(1, lambda: [fresh()])[0]


class SimulatedParty(Party):
    """Runs a party's code; whatever would come from the peer is uniform instead.

    `drawn` and `incoming` are kept: `rewind` and run again, and the same words come.
    """

    def __init__(self, rank: int, prg: Prg, common: Prg) -> None:
        nowhere = MemoryChannel.pair()[0]
        self.drawn, self.incoming, self._shared = _Kept(), _Kept(), _Kept()
        self.outgoing: list[np.ndarray] = []
        stream = _Recorded(common, self._shared)
        super().__init__(rank, nowhere, prg, SpuConfig().frac_bits, _Nothing(), stream)

    def rewind(self) -> None:
        self.drawn.next = self.incoming.next = self._shared.next = 0
        self.outgoing = []

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.drawn.take_one(lambda: self.own.words(shape))

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        def fresh() -> list[np.ndarray]:
            masks = correlation.draw(self.rank, self.own, units)
            return masks + [uniform(part, self.own, units) for part in correlation.results]

        masks = len(correlation.masks)
        taken = self.drawn.take(masks + len(correlation.results), fresh)
        return Correlations(taken[:masks], taken[masks:])

    def send(self, words: np.ndarray) -> None:
        self.outgoing.append(np.ascontiguousarray(words, np.uint64))

    def recv(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.incoming.take_one(lambda: self.own.words(shape))

    def send_bytes(self, data: np.ndarray) -> None:
        self.outgoing.append(np.ascontiguousarray(data, np.uint8))

    def recv_bytes(self, shape: tuple[int, ...]) -> np.ndarray:
        count = math.prod(shape)

        def uniform() -> np.ndarray:
            words = self.own.words(((count + 7) // 8,))
            return words.view(np.uint8)[:count].reshape(shape)

        return self.incoming.take_one(uniform)

    def recv_bytes_and_field(
        self, count: int, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        def uniform() -> np.ndarray:
            bytes_before = self.own.words(((count + 7) // 8,)).view(np.uint8)[:count]
            elements = to_bytes(field.uniform(self.own, shape), field.BITS)
            return np.concatenate([bytes_before, elements])

        data = self.incoming.take_one(uniform)
        return data[:count], from_bytes(data[count:], field.BITS).reshape(shape)


class _Recorded(Prg):
    """A stream whose words are kept."""

    def __init__(self, inner: Prg, kept: _Kept) -> None:
        self._inner, self._kept = inner, kept

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._kept.take_one(lambda: self._inner.words(shape))


MAX_CORRECTIONS = 4


def _same(a: Arith | Bool, b: Arith | Bool) -> bool:
    return np.array_equal(low_bits(a.words, b.bits), low_bits(b.words, b.bits))


Correct = Callable[[SimulatedParty, Any, Any], None]


def nothing_to_correct(*inputs: Value, **static: Any) -> Correct:
    """Return a correction never used: the result share follows from the party's own input."""

    def correct(party: SimulatedParty, made: Any, wanted: Any) -> None:
        raise AssertionError

    return correct


def uniform_messages(two_party: Callable[..., Any], correct: Callable[..., Correct]) -> Any:
    """Make a simulator for `protocol_op`.

    correct(*inputs, **static) -> function(party, made, wanted): change, in place, words that the
    party drew or received and that fix the output, to bring `made` to `wanted` (shares of one
    form). It is called, and the party run again, until they agree.
    """

    def simulate(
        rank: int,
        prg: Prg,
        common: Prg,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        **static: Any,
    ) -> View:
        party = SimulatedParty(rank, prg, common)
        (wanted,) = outputs
        made = two_party(party, *inputs, **static)
        assert isinstance(wanted, Arith | Bool)
        for _ in range(MAX_CORRECTIONS):
            if not _same(made, wanted):
                correct(*inputs, **static)(party, made, wanted)
                party.rewind()
                made = two_party(party, *inputs, **static)
        assert _same(made, wanted), "the simulator does not reach the declared output"
        return View(party.drawn, party.incoming, party.outgoing)

    return simulate
