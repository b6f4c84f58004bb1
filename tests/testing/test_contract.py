"""The contract of every op of the framework, and proof that the contract can fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from spu_llm.core.op import ProtocolOp
from spu_llm.core.party import Party
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Bool, Owner, Public, Value
from spu_llm.testing import Case, OpContract, run_op, toy_reshare

INTEGERS = np.array([[3, -1, 0], [2**62, -(2**63), 7]])
BITS = np.array([True, False, True, True, False])


def reveal_case(x: np.ndarray, form: str, to: Owner) -> Case:
    return Case((x,), (form,), {"to": to, "label": "test"})


class TestReveal(OpContract):
    op = reveal
    masks = False
    uniform = False
    nothing_to_compare = "only who learns the value gets a message"
    cases = [
        *(
            reveal_case(INTEGERS, form, to)
            for form in ("arith", "degenerate", "bool64")
            for to in (Owner.CLIENT, Owner.PROVIDER, Owner.PUBLIC)
        ),
        *(
            reveal_case(BITS, form, to)
            for form in ("bool1", "client", "provider")
            for to in (Owner.CLIENT, Owner.PROVIDER, Owner.PUBLIC)
        ),
        reveal_case(np.arange(6) << 13, "bool19", Owner.CLIENT),
        reveal_case(np.array([5, -3, 2**23 - 1, -(2**23)]), "arith24", Owner.CLIENT),
        reveal_case(np.zeros((0, 4), np.int64), "arith", Owner.PUBLIC),
    ]


class TestToyReshare(OpContract):
    op = toy_reshare
    cases = [
        Case((INTEGERS,), (form,), {"rounds": rounds})
        for form in ("arith", "degenerate")
        for rounds in (1, 2, 3)
    ]


def test_a_rule_for_shapes_must_be_the_references() -> None:
    def right(x: Any, *, rounds: int) -> list[Any]:
        return [x]

    def wrong(x: Any, *, rounds: int) -> list[Any]:
        return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype)]

    contract = TestToyReshare()
    contract.op = dataclasses.replace(toy_reshare, shapes=right)
    contract.test_result_is_the_reference()
    contract.op = dataclasses.replace(toy_reshare, shapes=wrong)
    with pytest.raises(AssertionError):
        contract.test_result_is_the_reference()


# ---- broken twins that are not about masks: the contract must fail on each


def _twin(op: ProtocolOp, two_party: Any) -> ProtocolOp:
    return dataclasses.replace(op, two_party=two_party)


def _opens_one_bit_more(party: Party, x: Value, **static: Any) -> Value:
    assert isinstance(x, Bool)
    return party.open(dataclasses.replace(x, bits=x.bits + 1), static["to"], static["label"])


def _opens_to_both(party: Party, x: Value, **static: Any) -> Value:
    return party.open(x, Owner.PUBLIC, static["label"])


def _opens_twice(party: Party, x: Value, **static: Any) -> Value:
    party.open(x, Owner.PROVIDER, static["label"])
    return party.open(x, static["to"], static["label"])


def _sends_share_unmasked(party: Party, x: Value, *, rounds: int) -> Value:
    assert isinstance(x, Arith)
    party.mask(x.shape)
    party.send(x.words)
    return Arith(party.recv(x.shape), x.dtype, x.frac_bits)


def _masks_only_the_low_half(party: Party, x: Value, *, rounds: int) -> Value:
    assert isinstance(x, Arith)
    mine = party.mask(x.shape) & np.uint64(0xFFFFFFFF)
    party.send(x.words + mine)
    return Arith(party.recv(x.shape) - mine, x.dtype, x.frac_bits)


def _leaks_in_an_unread_message(party: Party, x: Value, *, rounds: int) -> Value:
    assert isinstance(x, Arith)
    out = toy_reshare.two_party(party, x, rounds=rounds)
    if party.rank == PROVIDER:
        party.channel.send(x.words.tobytes())
    return out


def _bypasses_the_party(party: Party, x: Value, *, rounds: int) -> Value:
    """Return the share goes straight over the channel instead of a masked word."""
    assert isinstance(x, Arith)
    party.mask(x.shape)
    party.channel.send(x.words.tobytes())
    theirs = np.frombuffer(party.channel.recv(), np.uint64).reshape(x.shape)
    return Arith(theirs, x.dtype, x.frac_bits)


def _opens_without_the_ledger(party: Party, x: Value, *, rounds: int) -> Value:
    assert isinstance(x, Arith)
    party.send(x.words)
    return Public((x.words + party.recv(x.shape)).view(np.int64))


def _masks_with_the_common_stream(party: Party, x: Value, *, rounds: int) -> Value:
    assert isinstance(x, Arith)
    mine = party.mask(x.shape)
    pads = party.common.words((2, *x.shape))
    party.send(x.words + pads[party.rank])
    return Arith(party.recv(x.shape) - pads[1 - party.rank] - mine + mine, x.dtype, x.frac_bits)


def _leaves_every_64th_row_unmasked(party: Party, x: Value, *, rounds: int) -> Value:
    assert isinstance(x, Arith)
    mine = np.array(party.mask(x.shape))
    mine.reshape(-1)[5::64] = 0
    party.send(x.words + mine)
    return Arith(party.recv(x.shape) - mine, x.dtype, x.frac_bits)


def _takes_a_round_more(party: Party, x: Value, *, rounds: int) -> Value:
    if party.rank == CLIENT:
        party.channel.send(b"")
    else:
        party.channel.recv()
    return toy_reshare.two_party(party, x, rounds=rounds)


BITS_19 = reveal_case(np.arange(6) << 13, "bool19", Owner.CLIENT)
SHARE = Case((INTEGERS,), ("degenerate",), {"rounds": 1})
SHARED = Case((INTEGERS,), ("arith",), {"rounds": 1})
NAMED = {
    "cost": "test_cost_is_as_declared",
    "openings": "test_opens_what_is_declared",
    "owners": "test_result_belongs_to_whom_it_should",
    "views": "test_views_are_simulated",
}


@pytest.mark.parametrize(
    ("op", "two_party", "case", "check"),
    [
        (reveal, _opens_one_bit_more, BITS_19, "openings"),
        (reveal, _opens_to_both, BITS_19, "owners"),
        (reveal, _opens_twice, BITS_19, "openings"),
        (toy_reshare, _sends_share_unmasked, SHARE, "views"),
        (toy_reshare, _masks_only_the_low_half, SHARE, "views"),
        (toy_reshare, _leaks_in_an_unread_message, SHARE, "cost"),
        (toy_reshare, _bypasses_the_party, SHARE, "views"),
        (toy_reshare, _masks_with_the_common_stream, SHARED, "views"),
        (toy_reshare, _leaves_every_64th_row_unmasked, SHARE, "views"),
        (toy_reshare, _opens_without_the_ledger, SHARE, "owners"),
        (toy_reshare, _takes_a_round_more, SHARE, "cost"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_contract_catches_broken_op(op: Any, two_party: Any, case: Case, check: str) -> None:
    """Each broken op fails the very check that is there for its fault."""
    contract = OpContract()
    contract.op, contract.cases = _twin(op, two_party), [case]
    with pytest.raises(AssertionError):
        getattr(contract, NAMED[check])()


def test_contract_does_not_pass_without_cases() -> None:
    contract = OpContract()
    contract.op, contract.cases = toy_reshare, []
    with pytest.raises(AssertionError):
        contract.test_result_is_the_reference()
    with pytest.raises(AssertionError):
        contract.test_broken_twins_are_caught()


def test_masks_are_never_handed_out_twice() -> None:
    case = Case((np.zeros(64, np.int64),), ("arith",), {"rounds": 3})
    outcome = run_op(toy_reshare, case)
    words = np.concatenate([m for view in outcome.views for m in view.own])
    assert len(set(words.tolist())) == words.size
