"""Whether all activations of a step stayed where the functions on shares hold, and where not.

Functions on a bounded range count what left it (`protocols.functions.norms.rms_norm`). One bit
of the shared counts is opened to both parties, whether all are zero, before anything that was
computed from those activations: the step's later values pass through `require`, which ends the
session at both parties otherwise. Only then one bit of each count is opened, to the client alone:
where its own text does not fit is for its user to tell the provider, who would learn of the text.

nonzero  With x = x_0 + x_1 mod 2^64, x = 0 if and only if x_0 = -x_1. So bit i of x_0 at the client
         and of ~(-x_1) at the provider are xor shares of "bit i agrees", and x = 0 is the and of 64
         shared bits: three rounds of `protocols.bits.gates` with four inputs each (Beaver,
         CRYPTO'91).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.bits.compare import correct_gate
from protocols.bits.convert import arith_cost, as_arith, public_share
from protocols.bits.gates import evaluate, gate_cost
from protocols.bits.planes import from_planes, to_planes
from protocols.functions.maximum import all_of
from spu_llm.core.errors import RangeError
from spu_llm.core.op import Cost, Functionality, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.reveal import reveal
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Bool, Owner, Private, Public, Value

_BITS, _FAN_IN = 64, 4
_LEVELS = (16, 4, 1)  # gates of a level: 64 bits, then 16, then 4


def _nonzero_two_party(party: Party, x: Value) -> Bool:
    """Compute whether x is not 0. 1. x_0 and -x_1 agree in a bit. 2. In four bits, in sixteen, in
    all; or else x is not 0.
    """
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


_LEFT = "activations left the ranges in which the functions on shares hold"


def _require_two_party(
    party: Party, outside: Value, counts: Value, x: Value, *, sites: Sequence[str]
) -> Value:
    """Return x, unless `outside` is set. 1. Nothing, as a rule. 2. Else which counts are not zero,
    to the client; RangeError.
    """
    assert isinstance(outside, Public)
    # 2.
    if np.any(outside.value):
        left = _nonzero_two_party(party, counts)
        opened = party.open(left, Owner.CLIENT, "which ranges activations left")
        assert isinstance(opened, Private)
        raise RangeError(_told(sites, opened.value))
    return x


def _told(sites: Sequence[str], left: np.ndarray | None) -> str:
    """Return what a party's user reads; `left`: whether each site was left, at the client."""
    if left is None:
        return (
            f"{_LEFT}; nothing of this step was opened but where, to the client. spu-llm inspect "
            "lists the ranges, spu-llm calibrate widens them"
        )
    first, *later = [site for site, out in zip(sites, left, strict=True) if out]
    more = f" (and at {len(later)} later ones, perhaps because of that)" if later else ""
    return (
        f"{_LEFT}, first at {first}{more}. Nothing else of this step was opened. The provider does "
        "not know where, and widens ranges with spu-llm calibrate; to tell it says a little of "
        "your text"
    )


require = protocol_op(
    "require",
    reference=lambda outside, counts, x, *, sites: x,
    two_party=_require_two_party,
    owners=lambda outside, counts, x, *, sites: [x],
    cost=lambda outside, counts, x, *, sites: Cost(),
    functionality=Functionality(client="if the bit is set, which counts are not zero"),
    simulate=lambda rank, prg, common, inputs, outputs, *, sites: View([], []),
    non_interactive=True,
)
"""x as it is, if the opened bit `outside` is not set; else RangeError at both parties, once the
client has learned which of the shared `counts` [site] are not zero, by the names in `sites`. In
plaintext x: floats hold everywhere. Cost and view are those of a call that returns."""


def when_in_range(outside: Mapping[str, Any], x: Any) -> Any:
    """Return x, once both parties have seen that all shared counts of `outside` (int32 scalars, by
    the names of their sites) are zero; raise RangeError at both if one is not, which names the
    sites to the client. What is opened of x, or of anything made from it, is opened after this bit.
    """
    counts = jnp.stack(list(outside.values()))
    label = "whether activations left their ranges"
    opened = reveal(nonzero(jnp.sum(counts)), to=Owner.PUBLIC, label=label)
    return require(opened, counts, x, sites=tuple(outside))


def count_outside(not_below: Sequence[Any], below: Sequence[Any]) -> Any:
    """Count how many of the shared 0-1 integers `not_below` are 1 and of `below` are 0, as an
    int32. For bits [x < low] and [x < high] that is zero if and only if every x is in [low, high).
    """
    ones = sum(jnp.sum(x) for x in not_below)
    return ones + sum(int(np.prod(x.shape, dtype=int)) - jnp.sum(x) for x in below)
