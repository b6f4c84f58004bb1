"""Checking a recorded case: each party alone repeats its half, and the results are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spu_llm.core.correlation import Correlation, Correlations, Form, evaluate, together
from spu_llm.core.integers import Factor
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    ROLES,
    Arith,
    Bool,
    Value,
    as_words,
    decode,
    encode,
    frac_bits_of,
    low_bits,
    owner_of,
    sign_extended,
)
from spu_llm.testing import FRAC_BITS
from tests.vectors.cases import all_ops
from tests.vectors.encoding import (
    Json,
    correlations_of,
    fixed_of,
    from_hex,
    from_static,
    held,
    kind_of,
    parts_of,
    to_hex,
    value_of,
)
from tests.vectors.recording import joined


def replay(case: Json, rank: int) -> None:
    """Run one party's half of a case on what is recorded; the peer is its recorded messages.

    AssertionError unless it draws, takes, sends and returns, byte for byte, what is recorded.
    """
    own, common = (_Stream(bytes.fromhex(case["keys"][k])) for k in (ROLES[rank], "common"))
    tape, units = _Tape(rank), _Units(rank)
    party = Party(rank, tape, own, case["frac_bits"], units, common)
    results: list[list[Value]] = []
    for call in case["calls"]:
        tape.load(call["messages"])
        units.waiting = list(call["correlations"])
        own.drawn, common.drawn = [], []
        inputs = [
            results[x["call"]][0] if "call" in x else value_of(x, rank) for x in call["inputs"]
        ]
        static = from_static(call["static"])
        results.append(all_ops()[call["op"]].run(party, inputs, static))
        tape.end()
        assert not units.waiting, "a correlation is recorded that is not taken"
        for name, stream in ((ROLES[rank], own), ("common", common)):
            drawn = to_hex(joined(stream.drawn))
            assert drawn == call["drawn"][name], f"{name}: other words are drawn than recorded"
        for value, recorded in zip(results[-1], call["outputs"], strict=True):
            kind = {k: v for k, v in recorded.items() if k not in ROLES}
            assert kind_of(value) == kind, f"a result is {kind_of(value)}, recorded {kind}"
            assert held(value) == recorded[ROLES[rank]], "a result has other words than recorded"


class _Tape:
    """A channel to what the peer once sent; what this party sends must be what it sent then."""

    def __init__(self, rank: int) -> None:
        self._role = ROLES[rank]

    def load(self, messages: Sequence[Json]) -> None:
        self._own, self._peers = (
            [bytes.fromhex(m["bytes"]) for m in messages if (m["from"] == self._role) == own]
            for own in (True, False)
        )
        self._sent = 0

    def send(self, data: bytes) -> None:
        assert self._sent < len(self._own), "a message more than recorded"
        expected, self._sent = self._own[self._sent], self._sent + 1
        assert data == expected, f"message {self._sent} of the {self._role} is not as recorded"

    def recv(self) -> bytes:
        assert self._peers, "a message is awaited that is not recorded"
        return self._peers.pop(0)

    def end(self) -> None:
        assert self._sent == len(self._own), "a message is recorded that is not sent"
        assert not self._peers, "a message is recorded that nobody reads"

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _Stream(Prg):
    """Keeps what is drawn."""

    drawn: list[np.ndarray]

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        self.drawn.append(super().words(shape))
        return self.drawn[-1]


class _Units:
    """Recorded units, which must be what is asked for, and right."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.waiting: list[Json] = []

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        assert self.waiting, f"{correlation.name} is taken, nothing recorded"
        recorded = self.waiting.pop(0)
        actual = recorded["name"], recorded["units"]
        assert actual == (correlation.name, units), f"recorded {actual}, taken {correlation.name}"
        _check_units(correlation, recorded)
        expected = fixed_of(recorded)
        if fixed is not None:  # at the provider
            assert expected is not None
            assert np.array_equal(as_words(fixed.entries), expected.entries)
        return correlations_of(recorded, self._rank)


def _check_units(correlation: Correlation, recorded: Json) -> None:
    """Check both parties' words together: results are what the masks give."""
    for name, parts in parts_of(correlation).items():
        kinds = [{k: v for k, v in p.items() if k not in ROLES} for p in recorded[name]]
        assert kinds == parts, f"{correlation.name} has {name} {parts}, recorded {kinds}"
    both = [correlations_of(recorded, rank) for rank in (CLIENT, PROVIDER)]
    masks = [
        together(part, a, b)
        for part, a, b in zip(correlation.masks, both[0].masks, both[1].masks, strict=True)
    ]
    wanted = evaluate(correlation, masks, fixed_of(recorded))
    for part, a, b, plain in zip(
        correlation.results, both[0].results, both[1].results, wanted, strict=True
    ):
        actual = a ^ b if part.form is Form.BOOL else together(part, a, b)
        assert np.array_equal(actual, plain), f"{correlation.name}: results are not of its masks"


# ---- the meaning of what is recorded


def check_results(case: Json) -> int:
    """Raise AssertionError unless all results, put together, are what the op means. How many were
    compared.
    """
    compared = 0
    outputs: list[Json] = []
    for call in case["calls"]:
        op, static = all_ops()[call["op"]], from_static(call["static"])
        recorded = [outputs[x["call"]] if "call" in x else x for x in call["inputs"]]
        inputs = [[value_of(x, rank) for x in recorded] for rank in (CLIENT, PROVIDER)]
        results = [[value_of(x, rank) for rank in (CLIENT, PROVIDER)] for x in call["outputs"]]
        outputs.append(call["outputs"][0])
        collected = [_together(pair) for pair in results]
        if op.model is not None:
            common = from_hex(call["drawn"]["common"], np.uint64, [-1])
            for got, wanted in zip(
                collected, op.model(inputs, _Again(common), **static), strict=True
            ):
                np.testing.assert_array_equal(got, as_words(np.asarray(wanted)))
                compared += 1
        if call["error"] is not None:
            plain = [_plain(pair) for pair in zip(*inputs, strict=True)]
            meant: Any = op.reference(*plain, **static)
            meant = meant if isinstance(meant, tuple | list) else [meant]
            for got, wanted, pair in zip(collected, meant, results, strict=True):
                expected = encode(np.asarray(wanted), frac_bits_of(pair[0].dtype, FRAC_BITS))
                assert got.shape == expected.shape
                # Unsigned, so that the most negative word is far off, too.
                off = np.abs((got - expected).view(np.int64)).view(np.uint64).max(initial=0)
                assert off <= call["error"], f"off by {off} units, {call['error']} allowed"
                compared += 1
        owners = op.owners(*map(owner_of, inputs[CLIENT]), **static)
        assert [owner_of(pair[0]) for pair in results] == list(owners)
    return compared


def _together(values: Sequence[Value]) -> np.ndarray:
    """Ring words of a value, from both parties' halves."""
    a, b = values
    if isinstance(a, Arith) and isinstance(b, Arith):
        return sign_extended(a.words + b.words, a.bits)
    if isinstance(a, Bool) and isinstance(b, Bool):
        return as_words(decode(low_bits(a.words ^ b.words, a.bits), a.dtype, 0))
    plain = _plain(values)
    return encode(plain, frac_bits_of(plain.dtype, FRAC_BITS))


def _plain(values: Sequence[Value]) -> np.ndarray:
    """Plaintext of a value, from both parties' halves."""
    a, b = values
    if isinstance(a, Arith | Bool):
        return decode(_together(values), a.dtype, a.frac_bits)
    known: list[Any] = [v.value for v in (a, b) if not isinstance(v, Arith | Bool)]
    known = [x for x in known if x is not None]
    for other in known[1:]:
        np.testing.assert_array_equal(other, known[0])
    return np.asarray(known[0])


class _Again(Prg):
    """Words once drawn, again."""

    def __init__(self, words: np.ndarray) -> None:
        self._words = words

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape, dtype=int))
        taken, self._words = self._words[:count], self._words[count:]
        return taken.reshape(shape)
