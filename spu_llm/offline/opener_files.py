"""Where the results of a batch are: in its folder, or in an object, which a file there opens."""

from __future__ import annotations

import os
import re
from pathlib import Path

from spu_llm.offline.contents import damaged, sealed, unsealed
from spu_llm.offline.sealed_objects import KEY_BYTES, OBJECT_NAME, Opener

RESULTS = "results.npy"
# The size is in the name, for those who may list files and not read them.
STORED = re.compile(r"stored-([1-9][0-9]{0,8})\.json")


def stored_in(path: Path, *, beside: bool = False) -> Path | None:
    """Return the file that says how the results of the batch in folder `path` are opened; None
    where they are in the folder. `beside`: even so, after a crash that left it there.
    """
    names = os.listdir(path)
    stored = [name for name in names if STORED.fullmatch(name)]
    if len(stored) > 1:
        raise damaged(path / stored[0])
    return path / stored[0] if stored and (beside or RESULTS not in names) else None


def object_bytes(name: str) -> int:
    """Return the bytes of the object that the file of this name opens; 0 for other files."""
    stored = STORED.fullmatch(name)
    return int(stored[1]) if stored else 0


def opener_in(path: Path) -> Opener:
    """Read what opens an object from such a file. PoolError when it is damaged."""
    fields = unsealed(path)
    try:
        opener = Opener(fields["object"], object_bytes(path.name), bytes.fromhex(fields["key"]))
        fits = OBJECT_NAME.fullmatch(opener.name) and len(opener.key) == KEY_BYTES
    except (KeyError, TypeError, ValueError):
        fits = None
    if not fits:
        raise damaged(path)
    return opener


def name_of(opener: Opener) -> str:
    """Return the name of the file that opens an object."""
    return f"stored-{opener.nbytes}.json"


def content_of(opener: Opener) -> bytes:
    """Return the contents of the file that opens an object."""
    return sealed({"object": opener.name, "key": opener.key.hex()})
