"""The wire between the two parties: one connection that carries everything, and its control."""
