"""One contract test that every protocol op inherits, and a toy op to try it on.

    class TestReveal(OpContract):
        op = reveal
        cases = [Case(...), ...]

The contract runs the op between two threads on an in-memory channel and checks, for every case:
the result against the plaintext reference, messages and bytes against the declared cost, openings
against the declared ones, tampered messages, and each party's view. Of views it says, for
semi-honest parties and the shapes of the cases:

- Exactly (`hiding`): every bit that a party sends has a fresh bit of its own, in every column and
  round, given all that the peer has. With prepared masks that are what they should be, messages are
  then uniform to the peer. Each correlation alone, with masks dropped or used before in this call
  or the last, must break that; with wrong results, the op's result.
- By samples (`views`): what a party draws, is dealt and receives looks uniform and independent of
  both inputs, every column of it; shares of results declared `fresh`, too. The ideal view is drawn,
  not computed: no code of the op makes it. Its result follows from a party's view, so that, with
  right results, there is nothing else to simulate. A right op fails with a chance of about 1e-9 per
  comparison, and of 2^-60 by a relation.
- Two secrets look the same to whoever knows neither; a contract that compares none says why.
- An op's code makes no `Prg` of its own.
- Broken twins of the party (mask dropped, reused, known to the peer) must fail both of the former,
  but where samples say nothing of which rows share a mask, or the exact check nothing of a hash.

What it does not say: that masks prepared by SPU are what they should be; anything of other shapes,
of times, or of bits that Python code could pass by without a message. The exact check counts F_2
spans at one random choice of shares, and what a hash makes of a key as fresh. Samples do not see a
bias of one bit below about 8 % of the rows, nor sums of columns beyond some of all pairs and
triples. Ops that are not `uniform` (openings, oblivious transfer) are compared with their own
simulators. It finds mistakes; a proof is in each protocol's text.
"""

from spu_llm.testing.contract import OpContract
from spu_llm.testing.run import FRAC_BITS, Case, reconstruct_words, run_op
from spu_llm.testing.toy import toy_reshare
from spu_llm.testing.views import ROWS, distinguish

__all__ = [
    "FRAC_BITS",
    "ROWS",
    "Case",
    "OpContract",
    "distinguish",
    "reconstruct_words",
    "run_op",
    "toy_reshare",
]
