"""Random oblivious transfers, as what makes correlated randomness of them sees them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

STRING_WORDS = 2  # uint64 words of a string


# Bits and the strings that they say, at the chooser; both strings, at its peer.
Strings = tuple[np.ndarray, np.ndarray]


class Transfers(Protocol):
    """This party's end. In a transfer one party, the *chooser*, has a random bit and one of two
    random strings, which the bit says; its peer has both strings and knows nothing of the bit, and
    the chooser nothing of the other string. Each transfer comes once.

    Both parties ask for the same transfers in the same order: one chooses where the other offers.
    """

    rank: int

    def choose(self, count: int) -> Strings:
        """Return bits uint64 [count] of 0 or 1, and the strings they say [count, STRING_WORDS]."""

    def offer(self, count: int) -> Strings:
        """Return the strings for the bit 0 and for the bit 1, each [count, STRING_WORDS]."""

    def both(self, by_client: int, by_provider: int) -> tuple[Strings, Strings]:
        """Return what `choose` does and what `offer` does, for so many transfers in which the
        client chooses and, after them, in which the provider does.
        """

    def draw(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw secret uniform words of this party's own."""

    def swap(self, own_part: np.ndarray, peers: int) -> np.ndarray:
        """Send words or bytes, if there are any, and return the peer's `peers` bytes, if any."""
