"""Errors a user can meet, each with the exit code of the command line.

Raise these for what a user or the peer did; use `assert` for what only we can get wrong.
Messages are one line, name what was found and say what to do.
"""

from __future__ import annotations


class SpuLlmError(Exception):
    """Base of every error that ends a command; `exit_code` is what the process returns."""

    exit_code = 1


class InputError(SpuLlmError):
    """The user's input, files or options cannot be used."""

    exit_code = 2


class ManifestMismatch(SpuLlmError):
    """The two parties' settings differ; nothing secret has been sent."""

    exit_code = 2


class PeerError(SpuLlmError):
    """The other party is unreachable, died, stalled, or broke the wire protocol."""


class WireError(PeerError):
    """Bytes from the peer do not follow the wire format."""


class NoAnswerError(PeerError):
    """Whoever accepts the connection says nothing of use."""


class BusyError(PeerError):
    """The provider has no place for another session, or for this client; try again later."""


class WorkerError(SpuLlmError):
    """This party's own worker process died or could not start."""


class StalledError(SpuLlmError):
    """The session stood still for longer than its deadline; which party is stuck is not known."""


class WantedError(SpuLlmError):
    """This party ends a run of its own accord, and the other one hears why: a run that goes first
    wants what this one uses, a service ends, or nobody waits for the answer any more.
    """


class LimitError(SpuLlmError):
    """The session has had all of what the provider gives to one."""


class LeakError(SpuLlmError):
    """A secret was about to leave the secure region outside the ledger; nothing was sent."""


class PoolError(SpuLlmError):
    """Correlated randomness is missing, used up, or made for something else; nothing was sent."""


class RangeError(SpuLlmError):
    """A secret value left the range that a function on shares holds for; both parties end by it,
    and the client's error says where.
    """
