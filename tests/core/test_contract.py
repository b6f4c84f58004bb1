"""The contract of every op of the framework, and proof that the contract can fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from spu_llm.op import ProtocolOp
from spu_llm.party import Party
from spu_llm.reveal import reveal
from spu_llm.testing import Case, OpContract, run_op, toy_reshare
from spu_llm.values import Arith, Bool, Owner, Value

INTEGERS = np.array([[3, -1, 0], [2**62, -(2**63), 7]])
BITS = np.array([True, False, True, True, False])


def reveal_case(x: np.ndarray, form: str, to: Owner) -> Case:
    return Case((x,), (form,), {"to": to, "label": "test"})


class TestReveal(OpContract):
    op = reveal
    cases = [
        *(reveal_case(INTEGERS, form, to)
          for form in ("arith", "degenerate", "bool64")
          for to in (Owner.CLIENT, Owner.PROVIDER, Owner.PUBLIC)),
        *(reveal_case(BITS, form, to)
          for form in ("bool1", "client", "provider")
          for to in (Owner.CLIENT, Owner.PROVIDER, Owner.PUBLIC)),
        reveal_case(np.arange(6) << 13, "bool19", Owner.CLIENT),
        reveal_case(np.zeros((0, 4), np.int64), "arith", Owner.PUBLIC),
    ]  # fmt: skip


class TestToyReshare(OpContract):
    op = toy_reshare
    cases = [
        Case((INTEGERS,), (form,), {"rounds": rounds})
        for form in ("arith", "degenerate")
        for rounds in (1, 2, 3)
    ]


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


BIT_CASE = reveal_case(BITS, "bool1", Owner.CLIENT)


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (_twin(reveal, _opens_one_bit_more), BIT_CASE),
        (_twin(reveal, _opens_to_both), BIT_CASE),
        (_twin(reveal, _opens_twice), BIT_CASE),
        (_twin(toy_reshare, _sends_share_unmasked),
         Case((INTEGERS,), ("degenerate",), {"rounds": 1})),
        (_twin(toy_reshare, _masks_only_the_low_half),
         Case((INTEGERS,), ("degenerate",), {"rounds": 1})),
    ],
    ids=["one bit too many", "opened to both", "opened twice", "share sent bare", "short mask"],
)  # fmt: skip
def test_contract_catches_broken_op(broken: ProtocolOp, case: Case) -> None:
    contract = OpContract()
    contract.op, contract.cases = broken, [case]
    checks = [
        contract.test_cost_is_as_declared,
        contract.test_opens_what_is_declared,
        contract.test_views_are_simulated,
    ]
    assert any(_fails(check) for check in checks)


def _fails(check: Any) -> bool:
    try:
        check()
    except AssertionError:
        return True
    return False


def test_masks_are_never_handed_out_twice() -> None:
    case = Case((np.zeros(64, np.int64),), ("arith",), {"rounds": 3})
    outcome = run_op(toy_reshare, case)
    words = np.concatenate([m for view in outcome.views for m in view.own])
    assert len(set(words.tolist())) == words.size
