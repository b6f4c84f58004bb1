"""Whether all activations of a step stayed where the functions on shares hold, and nothing else.

Functions on a bounded range count what left it (`protocols.nonlinear.rms_norm`). The shared count c
is multiplied by a fresh shared random word and opened to the client: 0 for c = 0. For any other c
it is a random multiple, which tells the client c's factors of two and nothing more; the text ends
there, with an error.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from protocols.convert import arith_cost, as_arith
from protocols.product import correct_product, multiply_cost, multiply_words
from protocols.simulated import uniform_messages
from spu_llm.errors import RangeError
from spu_llm.op import Cost, protocol_op
from spu_llm.party import Party
from spu_llm.reveal import reveal
from spu_llm.values import Arith, Owner, Value


def _two_party(party: Party, x: Value) -> Arith:
    """1. Each party draws a word; their sum is the factor. 2. A Beaver product."""
    share = as_arith(party, x)
    # 1.
    factor = party.mask((math.prod(x.shape),))
    # 2.
    words = multiply_words(party, share.words.reshape(-1), factor).reshape(x.shape)
    return Arith(words, share.dtype, share.frac_bits)


def _cost(x: Value) -> Cost:
    return arith_cost(x) + multiply_cost(math.prod(x.shape))


random_multiple = protocol_op(
    "random_multiple",
    reference=lambda x: x,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, correct_product),
)
"""x times a uniform word that nobody knows; in plaintext x itself, which is zero just as often."""


def sound(outside: Any) -> Any:
    """int32 of the client's: 0 if the shared count `outside` (int32 scalar) is 0, else random."""
    label = "whether activations stayed in range"
    return reveal(random_multiple(outside), to=Owner.CLIENT, label=label)


def require_sound(opened: np.ndarray | None) -> None:
    """RangeError unless the client's result of `sound` is 0."""
    if opened is not None and int(opened) != 0:
        raise RangeError(
            "activations left the range in which the functions on shares hold; nothing of this "
            "step was used. The model needs wider ranges (protocols/nonlinear.py)"
        )
