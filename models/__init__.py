"""JAX models, checkpoints and the training of the shipped pair."""
