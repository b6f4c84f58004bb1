"""Names of what a split model is used with: modes, mechanisms of codebooks, precisions."""

from __future__ import annotations

PLAIN, NOIR, MPC = MODES = ("plain", "noir", "mpc")
MECHANISMS = ("none", "arr", "arr-renormalised", "grr", "exponential")
PRECISIONS = ("float32", "float16", "bfloat16")
CODEBOOK, PERMUTATION = LEAVE_OUT = ("codebook", "permutation")  # what noir may be without
ENDS, BACK = TUNED = ("ends", "back")  # what a tuning changes: front and back, or the back alone
EPSILON, FEATURES = 13.0, 4096  # the paper's, of its first model: of all features together
