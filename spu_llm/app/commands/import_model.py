"""`spu-llm import`: a published model into a directory that the other commands read."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from spu_llm.app.printing import show
from spu_llm.core.units import mb


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "import",
        help="make a model directory of a published model",
        description="Writes config.json, model.safetensors and the tokenizer's files, as the other "
        "commands read them, from a GGUF file or from a Hugging Face directory, with weights in "
        "one file or several. Quantised weights are written as float16, others as they are. "
        "Nothing is written unless all of it is.",
    )
    parser.add_argument("source", type=Path, metavar="FILE|DIR", help="a GGUF file, or a directory")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="the directory to make; there must be none of this name",
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    parser.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> None:
    from models.files import WEIGHTS_FILE
    from models.hf import load_config
    from models.importing.run import import_model

    import_model(options.source, options.out)
    config = load_config(options.out, encoders=True)
    size = (options.out / WEIGHTS_FILE).stat().st_size
    show(
        f"{options.out} written: {config.title}, {config.layers} blocks of width {config.width}, "
        f"{config.vocab_size} tokens, context {config.context}, {mb(size)}"
    )
