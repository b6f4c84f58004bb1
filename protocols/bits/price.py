"""What a round is worth in correlated randomness: how ops choose between fewer rounds and fewer
comparisons.

Deeper trees and narrower matches take fewer random transfers, all made ahead of time, and more
rounds online. A plan's price is the sum of both, in time, on a default network between a local
and a wide one: a round takes 30 ms, and 100 Mbit/s pass each way. A transfer costs what extending
takes for it with one core at each party, and each bit that corrects it its time on that network.

Both parties choose alike, from public sizes.
"""

from __future__ import annotations

from protocols.bits.planes import words_for
from protocols.bits.polynomials import Gate
from protocols.bits.stars import correction_bits, transfers
from spu_llm.core.op import Cost

# Nanoseconds, whole: both parties must come to the very same plans.
ROUND = 30_000_000
BYTE = 80
TRANSFER = 80
CORRECTION = 6


def ahead(gate: Gate, rows: int, nodes: int) -> int:
    """Return the worth of what `nodes` instances for each of `rows` rows take, in nanoseconds;
    units are 64 rows.
    """
    each = round(TRANSFER * sum(transfers(gate)) + CORRECTION * correction_bits(gate))
    return 64 * words_for(rows) * nodes * each


def price(cost: Cost, made_ahead: int) -> int:
    """Return the worth of rounds and bytes (both ways at once), and of what is made ahead, in
    nanoseconds.
    """
    sent = max(cost.client_to_provider, cost.provider_to_client)
    return ROUND * cost.rounds + BYTE * sent + made_ahead
