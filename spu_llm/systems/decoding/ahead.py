"""What a conversation's next turn and its answer take, made while the client has nothing to say.

Both parties make a few batches at a time, so that a turn waits for these at most (a fraction of a
second), or at first until it is known what turns take. What is made follows from public sizes
alone; when, from when the client says nothing, and lets it be made: the provider sees that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from spu_llm.compiler.demand import Demand
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.chat_request import ChatRequest
from spu_llm.systems.decoding.decoder import Decoder

# Batches between two looks whether a turn has come: to find what is lacking takes about as long as
# to make one.
_AT_ONCE = 8
# on_stock(steps, lacking): an answer to the next turn has what so many steps take, None: not even
# the turn; so many batches are still to be made.
OnStock = Callable[[int | None, int], None]


@dataclass
class Ahead:
    """One party's half. `may_make()`: asked at the client, whether now is a time for it."""

    session: PartySession
    decoder: Decoder
    request: ChatRequest
    on_stock: OnStock = lambda steps, lacking: None
    may_make: Callable[[], bool] = lambda: True
    expected: bool = field(default=False, init=False)  # whether it is known what the turn takes
    lacking: int = field(default=0, init=False)  # batches, which both parties know
    _totals: list[Demand] = field(default_factory=list, init=False)  # a turn's, with each step's

    def begin(self) -> None:
        """Begin to wait for a turn: what it takes is found once it is not there yet."""
        self.expected, self.lacking = False, 0

    def expect(self) -> None:
        """Find what a turn takes that comes next, and its answer."""
        self.expected = True
        request, decoder = self.request, self.decoder
        course = decoder.rehearse(
            self.session.dry(), request.turn_rows, request.step_rows, request.ahead_steps
        )
        self._totals = list(accumulate(course))
        if self._totals:
            self.session.set_up(self._totals[-1])
            self._look()
        else:  # the block has no room for a turn
            self.on_stock(None, 0)

    def make_some(self) -> None:
        """Make some batches of what is lacking, of the turn's first, at the same time as the
        peer.
        """
        self.session.make_batches(self._totals[self._covered()], _AT_ONCE)
        self._look()

    def _look(self) -> None:
        covered = self._covered()
        self.lacking = self._lacking(self._totals[-1])
        self.on_stock(covered - 1 if covered else None, self.lacking)

    def _covered(self) -> int:
        """Return how many of turn and steps, from the first on, have all that they take."""
        return next(
            (i for i, total in enumerate(self._totals) if self._lacking(total)), len(self._totals)
        )

    def _lacking(self, demand: Demand) -> int:
        return self.session.preprocessing.lacking(demand)
