"""From a JAX function to a plan: owners, linear work on shares, what a call takes."""
