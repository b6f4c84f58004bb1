"""Random numbers that both parties share by words and by digits: masks of `thresholds`.

A number R is shared by words, R = R_0 + R_1 mod 2^bits, and by digits of its low bits - 1 bits, of
which the parties have xor shares of all products of bits in one digit; and its top bit. All of it
comes out of random oblivious transfers (`protocols.bits.mask_products`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocols.bits.mask_products import TRANSFERS_AT_ONCE, Products, make, plans
from protocols.bits.planes import from_planes, to_planes
from protocols.bits.polynomials import Gate, variable
from protocols.bits.stars import Star, stars, transfers
from spu_llm.core.correlation import Correlation, Correlations, Form, Part, joined
from spu_llm.core.transfers import Transfers
from spu_llm.core.values import CLIENT, Owner, low_bits

_LARGEST_DIGIT = 5


def digits(bits: int) -> tuple[tuple[int, int], ...]:
    """Return (first bit, bits) of the digits of the low bits - 1 bits, lowest first, the larger
    ones first; there are two at least.
    """
    low = bits - 1
    count = max(2, -(-low // _LARGEST_DIGIT))
    sizes = [low // count + (i < low % count) for i in range(count)]
    return tuple(zip(itertools.accumulate([0, *sizes[:-1]]), sizes, strict=True))


@functools.cache
def number_gate(bits: int) -> Gate:
    """Return a gate of shared bits whose prepared sums are the products of two or more bits of each
    digit. It is never evaluated.
    """
    some = [
        frozenset(chosen)
        for first, size in digits(bits)
        for count in range(2, size + 1)
        for chosen in itertools.combinations(range(first, first + size), count)
    ]
    return Gate("number", 0, 0, bits, tuple(frozenset([s]) for s in some))


@dataclass(frozen=True)
class Field:
    """Place of the products of a digit's bits: from `place` on in word `word`, that of the bits in
    j (1, 2, .., 2^size - 1) at j - 1.
    """

    word: int
    place: int
    first: int
    size: int


@functools.cache
def fields(bits: int) -> tuple[Field, ...]:
    """Return where the products of each digit stand, and in the end of the top bit alone."""
    made: list[Field] = []
    word = place = 0
    for first, size in (*digits(bits), (bits - 1, 1)):
        width = (1 << size) - 1
        if place + width > 64:
            word, place = word + 1, 0
        made.append(Field(word, place, first, size))
        place += width
    return tuple(made)


def _sets(field: Field) -> list[list[int]]:
    """Return the bits in j for each j of a field."""
    return [
        [field.first + i for i in range(field.size) if j >> i & 1]
        for j in range(1, 1 << field.size)
    ]


@functools.cache
def masked_number(bits: int) -> Correlation:
    """Return the correlation of R. Mask: R by words, of which the low bits count. Results: its bits
    and the products, in words as `fields` has them.
    """
    gate, words = number_gate(bits), fields(bits)[-1].word + 1

    def secure(number: Any) -> list[Any]:
        planes = [(number >> i) & 1 for i in range(bits)]
        made = np.zeros((len(number), words), np.int64)
        for field in fields(bits):
            for k, s in enumerate(_sets(field)):
                product = np.bitwise_and.reduce([planes[i] for i in s])
                made[:, field.word] |= product << (field.place + k)
        return [made]

    # What was prepared for other digits under the same name must not serve these.
    content = hashlib.sha256(repr(fields(bits)).encode()).hexdigest()[:8]
    by_client, by_provider = transfers(gate, alone=True)
    at_once = int(TRANSFERS_AT_ONCE / (128 * (by_client + by_provider)))
    return Correlation(
        name=f"masked number {bits} {content}",
        masks=(Part((), Owner.JOINT, Form.ARITH),),
        results=(Part((words,), Owner.JOINT, Form.BOOL),),
        secure=secure,
        by_transfers=functools.partial(_by_transfers, bits),
        transfers=(by_client, by_provider),
        chunk=128 * max(1, at_once),
    )


def _by_transfers(bits: int, source: Transfers, count: int) -> Correlations:
    """Make units of `masked_number`: bits and products, then the words of R.

    With l_i = c_i ^ p_i, R is the sum of 2^i (c_i + p_i - 2 c_i p_i) mod 2^bits. The products with
    2^(i+1), of which the low n = bits - 1 - i bits count, are made of the second words of transfers
    whose choice is the chooser's share u of l_i (`protocols.bits.convert`): its peer, with v, sends
    n bits of s_0 - s_1 + v, and s_u + u (s_0 - s_1 + v) is s_0 + u v. One more message each way.
    """
    gate, units = number_gate(bits), count // 64
    halves = [Products(gate, source, first, some, keep=True) for first, some in plans(units)]
    make(halves)
    masks = [np.ascontiguousarray(half.masks(range(bits)).T) for half in halves]
    mine, theirs = halves if source.rank == CLIENT else halves[::-1]
    sent = []
    for i, star in _choices(bits, theirs.first).items():
        zero, one = theirs.words[star]
        own = _unpacked(masks[halves.index(theirs)][i])
        sent.append(to_planes(zero - one + own, bits - 1 - i))
    planes = bits * (bits - 1) // 2
    peers = source.swap(np.concatenate(sent).reshape(-1), 8 * planes * mine.units)
    received = peers.view(np.uint64).reshape(planes, mine.units)
    made = []
    for half, shares in zip(halves, masks, strict=True):
        number = from_planes(shares, 64 * half.units)
        for i, star in _choices(bits, half.first).items():
            place, low = np.uint64(i + 1), bits - 1 - i
            if half is mine:
                correction = from_planes(received[:low], 64 * half.units)
                received = received[low:]
                product = half.words[star][0] + _unpacked(shares[i]) * correction
                number -= product << place
            else:
                number += half.words[star][0] << place
        made.append(Correlations([low_bits(number, bits)], [_in_fields(bits, shares, half.sums())]))
    return joined(made)


def _in_fields(bits: int, shares: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Return words as `fields` has them, from planes [bits, units] and sums [units, sums]."""
    of_sum = {p: sums[:, k] for k, p in enumerate(number_gate(bits).sums)}
    words: list[list[np.ndarray]] = [[] for _ in range(fields(bits)[-1].word + 1)]
    for field in fields(bits):
        for s in _sets(field):
            plane = shares[s[0]] if len(s) == 1 else of_sum[frozenset([frozenset(s)])]
            words[field.word].append(plane)
    return np.stack([from_planes(np.stack(some), 64 * len(sums)) for some in words], axis=-1)


@functools.cache
def _choices(bits: int, first: int) -> dict[int, Star]:
    """Return the transfer whose choice is party `first`'s share of each bit but the top one."""
    by_choice = {star.choice: star for star in stars(number_gate(bits), first, alone=True)}
    chosen = {i: by_choice[frozenset([variable(i)])] for i in range(bits - 1)}
    assert all(star.chooser == first and star.fresh_choice for star in chosen.values())
    return chosen


def _unpacked(plane: np.ndarray) -> np.ndarray:
    return from_planes(plane[None], 64 * len(plane))
