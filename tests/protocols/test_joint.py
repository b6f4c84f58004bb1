"""Joint randomness: uniform as soon as one of the two secrets is."""

from __future__ import annotations

import numpy as np
import pytest

from protocols.arithmetic.joint import joint_bits, joint_fraction, joint_words
from spu_llm.core.prg import Prg
from spu_llm.core.values import Arith
from spu_llm.testing import FRAC_BITS, Case, OpContract, run_op

INTEGERS = np.array([3, -1, 0, 2**62, -(2**63)])
BITS = np.array([True, False, True, True, False])
OWNERS = ("client", "provider")


class TestJointBits(OpContract):
    op = joint_bits
    masks = False
    cases = [Case((BITS, BITS[::-1]), OWNERS), Case((INTEGERS, INTEGERS[::-1]), OWNERS)]


class TestJointWords(OpContract):
    op = joint_words
    masks = False
    cases = [Case((INTEGERS, INTEGERS[::-1]), OWNERS)]


class TestJointFraction(OpContract):
    op = joint_fraction
    nothing_to_compare = "each party brings one of the two inputs"
    cases = [Case((INTEGERS, INTEGERS[::-1]), OWNERS, {"bits": b}) for b in (1, 8, 18)]

    def test_result_is_the_reference(self) -> None:
        for case in self.cases:
            outcome = run_op(self.op, case)
            shares = [o[0] for o in outcome.outputs]
            assert all(isinstance(s, Arith) and s.frac_bits == FRAC_BITS for s in shares)
            total = sum(s.words for s in shares).view(np.int64) / 2.0**FRAC_BITS  # type: ignore[attr-defined]
            expected = joint_fraction.reference(*case.inputs, **case.static)
            np.testing.assert_array_equal(total, expected)


def test_fractions_are_uniform_whatever_one_party_brings() -> None:
    """16 bins, 20,000 draws, each party in turn with a constant: chi-square below its 1 - 1e-9
    quantile (71.8 at 15 degrees of freedom).
    """
    count = 20_000
    random = Prg.from_seed(7, "fractions").words((count,)).view(np.int64)
    for inputs in ((random, np.zeros_like(random)), (np.full_like(random, -1), random)):
        x = np.asarray(joint_fraction.reference(*inputs, bits=18))
        bins = np.bincount((x * 16).astype(int), minlength=16)
        assert ((bins - count / 16) ** 2 / (count / 16)).sum() < 71.8


@pytest.mark.parametrize("op", [joint_bits, joint_words])
def test_secrets_of_the_wrong_party_are_refused(op: object) -> None:
    with pytest.raises(ValueError, match="secret of the client"):
        run_op(op, Case((INTEGERS, INTEGERS), ("provider", "client")))  # type: ignore[arg-type]
