"""Confidential prompting: a prompt's keys and values at a vault, all else at the model's owner."""
