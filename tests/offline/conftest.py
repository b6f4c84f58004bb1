"""Fixtures of two pools."""

from tests.offline.parties import no_waiting_for_the_disk, parties, stored, threads

__all__ = ["no_waiting_for_the_disk", "parties", "stored", "threads"]
