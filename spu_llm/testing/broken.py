"""Broken twins of a party, and a network that tampers with messages: what tests must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spu_llm.core.channel import Channel, SealedChannel
from spu_llm.core.correlation import Correlation, Correlations, Form
from spu_llm.core.integers import Factor
from spu_llm.core.party import Party
from spu_llm.testing.run import leaked_words


class BrokenParty(Party):
    """A party whose masks are spoiled before it uses them; results it prepared stay as they are."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        raise NotImplementedError

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.spoil(super().mask(shape), Form.ARITH)

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        correlations = super().take(correlation, units, fixed)
        masks = [
            self.spoil(words, part.form) if words.size and part.is_held_by(self.rank) else words
            for part, words in zip(correlation.masks, correlations.masks, strict=True)
        ]
        return Correlations(masks, correlations.results)


class DroppedMask(BrokenParty):
    """Broken: masks nothing."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        return np.zeros_like(words)


class ReusedMask(BrokenParty):
    """Broken: the same mask for every element."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        if form is Form.BOOL:  # bit-sliced: an element is a bit
            lowest = words.reshape(-1, words.shape[-1])[:1] & np.uint64(1)
            return np.broadcast_to(np.uint64(0) - lowest, words.shape)
        return np.broadcast_to(words.reshape(-1)[:1], words.shape)


class HalfReusedMask(BrokenParty):
    """Broken: the second half of the elements reuses the masks of the first."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        flat = words.reshape(-1).copy()
        half = flat.size // 2
        flat[half : 2 * half] = flat[:half]
        return flat.reshape(words.shape)


class ThinMask(BrokenParty):
    """Broken: a bit is not masked: in the middle of a word and of a narrow one, the first of
    several, every other.
    """

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        thin = words.copy()
        if form is Form.BOOL:
            thin[..., 0] = 0
        elif form is Form.BIT:
            thin[::2] = 0
        else:  # elements of the field stay elements
            thin &= ~np.uint64(1 << 30 | 1 << 4)
        return thin


class KnownMask(BrokenParty):
    """Broken: masks from a stream that the peer has, too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known: set[tuple[tuple[int, ...], int]] = set()  # shapes of masks, and their bits

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        self.known.add((words.shape, form.bits))
        return leaked_words(words.shape, form.bits)


MASK_TWINS: dict[str, type[Party]] = {
    "dropped mask": DroppedMask,
    "reused mask": ReusedMask,
    "mask reused once": HalfReusedMask,
    "mask with a hole": ThinMask,
    "mask the peer can recompute": KnownMask,
}


TAMPERINGS = ("replayed", "cut", "reordered", "changed")


def tampering(rank: int, how: str) -> Callable[[int, Channel], Channel]:
    """Return a `wrap` for `run_op` that seals channels and tampers with the first message that
    `rank` sends.

    One message in each direction comes before the op's own, to be replayed or reordered.
    """

    def wrap(at: int, channel: Channel) -> Channel:
        return _AfterTheFirst(_Tampered(channel, how) if at == rank else channel, at)

    return wrap


class _Tampered:
    def __init__(self, inner: Channel, how: str) -> None:
        self._inner, self._how = inner, how
        self._sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self._sent.append(data)
        first = len(self._sent) == 1
        if len(self._sent) == 2:
            middle = len(data) // 2
            changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            data = {"replayed": self._sent[0], "cut": data[:-1], "changed": changed}.get(
                self._how, data
            )
        if not (first and self._how == "reordered"):
            self._inner.send(data)
        if len(self._sent) == 2 and self._how == "reordered":
            self._inner.send(self._sent[0])

    def recv(self) -> bytes:
        return self._inner.recv()


class _AfterTheFirst(SealedChannel):
    """A message in each direction comes before those that it is asked for."""

    def __init__(self, inner: Channel, rank: int) -> None:
        super().__init__(inner, b"a session's key", rank)
        self._waiting = True
        self.send(b"before")

    def recv(self) -> bytes:
        if self._waiting:
            self._waiting = False
            assert super().recv() == b"before"
        return super().recv()
