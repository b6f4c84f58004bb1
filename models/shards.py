"""Weights of a model directory: one safetensors file, or several with an index that says which file
holds which tensor. Tensors are read on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from models.files import INDEX_FILE, WEIGHTS_FILE, place_of, shards_of
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown


class Weights(NamedTuple):
    """Open weights."""

    path: Path
    places: Mapping[str, tuple[Path, Any]]

    def path_of(self, name: str) -> Path:
        """Return the path of the file that holds a tensor."""
        return self.places[name][0]

    def view(self, name: str) -> Any:
        """Return a tensor to be sliced by rows; slices are numpy arrays of its stored type."""
        return self.places[name][1].get_slice(name)


@contextmanager
def open_weights(directory: Path) -> Iterator[Weights]:
    """Open the weights of a model directory. InputError when they cannot be read."""
    path = Path(directory) / WEIGHTS_FILE
    index = None if path.is_file() else shards_of(directory)
    if index is None and not path.is_file():
        raise InputError(
            f"{path} is missing; save the model in safetensors format into this directory"
        )
    places: dict[str, tuple[Path, Any]] = {}
    with ExitStack() as stack:
        if index is None:
            stored = stack.enter_context(_opened(path))
            places = {name: (path, stored) for name in stored.keys()}
        else:
            path = path.with_name(INDEX_FILE)
            files = {name: path.with_name(name) for name in sorted(set(index.values()))}
            shards = {name: stack.enter_context(_opened(file)) for name, file in files.items()}
            names = {name: set(shard.keys()) for name, shard in shards.items()}
            for tensor, file in index.items():
                if tensor not in names[file]:
                    raise InputError(
                        f"{path} puts {shown(tensor)} into {file}, which lacks it; copy both again"
                    )
                places[tensor] = files[file], shards[file]
        yield Weights(path, places)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise InputError(f"{path} is missing; copy it again")
    try:
        with safe_open(place_of(path), framework="numpy") as stored:
            yield stored
    except SafetensorError as error:
        text = " ".join(str(error).split())
        raise InputError(
            f"{path} is truncated or not a safetensors file ({text}); copy it again"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
