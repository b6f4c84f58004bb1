"""One entry per row out of a shared table, at an index that the client alone knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from protocols.bits.convert import known_words
from protocols.bits.planes import bytes_for
from protocols.ot.transfer import Batch, choose, offer, simulate_choose, simulate_offer
from spu_llm.core.op import Cost, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Bool,
    Owner,
    Private,
    Shared,
    Value,
    encode,
    frac_bits_of,
    from_bytes,
    low_bits,
    to_bytes,
)


def _reference(table: Any, index: Any, *, bits: int = 64) -> Any:
    return table[np.arange(len(index)), index]


def _two_party(party: Party, table: Value, index: Value, *, bits: int = 64) -> Shared:
    """Select entries under a mask (POST, Algorithms 1 and 2, step 4).

    1. The provider draws a mask r per row and word of the result: its share of the result.
    2. The client gets its chosen entry of the provider's table of (share - r), by an oblivious
       transfer (`protocols.ot.transfer`: one message each way).
    3. The client adds its own share of that entry.
    For boolean shares, - and + are xor. Words travel in as many bytes as the result's bits need.
    """
    share = _share(party, table)
    batch = _batch(table, index, bits)
    wide = _width(table, bits)
    words = share.words.reshape(*share.shape[:2], math.prod(share.shape[2:]))
    if party.rank == PROVIDER:
        # 1.
        mask = low_bits(party.mask((batch.rows, words.shape[2])), wide)

        def strings(rows: slice, entries: slice) -> np.ndarray:
            part, r = words[rows, entries], mask[rows, None]
            return _strings(part ^ r if isinstance(share, Bool) else part - r, wide)

        # 2.
        offer(party, batch, strings)
        return _like(share, mask, wide)
    assert isinstance(index, Private) and index.value is not None
    # 2.
    chosen = from_bytes(choose(party, batch, index.value), wide)
    # 3.
    own_part = words[np.arange(batch.rows), index.value]
    entry = chosen.reshape(own_part.shape)
    return _like(share, own_part ^ entry if isinstance(share, Bool) else own_part + entry, wide)


def _share(party: Party, table: Value) -> Shared:
    """Return the table in shared form; what one party knows is one share, and zero the other."""
    if isinstance(table, Arith | Bool):
        return table
    frac_bits = frac_bits_of(table.dtype, party.frac_bits)
    words = known_words(party, table, frac_bits, public_at=PROVIDER)
    if table.dtype == np.bool_:
        return Bool(words, table.dtype, 0, 1)
    return Arith(words, table.dtype, frac_bits)


def _width(table: Value, bits: int) -> int:
    """Return how many bits a word of the result has."""
    if not 1 <= bits <= 64:
        raise ValueError(f"a share has 1 to 64 bits, asked for {bits}")
    if isinstance(table, Bool):
        return table.bits
    if not isinstance(table, Arith) and table.dtype == np.bool_:
        return 1
    return min(bits, table.bits) if isinstance(table, Arith) else bits


def _batch(table: Value, index: Value, bits: int) -> Batch:
    shape = table.shape
    if len(shape) < 2 or index.shape != shape[:1]:
        raise ValueError(
            f"expected a table [rows, entries, ...] and an index [rows], found shapes {shape} and "
            f"{index.shape}"
        )
    return Batch(shape[0], shape[1], math.prod(shape[2:]) * bytes_for(_width(table, bits)))


def _strings(words: np.ndarray, bits: int) -> np.ndarray:
    """Return words [..., n] as uint8 [..., n * bytes], cut to their low `bits` bits."""
    *outer, n = words.shape
    return to_bytes(low_bits(words, bits), bits).reshape(*outer, n * bytes_for(bits))


def _like(share: Shared, words: np.ndarray, bits: int) -> Shared:
    """Return a result of the table's kind; bits that mean nothing are cleared."""
    shape = (share.shape[0], *share.shape[2:])
    low = low_bits(words, bits).reshape(shape)
    if isinstance(share, Bool):
        return Bool(low, share.dtype, share.frac_bits, bits)
    return Arith(low, share.dtype, share.frac_bits, bits)


def _owners(table: Owner, index: Owner, *, bits: int = 64) -> Sequence[Owner]:
    if index is not Owner.CLIENT:
        raise ValueError(f"select takes an index of the client's, found {index.value}")
    return [Owner.JOINT]


def _cost(table: Value, index: Value, *, bits: int = 64) -> Cost:
    return _batch(table, index, bits).cost()


def _simulate(
    rank: int,
    prg: Prg,
    common: Prg,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    *,
    bits: int = 64,
) -> View:
    """Simulate a party's view. The provider's mask is its share of the result, the rest uniform;
    the client's string is its share of the result without its own share of the entry
    (`protocols.ot.transfer` has the rest).
    """
    table, index = inputs
    (result,) = outputs
    assert isinstance(result, Arith | Bool)
    batch, wide = _batch(table, index, bits), _width(table, bits)
    words = result.words.reshape(batch.rows, math.prod(result.shape[1:]))
    if rank == PROVIDER:
        unused = prg.words(words.shape)
        mask = words | (unused - low_bits(unused, wide))
        seen = simulate_offer(prg, batch)
        return View([mask, *seen.own], seen.incoming)
    assert isinstance(index, Private) and index.value is not None
    own_part = np.zeros_like(words)
    if isinstance(table, Arith | Bool):
        own_part = table.words[np.arange(batch.rows), index.value].reshape(words.shape)
    elif isinstance(table, Private) and table.owner == CLIENT:
        assert table.value is not None
        known = encode(table.value, result.frac_bits)
        own_part = known[np.arange(batch.rows), index.value].reshape(words.shape)
    entry = words ^ own_part if isinstance(result, Bool) else words - own_part
    return simulate_choose(prg, common, batch, index.value, _strings(entry, wide))


select = protocol_op(
    "select",
    reference=_reference,
    two_party=_two_party,
    owners=_owners,
    cost=_cost,
    simulate=_simulate,
)
"""x[i, index[i]] of a table x [rows, entries, ...] in any form and an index [rows] (int32, int64)
that the client knows; shared, in the table's dtype and fraction bits. Two messages.

bits: of the ring of the result of an arithmetic table; fewer bits make a smaller message and a
result mod 2^bits. A boolean table keeps its own bits. An index outside the table is a ValueError at
the client. Both parties learn nothing.
"""
