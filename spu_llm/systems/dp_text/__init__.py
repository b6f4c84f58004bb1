"""Text that resembles sensitive references, with differential privacy (InvisibleInk)."""
