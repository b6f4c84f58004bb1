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

from spu_llm.core.channel import MemoryChannel
from spu_llm.core.correlation import Correlation, Material
from spu_llm.core.integers import Factor
from spu_llm.core.op import View
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import Arith, Bool, Value, low_bits


class _Nothing:
    def take(self, correlation: Correlation, units: int, fixed: Any = None) -> Material:
        raise AssertionError


class SimulatedParty(Party):
    """Runs a party's code; whatever would come from the peer is uniform instead.

    `drawn` and `incoming` are kept in order: `rewind` and run again, and the same words come, with
    whatever was changed in them.
    """

    def __init__(self, rank: int, prg: Prg, common: Prg) -> None:
        nowhere = MemoryChannel.pair()[0]
        super().__init__(rank, nowhere, prg, SpuConfig().frac_bits, _Nothing(), _Recorded(common))
        self.drawn: list[np.ndarray] = []
        self.incoming: list[np.ndarray] = []
        self.outgoing: list[np.ndarray] = []
        self._next_drawn = self._next_incoming = 0

    def rewind(self) -> None:
        assert isinstance(self.common, _Recorded)
        self._next_drawn = self._next_incoming = self.common.next = 0
        self.outgoing = []

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._draw(lambda: self.own.words(shape))

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Material:
        if self._next_drawn == len(self.drawn):
            masks = correlation.draw(self.rank, self.own, units)
            results = [self.own.words((units, *p.shape)) for p in correlation.results]
            self.drawn += [np.array(words) for words in (*masks, *results)]  # copies: to be changed
        first, self._next_drawn = self._next_drawn, self._next_drawn + len(
            correlation.masks + correlation.results
        )
        taken = self.drawn[first : self._next_drawn]
        return Material(taken[: len(correlation.masks)], taken[len(correlation.masks) :])

    def send(self, words: np.ndarray) -> None:
        self.outgoing.append(np.ascontiguousarray(words, np.uint64))

    def recv(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._receive(lambda: self.own.words(shape))

    def send_bytes(self, data: np.ndarray) -> None:
        self.outgoing.append(np.ascontiguousarray(data, np.uint8))

    def recv_bytes(self, shape: tuple[int, ...]) -> np.ndarray:
        count = math.prod(shape)

        def uniform() -> np.ndarray:
            words = self.own.words(((count + 7) // 8,))
            return words.view(np.uint8)[:count].reshape(shape)

        return self._receive(uniform)

    def _draw(self, fresh: Callable[[], np.ndarray]) -> np.ndarray:
        if self._next_drawn == len(self.drawn):
            self.drawn.append(np.array(fresh()))
        self._next_drawn += 1
        return self.drawn[self._next_drawn - 1]

    def _receive(self, fresh: Callable[[], np.ndarray]) -> np.ndarray:
        if self._next_incoming == len(self.incoming):
            self.incoming.append(np.array(fresh()))
        self._next_incoming += 1
        return self.incoming[self._next_incoming - 1]


class _Recorded(Prg):
    """The stream that both parties share, from its beginning at every run."""

    def __init__(self, inner: Prg) -> None:
        self._inner = inner
        self._words: list[np.ndarray] = []
        self.next = 0

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        if self.next == len(self._words):
            self._words.append(self._inner.words(shape))
        self.next += 1
        return self._words[self.next - 1]


MAX_CORRECTIONS = 4


def _same(a: Arith | Bool, b: Arith | Bool) -> bool:
    return np.array_equal(low_bits(a.words, b.bits), low_bits(b.words, b.bits))


Correct = Callable[[SimulatedParty, Any, Any], None]


def nothing_to_correct(*inputs: Value, **static: Any) -> Correct:
    """For a result share that follows from the party's own input."""

    def correct(party: SimulatedParty, made: Any, wanted: Any) -> None:
        raise AssertionError

    return correct


def uniform_messages(two_party: Callable[..., Any], correct: Callable[..., Correct]) -> Any:
    """A simulator for `protocol_op`.

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
