"""What a conversation's next turn and its answer take, made while the client has nothing to say.

Both parties make a batch at a time, so that a turn waits for one at most. What is made follows from
public sizes alone; when, from when the client says nothing, which the provider sees anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spu_llm.compiler.demand import Demand
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.chat_request import ChatRequest
from spu_llm.systems.decoding.decoder import Decoder

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
    lacking: int = field(default=0, init=False)  # batches, which both parties know
    _course: list[Demand] = field(default_factory=list, init=False)

    def expect(self) -> None:
        """Find what a turn takes that comes next, and its answer."""
        request, decoder = self.request, self.decoder
        self._course = decoder.rehearse(
            self.session.dry(), request.turn_rows, request.step_rows, request.ahead_steps
        )
        self.session.set_up(self._whole)
        self.lacking = self.session.preprocessing.lacking(self._whole)
        self._tell()

    def make_batch(self) -> None:
        """Make a batch of what is lacking, at the same time as the peer."""
        self.lacking = self.session.make_batch(self._whole)
        self._tell()

    @property
    def _whole(self) -> Demand:
        return sum(self._course, Demand())

    def _tell(self) -> None:
        self.on_stock(self._steps_covered(), self.lacking)

    def _steps_covered(self) -> int | None:
        """Return how many steps have all that they take, after a turn; None where it has not."""
        covered, total = -1, Demand()
        for demand in self._course:
            total += demand
            if self.session.preprocessing.lacking(total):
                break
            covered += 1
        return covered if covered >= 0 else None
