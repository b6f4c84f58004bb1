"""The files of a model directory: their names, where they may lie, and how their JSON is read.

A directory may come from anybody. A link in it is followed within the directory and to the blobs of
the same model in a Hugging Face cache (models--NAME/snapshots/REVISION/FILE leads to
models--NAME/blobs), and nowhere else. JSON is refused beyond a size and depth, or when an object
has a name twice.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError
from spu_llm.core.json_values import names_once, shown

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # of weights in several files
RANGES_FILE = "ranges.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEXT_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE)

# Far above published ones: a vocabulary of 256,000 tokens takes 35 MB.
_MOST_MB: Mapping[str, int] = {TOKENIZER_FILE: 64}
_MOST_MB_OF_OTHERS = 4
_MOST_LEVELS = 32
_MOST_SHARDS = 1000
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")

_ALL = (
    CONFIG_FILE,
    WEIGHTS_FILE,
    INDEX_FILE,
    RANGES_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    GENERATION_FILE,
    TEMPLATE_FILE,
)


def files_of(directory: Path) -> list[Path]:
    """Return the paths, links followed, of those files of a model directory that are read.
    InputError when a link leads out of the directory.
    """
    shards = () if (directory / WEIGHTS_FILE).exists() else (shards_of(directory) or {}).values()
    names = (*_ALL, *sorted(set(shards)))
    return [place_of(directory / name) for name in names if (directory / name).exists()]


def shards_of(directory: Path) -> dict[str, str] | None:
    """Return the name of the file that holds each tensor of a model directory, None where there is
    no index. InputError when the index cannot be read.
    """
    path = Path(directory) / INDEX_FILE
    if not path.exists():
        return None
    content = read_json(path, "")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path} has no weight_map; copy it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise InputError(
                f"{path} puts {shown(tensor)} into {shown(name)}, which is no name of a "
                "safetensors file beside it; copy it again"
            )
    if len(set(weight_map.values())) > _MOST_SHARDS:
        raise InputError(f"{path} names more than {_MOST_SHARDS} files; copy it again")
    return weight_map


def place_of(path: Path) -> Path:
    """Return the path of a file of a model directory, links followed. InputError when a link leads
    out of the directory.
    """
    place, directory = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    roots = [directory]
    for parent in directory.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            roots.append(parent.parent / "blobs")
    if not any(place.is_relative_to(root) for root in roots):
        raise InputError(
            f"{path} is a link that leads out of the model's directory; put the file itself there"
        )
    return place


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole, or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)


def read_json(path: Path, if_missing: str) -> Any:
    """Return the content of a JSON file of a model directory. InputError when it cannot be read;
    `if_missing` says what to do when it is missing.
    """
    return parsed(path, read_file(path, if_missing))


def read_file(path: Path, if_missing: str) -> bytes:
    """Return the bytes of a file of a model directory other than its weights; errors of
    `read_json`.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a directory; give the path of a model directory")
    most = _MOST_MB.get(path.name, _MOST_MB_OF_OTHERS)
    try:
        place = place_of(path)
        state = place.stat()
        if not stat.S_ISREG(state.st_mode):
            raise InputError(f"{path} is not a file; copy it again")
        if state.st_size > most << 20:
            raise InputError(f"{path} has more than {most} MB; copy it again")
        return place.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} is missing; {if_missing}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def parsed(path: Path, data: bytes) -> Any:
    """Return the JSON value in `data`. InputError, which calls it `path`, when it is not valid."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=names_once)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); copy it again") from None
    except RecursionError:
        raise InputError(_too_deep(path)) from None
    if not _is_shallow(value):
        raise InputError(_too_deep(path))
    return value


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        level = [outer for outer in level if isinstance(outer, dict | list)]
        if not level:
            return True
        level = [
            part for outer in level for part in (outer if type(outer) is list else outer.values())
        ]
    return False


def _too_deep(path: Path) -> str:
    return f"{path} is nested in more than {_MOST_LEVELS} levels; copy it again"
