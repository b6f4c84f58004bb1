"""Hand-written two-party protocols."""
