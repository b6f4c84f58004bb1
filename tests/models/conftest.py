"""Fixtures of checkpoint directories."""

from tests.models.checkpoints import directory

__all__ = ["directory"]
