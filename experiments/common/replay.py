"""Replay of a plan's messages on a network, from dry runs of both parties: their time, number and
bytes.

Messages are played in the order in which the executor would send them: ops of one parallel group
that draw on different correlations in merged rounds (`spu_llm.core.merged_rounds`), all others one
by one. Nothing is computed: time passes only on the link.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spu_llm.compiler.demand import Call
from spu_llm.compiler.dry_run import DryRun
from spu_llm.compiler.plan import OpCall, Step
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.channel import SEAL_BYTES
from spu_llm.core.op import Cost
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.net.shaping import NetworkShape, Shaper
from spu_llm.runtime.dry_session import DrySession

ROUNDS = NetworkShape("rounds", None, 1.0)  # the seconds on such a link are its rounds
Dialogue = tuple[tuple[bool, int], ...]  # of one party: whether it sends, and bytes
Part = tuple[int, int]  # task (as in merged rounds), bytes


def dry_parties() -> list[DrySession]:
    """Return a separate dry session for each party."""
    frac_bits = SpuConfig().frac_bits
    return [DrySession(DryRun(rank, frac_bits)) for rank in (CLIENT, PROVIDER)]


def cost_of(function: SecureFunction, args: Sequence[Any]) -> Cost:
    """Return the cost of one call; `args` are values, or only shapes with a dtype."""
    parties = dry_parties()
    for party in parties:
        party.call(function, *args)
    (client,), (provider,) = (party.taken() for party in parties)
    replay = Replay(ROUNDS)
    replay.play(client.plan.steps, client.demand.calls, provider.demand.calls)
    return Cost(sum(replay.messages), round(replay.seconds), *replay.sent)


@dataclass
class Replay:
    """A link, and the traffic that has passed over it, by party."""

    shape: NetworkShape
    sent: list[int] = field(default_factory=lambda: [0, 0])
    messages: list[int] = field(default_factory=lambda: [0, 0])
    now: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        self._links = [Shaper(self.shape), Shaper(self.shape)]

    @property
    def seconds(self) -> float:
        """Return the seconds until both parties are done."""
        return max(self.now)

    def play(self, steps: Iterable[Step], client: Sequence[Call], provider: Sequence[Call]) -> None:
        """Play one call of a plan with these steps."""
        for group in _groups(steps, client, provider):
            together = len(group) > 1
            sides = [_Side([d[rank] for d in group], together) for rank in (CLIENT, PROVIDER)]
            self._exchange(sides)

    def _exchange(self, sides: Sequence[_Side]) -> None:
        """Play both parties' tasks until all have ended."""
        coming: list[deque[tuple[float, Sequence[Part]]]] = [deque(), deque()]
        while any(side.left for side in sides):
            before = [len(q) for q in coming], [side.left for side in sides]
            for rank, side in enumerate(sides):
                for message in side.advance():
                    size = sum(n for _, n in message)
                    self.sent[rank] += size
                    self.messages[rank] += 1
                    due = self._links[rank].due(size + SEAL_BYTES, self.now[rank])
                    coming[1 - rank].append((due, message))
                if coming[rank] and side.left:
                    due, parts = coming[rank].popleft()
                    self.now[rank] = max(self.now[rank], due)
                    side.take(parts)
            after = [len(q) for q in coming], [side.left for side in sides]
            assert before != after, "the parties wait for each other"


class _Side:
    """One party's side of a group of ops, which are its tasks; `merged`: they run side by side, in
    merged rounds.
    """

    def __init__(self, dialogues: Sequence[Dialogue], merged: bool) -> None:
        self._tasks = [deque(d) for d in dialogues]
        self._inbox = [0] * len(dialogues)
        self._merged = merged

    @property
    def left(self) -> int:
        """Return the number of messages still to send or receive."""
        return sum(map(len, self._tasks))

    def advance(self) -> list[list[Part]]:
        """Advance every task until it waits for a message; return the messages sent: one for all
        parts if merged, else one for each part.
        """
        parts: list[Part] = []
        for i, task in enumerate(self._tasks):
            while task and (task[0][0] or self._inbox[i]):
                sends, size = task.popleft()
                if sends:
                    parts.append((i, size))
                else:
                    self._inbox[i] -= 1
        return [parts] if parts and self._merged else [[part] for part in parts]

    def take(self, message: Sequence[Part]) -> None:
        for task, _ in message:
            self._inbox[task] += 1


def _groups(
    steps: Iterable[Step], client: Sequence[Call], provider: Sequence[Call]
) -> Iterator[list[tuple[Dialogue, Dialogue]]]:
    """Yield both parties' dialogues of the ops that run side by side, group after group, as the
    executor groups them.
    """
    ops = [step for step in steps if isinstance(step, OpCall)]
    indices = range(len(ops))
    for _, group in itertools.groupby(indices, lambda i: ops[i].group):
        left = list(group)
        while left:
            chosen: list[int] = []
            taken: set[str] = set()
            for i in left:
                if not client[i].names & taken:
                    chosen.append(i)
                    taken |= client[i].names
            left = [i for i in left if i not in chosen]
            yield [(client[i].messages, provider[i].messages) for i in chosen]
