"""Packed products: matrices of masks times each other, many words to a ciphertext."""
