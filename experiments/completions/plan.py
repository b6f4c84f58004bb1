"""What complete generations are measured of: systems and ways of drawing, in tables' order, and the
parts of a run.
"""

from __future__ import annotations

SYSTEMS = ("stock", "ours-standard", "ours-drafted")
MODES = ("greedy", "sampled")
# What a run's costs add up to, the hint apart, which is kept.
PARTS = ("launch", "set_up", "material", "planning", "prefill", "decode")
