"""The ledger: the one place where a value is opened, and the record of what each party learned.

Masked exchanges are counted by the meter, not entered here. `Ledger.open` is the only function of
the framework that turns a secret into something a party can read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from spu_llm.core.channel import Channel
from spu_llm.core.errors import LeakError, WireError
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    ROLES,
    Arith,
    Bool,
    Owner,
    Private,
    Public,
    Value,
    as_words,
    decode,
    from_bytes,
    joined_words,
    low_bits,
    to_bytes,
)


@dataclass(frozen=True)
class Opening:
    """One value made readable: `count` elements of `bits` bits each, to `learner`."""

    learner: str  # "client" or "provider"
    label: str
    count: int
    bits: int


@dataclass
class Ledger:
    """The record of all openings, and of the public facts beside them. Equal at both parties."""

    openings: list[Opening] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=lambda: {role: [] for role in ROLES})

    def declare(self, learner: int, fact: str) -> None:
        """Record something `learner` knows by the shape of the protocol, without an opening."""
        if fact not in self.facts[ROLES[learner]]:
            self.facts[ROLES[learner]].append(fact)

    def open(
        self, channel: Channel, rank: int, value: Value, to: Owner, label: str
    ) -> Public | Private:
        """Open `value` to `to` (CLIENT, PROVIDER, or PUBLIC for both) and record it.

        The party that must learn the value receives the other's share (or the owner's plaintext
        words); it learns the ring words of the value (rounding of the secure computation included)
        and, since the missing share is value minus own share, nothing else. LeakError when the
        value is already public: then somebody opened it elsewhere.
        """
        if to is Owner.JOINT:
            raise ValueError("a value is opened to the client, the provider, or both")
        if isinstance(value, Public):
            raise LeakError(f"'{label}' is public before it was opened; its program leaks it")
        self.openings += openings(value, to, label)
        words = _exchange(channel, rank, value, learners(value, to))
        if words is None or (to is not Owner.PUBLIC and rank != to.rank):
            # This party does not learn it, or only hands on what it knows.
            return Private(to.rank, value.shape, value.dtype, None)
        plain = _plaintext(value, words)
        if to is Owner.PUBLIC:
            return Public(plain)
        return Private(to.rank, value.shape, value.dtype, plain)

    def learned(self) -> dict[str, list[str]]:
        """Return what each role learned, as lines for people: declared facts, then openings summed
        by label.
        """
        report = {role: list(facts) for role, facts in self.facts.items()}
        totals: dict[tuple[str, str, int], list[int]] = {}
        for o in self.openings:
            entry = totals.setdefault((o.learner, o.label, o.bits), [0, 0])
            entry[0] += o.count
            entry[1] += 1
        for (learner, label, bits), (count, times) in totals.items():
            report[learner].append(f"{label}: {count} x {bits} bit in {times} openings")
        return report


def learners(value: Value, to: Owner) -> list[int]:
    """Return the ranks that `value` is new to when it is opened to `to`."""
    knows = value.owner if isinstance(value, Private) else None
    ranks = [CLIENT, PROVIDER] if to is Owner.PUBLIC else [to.rank]
    return [rank for rank in ranks if rank != knows]


def openings(value: Value, to: Owner, label: str) -> list[Opening]:
    """Return what the ledger enters when `value` is opened to `to`."""
    count, bits = math.prod(value.shape), element_bits(value)
    return [Opening(ROLES[rank], label, count, bits) for rank in learners(value, to)]


def element_bits(value: Value) -> int:
    """Return how many bits an element opens: a share's width, one for a private bit, else a
    word.
    """
    if isinstance(value, Arith | Bool):
        return value.bits
    return 1 if isinstance(value, Private) and value.dtype == np.bool_ else 64


def _own_words(value: Value) -> np.ndarray:
    """Return what this party contributes to an opening: exactly the bits that are to be opened."""
    if isinstance(value, Arith | Bool):
        return low_bits(value.words, value.bits)
    assert isinstance(value, Private) and value.value is not None
    if np.issubdtype(value.dtype, np.floating):
        return np.asarray(value.value, np.float64).view(np.uint64)
    return as_words(np.asarray(value.value))


def _exchange(channel: Channel, rank: int, value: Value, learners: list[int]) -> np.ndarray | None:
    """Send and receive the words of an opening. Return the opened words at a learner (and at the
    owner of a private value), else None.
    """
    shared = isinstance(value, Arith | Bool)
    assert shared or isinstance(value, Private)
    if shared or rank == value.owner:  # type: ignore[union-attr]
        own = _own_words(value)
        if 1 - rank in learners:
            channel.send(pack_opening(own, element_bits(value)))
        if not shared:
            return own
    if rank not in learners:
        return None
    peer = _unpack(channel.recv(), value.shape, element_bits(value))
    return joined_words(value, peer) if isinstance(value, Arith | Bool) else peer


def opening_bytes(count: int, bits: int) -> int:
    """Return the size, in bytes, of a message that opens `count` elements: single bits are packed,
    wider elements take whole bytes.
    """
    return (count + 7) // 8 if bits == 1 else count * ((bits + 7) // 8)


def pack_opening(words: np.ndarray, bits: int) -> bytes:
    """Return the message that opens `words`, of which each element has `bits` bits."""
    if bits == 1:
        return np.packbits(words.astype(np.uint8).ravel(), bitorder="little").tobytes()
    return to_bytes(words, bits).tobytes()


def _unpack(data: bytes, shape: tuple[int, ...], bits: int) -> np.ndarray:
    count = math.prod(shape)
    expected = opening_bytes(count, bits)
    if len(data) != expected:
        raise WireError(f"an opening has {len(data)} bytes, expected {expected}")
    raw = np.frombuffer(data, np.uint8)
    if bits == 1:
        flat = np.unpackbits(raw, count=count, bitorder="little")
        return flat.astype(np.uint64).reshape(shape)
    return low_bits(from_bytes(raw, bits), bits).reshape(shape)


def _plaintext(value: Arith | Bool | Private, words: np.ndarray) -> np.ndarray:
    """Return the plaintext of a value, given its opened words."""
    if isinstance(value, Arith | Bool):
        return decode(words, value.dtype, value.frac_bits)
    if value.value is not None:
        return value.value
    if np.issubdtype(value.dtype, np.floating):
        return words.view(np.float64).astype(value.dtype)  # it travels as float64
    return decode(words, value.dtype, 0)
