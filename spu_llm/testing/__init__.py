"""One contract test that every protocol op inherits, and a toy op to try it on.

    class TestReveal(OpContract):
        op = reveal
        cases = [Case(...), ...]

The contract runs the op between two threads on an in-memory channel and checks, for every case:
the result against the plaintext reference, messages and bytes against the declared cost, openings
against the declared ones, tampered messages, and each party's view against the op's simulator.
Broken twins of the party (mask dropped, reused, known to the peer) must make the view check fail.

What the statistics cannot see: a bias of one bit below about 8 % of the rows, a relation of three
bits or more at different places, anything that needs more than ROWS samples. They find mistakes; a
proof is the simulator's argument.
"""

from spu_llm.testing.broken import (
    MASK_TWINS,
    TAMPERINGS,
    BrokenParty,
    DroppedMask,
    tampering,
)
from spu_llm.testing.contract import OpContract
from spu_llm.testing.run import (
    FRAC_BITS,
    Case,
    Dealer,
    Outcome,
    common_stream,
    owner_of,
    reconstruct_words,
    run_op,
    share_inputs,
)
from spu_llm.testing.toy import toy_reshare
from spu_llm.testing.views import ROWS, distinguish

__all__ = [
    "FRAC_BITS",
    "MASK_TWINS",
    "ROWS",
    "TAMPERINGS",
    "BrokenParty",
    "Case",
    "Dealer",
    "DroppedMask",
    "OpContract",
    "Outcome",
    "common_stream",
    "distinguish",
    "owner_of",
    "reconstruct_words",
    "run_op",
    "share_inputs",
    "tampering",
    "toy_reshare",
]
