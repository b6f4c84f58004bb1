"""What one party holds of a value: four plain, frozen types.

A value of the secure program is public, private to one party, additively shared in the ring
Z_{2^64} (arithmetic) or xor-shared bit by bit (boolean). SPU chooses between the two shared forms
at run time, so whoever takes a share accepts both. Printing a value shows its form, never words.

Whatever is made of a plaintext value once (an encoding, a hint, a share inside SPU) is known by the
digest of its content, so that a copy costs nothing again and other content is noticed. Nobody
writes into an array after it has become a value. A digest stays with the party that holds the
content: to others it would confirm a guess.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CLIENT, PROVIDER = 0, 1
ROLES = ("client", "provider")


class Owner(enum.Enum):
    """The party that knows a value in the clear; the program alone tells, before anything runs."""

    PUBLIC = "public"
    CLIENT = "client"
    PROVIDER = "provider"
    JOINT = "joint"  # shared: nobody

    @property
    def rank(self) -> int:
        """Return the rank of the one party that knows the value; only for CLIENT and PROVIDER."""
        assert self in (Owner.CLIENT, Owner.PROVIDER)
        return ROLES.index(self.value)

    @staticmethod
    def of_rank(rank: int) -> Owner:
        return Owner(ROLES[rank])


@dataclass(frozen=True)
class Public:
    """Known to both parties; `value` is plaintext."""

    value: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        dtype: np.dtype = self.value.dtype
        return dtype

    @functools.cached_property
    def digest(self) -> str:
        return digest(self.value)


def public(value: object) -> Public:
    """Return `value` as one that both parties know."""
    return Public(np.asarray(value))


@dataclass(frozen=True)
class Private:
    """Known to `owner` alone; `value` is plaintext there and None at the other party.

    `encodings`: of this value, by fraction bits (`spu_llm.core.integers.factor_of`).
    """

    owner: int
    shape: tuple[int, ...]
    dtype: np.dtype
    value: np.ndarray | None = field(repr=False)
    encodings: dict[int, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def digest(self) -> str:
        """Return the content's digest, at the owner only; computed when it is first asked for."""
        assert self.value is not None
        return digest(self.value)


@dataclass(frozen=True)
class _Words:
    """A share's `words` (uint64), of which only the low `bits` bits mean anything. They encode a
    float as round(x * 2^frac_bits); integers have `frac_bits` 0.
    """

    words: np.ndarray = field(repr=False)
    dtype: np.dtype
    frac_bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape


@dataclass(frozen=True)
class Arith(_Words):
    """This party's additive share: the parties' `words` add up to the encoding mod 2^bits.

    SPU segments take whole words (64 bits) alone.
    """

    bits: int = 64


@dataclass(frozen=True)
class Bool(_Words):
    """This party's xor share."""

    bits: int


Shared = Arith | Bool
Value = Public | Private | Arith | Bool


def joined_words(share: Shared, peers: np.ndarray) -> np.ndarray:
    """Return the words of a value: this party's share and the peer's words together."""
    if isinstance(share, Arith):
        return sign_extended(share.words + peers, share.bits)
    return low_bits(share.words ^ peers, share.bits)


def owner_of(value: Value) -> Owner:
    """Return who can read a value, by its form."""
    if isinstance(value, Public):
        return Owner.PUBLIC
    return Owner.of_rank(value.owner) if isinstance(value, Private) else Owner.JOINT


class State(ABC):
    """The memory of a protocol from call to call, beside the words of shares."""

    @abstractmethod
    def fork(self) -> State:
        """Return this state without secrets, to go on from apart: what a dry run does with it."""


class Stateful(ABC):
    """A share, or private value, with protocol state, which several values may have in common.
    Operations that do not know of the state take such a value like any other, and give plain ones.
    """

    @property
    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def fork(self, state: State) -> Value:
        """Return a stand-in for this value on `state`, a fork of its own; its words are zero."""

    @abstractmethod
    def plain(self) -> Value:
        """Return the value without its state."""


def fork(values: Sequence[Any]) -> list[Any]:
    """Return the values, stateful ones as stand-ins; what had a state in common still has."""
    states = {v.state: v.state.fork() for v in values if isinstance(v, Stateful)}
    return [v.fork(states[v.state]) if isinstance(v, Stateful) else v for v in values]


def digest(array: np.ndarray) -> str:
    """Return SHA-256 (hex) of an array's shape, dtype and content."""
    content = hashlib.sha256(repr((array.shape, array.dtype.str)).encode())
    content.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def encode(value: np.ndarray, frac_bits: int) -> np.ndarray:
    """Encode plaintext `value` in ring words (uint64); ValueError when a float does not fit."""
    if not frac_bits:
        return as_words(np.asarray(value))
    scaled = np.asarray(value, np.float64) * 2.0**frac_bits
    if not np.all(np.abs(scaled) < 2.0**62):
        raise ValueError("value is not finite or too large for the fixed-point ring")
    words: np.ndarray = np.round(scaled).astype(np.int64).view(np.uint64)
    return words


def as_words(integers: np.ndarray) -> np.ndarray:
    """Return the ring words (uint64) of an integer or bool array."""
    if integers.dtype == np.uint64:
        return integers
    return integers.astype(np.int64).view(np.uint64)


def decode(words: np.ndarray, dtype: np.dtype, frac_bits: int) -> np.ndarray:
    """Return the plaintext of ring words: signed, divided by 2^frac_bits, as `dtype`."""
    signed = words.view(np.int64)
    if frac_bits:
        return (signed.astype(np.float64) / 2.0**frac_bits).astype(dtype)
    return signed.astype(dtype)


def low_bits(words: np.ndarray, bits: int) -> np.ndarray:
    """Return `words` with everything above the low `bits` bits cleared."""
    return words if bits >= 64 else words & np.uint64((1 << bits) - 1)


def sign_extended(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the low `bits` bits of `words` as signed numbers in whole words."""
    spare = np.int64(64 - bits)
    return ((words.view(np.int64) << spare) >> spare).view(np.uint64)


def frac_bits_of(dtype: np.dtype, ring_frac_bits: int) -> int:
    """Return the fixed-point position a plaintext dtype is encoded with."""
    return ring_frac_bits if np.issubdtype(dtype, np.floating) else 0


def to_bytes(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the low `bits` bits of words, in order, as bytes (uint8 [n * ceil(bits / 8)])."""
    every = np.ascontiguousarray(words, "<u8").view(np.uint8).reshape(-1, 8)
    return every[:, : (bits + 7) // 8].reshape(-1)


def from_bytes(data: np.ndarray, bits: int) -> np.ndarray:
    """Return the words [n] that `to_bytes` wrote; whole bytes, which may be more than `bits`
    bits.
    """
    size = (bits + 7) // 8
    every = np.zeros((data.size // size, 8), np.uint8)
    every[:, :size] = data.reshape(-1, size)
    return every.reshape(-1).view("<u8").astype(np.uint64)
