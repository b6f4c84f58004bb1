"""Products of random elements of a prime field, 8192 to a ciphertext."""
