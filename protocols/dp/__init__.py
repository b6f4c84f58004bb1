"""Differentially private choice on shares: noise, clipping, the noisy argmax."""
