"""The hints of a model on all machines of a provider's cluster, which have one key.

So a client that comes to another machine has the hints already, and what it sees is one provider.
Each machine makes the hints by itself, from the front door's key, which comes to it with a
session's task.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from spu_llm.offline.durable import drawn_once
from spu_llm.offline.silent.store import default_directory, provider_key
from spu_llm.service.supervisor import kept_folders


@dataclass(frozen=True)
class SharedHints:
    """The hints of one version of a model. `folder`: its name, by version and key."""

    folder: str
    key: bytes = field(repr=False)

    @staticmethod
    def of(own: Path) -> SharedHints:
        """Return the hints whose folder at the front door is `own`, with their key. PoolError when
        it has none and none can be made.
        """
        kept_folders(own, None)
        key = provider_key(own)
        name = own.name.encode() + hashlib.sha256(key).digest()
        return SharedHints(hashlib.sha256(name).hexdigest()[:32], key)


def folder_here(name: str) -> Path:
    """Return the folder of a machine's hints, for the name of `SharedHints`."""
    return default_directory("provider") / name


def keep_key(folder: Path, key: bytes) -> None:
    """Have the hints in `folder`, which has its name by `key`, made from it. PoolError where the
    key cannot be kept.
    """
    drawn_once(folder / "key", key)
