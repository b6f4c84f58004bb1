"""Parts that all studies share: running both parties on this machine, costs, saved results."""
