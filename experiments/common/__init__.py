"""What studies share: both parties on this machine, costs, saved results."""
