"""What `experiment gateway-load` does, and the criteria that its results are held against."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.fidelity.logits import MAX_ERROR

# Two logits, each off by no more than the secure forward's bound, may change their order.
NEAR = 2 * MAX_ERROR
LEAST_FAIRNESS = 0.98  # Jain's index of the answers by conversation
MOST_GROWTH_MIB = 16.0  # of both supervisors' memory, in an hour
LEAST_GROWTH_MINUTES = 20.0  # after the warm-up, below which no slope is held against that
WARM_UP = 1 / 6  # of a run
SAMPLE_S = 5.0
DRAIN_S = 3600.0  # for the requests that wait when the time is over
# A frozen peer is known after 9 s without a heartbeat, and a command ends within 15 s after that.
MOST_FAULT_S = 24.0


@dataclass(frozen=True)
class LoadPlan:
    """Conversations are programs, each with several chats going on at once: one request of each
    chat waits or is answered at any time. A chat has `turns`, then another one begins.
    """

    minutes: float
    conversations: int
    chats: int
    at_once: int
    keep: int
    turns: int
    answer_tokens: int


@dataclass(frozen=True)
class FaultsPlan:
    """A streamed and an unstreamed answer are being written when a fault comes, and one more is
    asked for after it.
    """

    answer_tokens: int = 48
    next_tokens: int = 4
    at_once: int = 2
    keep: int = 1
    disk_mib: int = 1024  # of each party's temporary files and hints
    jump_hours: int = 6
