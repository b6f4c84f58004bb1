"""The training text: the running interpreter's own standard library.

Nothing is downloaded and the licence is Python's. Files are taken in sorted order; about one in
sixteen is held out, by the hash of its path, so that the split is the same on every machine. The
manifest (`corpus.json`) names every file with its size and SHA-256, so that a later evaluation can
tell whether its interpreter still has the very files that the models did, or did not, see.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Tests repeat themselves, the codec tables and topic texts are data rather than code.
SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class CorpusFile:
    """One source file; `path` is relative to the standard library, with forward slashes."""

    path: str
    size: int  # bytes
    sha256: str
    held_out: bool


def library_directory() -> Path:
    """Return the directory of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(path: str) -> bool:
    """Return whether the file at the relative `path` is kept from training."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def list_files() -> list[CorpusFile]:
    """Return every corpus file of the running interpreter's library, sorted by path."""
    library, files = library_directory(), []
    for absolute in library.rglob("*.py"):
        relative = absolute.relative_to(library)
        # Build-time configuration carries paths of the machine it was built on.
        if SKIPPED_DIRECTORIES.intersection(relative.parts) or relative.name.startswith(
            "_sysconfigdata"
        ):
            continue
        data = absolute.read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        if data.strip():
            path, digest = relative.as_posix(), hashlib.sha256(data).hexdigest()
            files.append(CorpusFile(path, len(data), digest, is_held_out(path)))
    return sorted(files, key=lambda file: file.path)


def read_text(file: CorpusFile) -> str:
    """Return the text of a file from `list_files`."""
    data = (library_directory() / file.path).read_bytes()
    return data.decode().replace("\r\n", "\n")


def write_manifest(path: Path, files: list[CorpusFile]) -> None:
    """Write `corpus.json`: one file per line as [path, size, sha256, held out as 0 or 1]."""
    rows = [json.dumps([f.path, f.size, f.sha256, int(f.held_out)]) for f in files]
    body = ",\n".join(rows)
    version = json.dumps(platform.python_version())
    path.write_text(f'{{"python": {version}, "files": [\n{body}\n]}}\n')


def read_manifest(path: Path) -> list[CorpusFile]:
    """Return the files of a manifest that `write_manifest` wrote."""
    rows = json.loads(path.read_text())["files"]
    return [CorpusFile(name, size, sha, bool(held)) for name, size, sha, held in rows]
