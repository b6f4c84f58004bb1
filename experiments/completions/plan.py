"""What complete generations are measured of: systems and ways of drawing, in tables' order."""

from __future__ import annotations

SYSTEMS = ("stock", "ours-standard", "ours-drafted")
MODES = ("greedy", "sampled")
