"""Functions of a model: maximum, exponential, pieces, norms, layers."""
