"""What a round is worth in correlated randomness: how ops choose between fewer rounds and fewer
comparisons.

Deeper trees and narrower matches take fewer products of bits, all made ahead of time, and more
rounds online. A plan's price is the sum of both, in time, on a default network between a local
and a wide one: a round takes 30 ms, and 100 Mbit/s pass each way. A product of bits costs what SPU
takes for it with one core at each party: 0.07 us, and 0.16 us of extending its stock of transfers.

Both parties choose alike, from public sizes.
"""

from __future__ import annotations

from protocols.bits.gates import Gate, recipe
from protocols.bits.planes import words_for
from spu_llm.core.op import Cost

# Nanoseconds, whole: both parties must come to the very same plans.
ROUND = 30_000_000
BYTE = 80
PRODUCT = 230


def products(gate: Gate, rows: int, nodes: int) -> int:
    """Return how many products of bits `nodes` instances for each of `rows` rows take; units are
    64 rows.
    """
    return 64 * words_for(rows) * nodes * recipe(gate).products


def price(cost: Cost, bit_products: int) -> int:
    """Return the worth of rounds, bytes (both ways at once) and products of bits, in
    nanoseconds.
    """
    sent = max(cost.client_to_provider, cost.provider_to_client)
    return ROUND * cost.rounds + BYTE * sent + PRODUCT * bit_products
