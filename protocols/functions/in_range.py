"""Whether all activations of a step stayed where the functions on shares hold, and nothing else.

Functions on a bounded range count what left it (`protocols.functions.nonlinear.rms_norm`). One bit
of the shared count is opened to both parties, whether it is zero, before anything that was computed
from those activations: the step's later values pass through `require`, which ends the session at
both parties otherwise.

nonzero  With x = x_0 + x_1 mod 2^64, x = 0 if and only if x_0 = -x_1. So bit i of x_0 at the client
         and of ~(-x_1) at the provider are xor shares of "bit i agrees", and x = 0 is the and of 64
         shared bits: three rounds of `protocols.bits.gates` with four inputs each (Beaver,
         CRYPTO'91).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from protocols.bits.compare import correct_gate
from protocols.bits.convert import arith_cost, as_arith, public_share
from protocols.bits.gates import evaluate, gate_cost
from protocols.bits.planes import from_planes, to_planes
from protocols.functions.maximum import all_of
from spu_llm.core.errors import RangeError
from spu_llm.core.op import Cost, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.reveal import reveal
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Bool, Owner, Public, Value

_BITS, _FAN_IN = 64, 4
_LEVELS = (16, 4, 1)  # gates of a level: 64 bits, then 16, then 4


def _nonzero_two_party(party: Party, x: Value) -> Bool:
    """1. x_0 and -x_1 agree in a bit. 2. In four bits, in sixteen, in all; or else x is not 0."""
    share = as_arith(party, x)
    flat = share.words.reshape(-1)
    if not flat.size:
        return Bool(share.words, np.dtype(np.bool_), 0, 1)
    # 1. ~(-x_1) = x_1 - 1
    planes = to_planes(flat if party.rank == CLIENT else flat - np.uint64(1), _BITS)
    # 2.
    for gates in _LEVELS:
        grouped = planes.reshape(gates, _FAN_IN, -1)
        planes = evaluate(party, all_of(_FAN_IN), flat.size, gates, grouped)[:, 0]
    differs = from_planes(planes, flat.size) ^ public_share(party, 1)
    return Bool(differs.reshape(x.shape), np.dtype(np.bool_), 0, 1)


def _nonzero_cost(x: Value) -> Cost:
    total, count = arith_cost(x), math.prod(x.shape)
    for gates in _LEVELS if count else ():
        total += gate_cost(all_of(_FAN_IN), count, gates)
    return total


def _nonzero_correct(x: Value) -> Correct:
    def correct(party: SimulatedParty, made: Bool, wanted: Bool) -> None:
        if made.words.size:
            correct_gate(party, all_of(_FAN_IN), made, wanted)

    return correct


nonzero = protocol_op(
    "nonzero",
    reference=lambda x: x != 0,
    two_party=_nonzero_two_party,
    cost=_nonzero_cost,
    simulate=uniform_messages(_nonzero_two_party, _nonzero_correct),
)
"""Whether a word differs from zero, for any 64-bit word: a boolean share."""


def _require_two_party(party: Party, outside: Value, x: Value) -> Value:
    assert isinstance(outside, Public)
    if np.any(outside.value):
        raise RangeError(
            "activations left the range in which the functions on shares hold; nothing of this "
            "step was opened. Who has the model sees where with spu-llm inspect, and widens ranges "
            "with spu-llm calibrate"
        )
    return x


require = protocol_op(
    "require",
    reference=lambda outside, x: x,
    two_party=_require_two_party,
    owners=lambda outside, x: [x],
    cost=lambda outside, x: Cost(),
    simulate=lambda rank, prg, common, inputs, outputs: View([], []),
    non_interactive=True,
)
"""x as it is, if the opened bit `outside` is not set; else RangeError at both parties. In plaintext
x: floats hold everywhere."""


def when_in_range(outside: Any, values: Any) -> Any:
    """`values` (a tree of arrays), once both parties have seen that the shared count `outside`
    (int32 scalar) is zero; RangeError at both if it is not. What is opened of them, or of anything
    made from them, is opened after this bit.
    """
    label = "whether activations left their ranges"
    opened = reveal(nonzero(outside), to=Owner.PUBLIC, label=label)
    return jax.tree.map(lambda x: require(opened, x), values)


def count_outside(not_below: Sequence[Any], below: Sequence[Any]) -> Any:
    """int32: how many of the shared 0-1 integers `not_below` are 1 and of `below` are 0. For bits
    [x < low] and [x < high] that is zero if and only if every x is in [low, high).
    """
    ones = sum(jnp.sum(x) for x in not_below)
    return ones + sum(int(np.prod(x.shape, dtype=int)) - jnp.sum(x) for x in below)
