"""What a round is worth in material: how ops choose between fewer rounds and fewer comparisons.

Deeper trees and narrower matches take fewer products of bits, all made ahead of time, and more
rounds online. A plan's price is the sum of both, in seconds, on a default network between a local
and a wide one: a round takes 30 ms, and 100 Mbit/s pass each way. A product of bits costs what SPU
takes for it with one core at each party: 0.07 us, and 0.16 us of extending its stock of transfers.

Both parties choose alike, from public sizes.
"""

from __future__ import annotations

from protocols.bits.gates import Gate, recipe
from protocols.bits.planes import words_for
from spu_llm.core.op import Cost

ROUND_S = 30e-3
BYTE_S = 8 / 100e6
PRODUCT_S = 230e-9


def products(gate: Gate, rows: int, nodes: int) -> int:
    """Products of bits that `nodes` instances for each of `rows` rows take; units are 64 rows."""
    return 64 * words_for(rows) * nodes * recipe(gate).products


def price(cost: Cost, bit_products: int) -> float:
    """Seconds that rounds, bytes (both directions at once) and products of bits are worth."""
    sent = max(cost.client_to_provider, cost.provider_to_client)
    return ROUND_S * cost.rounds + BYTE_S * sent + PRODUCT_S * bit_products
