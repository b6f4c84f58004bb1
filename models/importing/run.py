"""Import of a model into a directory that `models` reads, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.files import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
)
from models.hf import load_config
from models.importing import directory, gguf_model
from models.importing.gguf_file import read_gguf
from models.importing.gguf_tokenizer import tokenizer_of
from models.importing.gguf_values import size_of
from models.importing.safetensors_file import write_safetensors
from models.shards import open_weights
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError


def import_model(source: Path, out: Path) -> None:
    """Write the model in `source`, a directory or a GGUF file, into the directory `out`, which must
    not exist yet. InputError when it cannot be read, is not supported, or cannot be written; then
    nothing is written.
    """
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} is there already; give --out a name that is free")
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    except OSError as error:
        raise InputError(f"{out} cannot be made: {error.strerror}; choose another --out") from None
    try:
        (_import_directory if source.is_dir() else _import_gguf)(source, made)
        made.chmod(0o777 & ~_umask())
        made.rename(out)
    except InputError as error:  # of what was made of the file
        raise InputError(str(error).replace(f"{made}/", f"{source}: ")) from None
    except OSError as error:
        raise InputError(
            f"{out} cannot be written: {error.strerror}; choose another --out"
        ) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _import_gguf(source: Path, made: Path) -> None:
    file = read_gguf(source, size_of)
    config, tokenizer = gguf_model.config_of(file), tokenizer_of(file)
    _check(
        made,
        {
            CONFIG_FILE: config,
            TOKENIZER_FILE: tokenizer.tokenizer,
            TOKENIZER_CONFIG_FILE: tokenizer.config,
            GENERATION_FILE: tokenizer.generation,
        },
    )
    write_safetensors(made / WEIGHTS_FILE, gguf_model.tensors_of(file, config))


def _import_directory(source: Path, made: Path) -> None:
    _check(made, directory.json_of(source))
    with open_weights(source) as weights:
        write_safetensors(made / WEIGHTS_FILE, directory.tensors_of(source, weights))


def _check(made: Path, contents: Mapping[str, Any]) -> None:
    """Write JSON files and load them as a command will, before the weights are written."""
    for name, content in contents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (made / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    load_config(made, encoders=True)
    Tokenizer.load(made)


def _umask() -> int:
    """Return the process's umask, which cannot be read without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
